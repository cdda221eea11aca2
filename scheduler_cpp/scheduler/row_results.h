// Row results: what became of a step's rows, as parallel arrays instead of one event a row. A row is named by the
// request-pool slot that its plan gave it and by the plan's round. The slot may be somebody else's by now: a row whose
// request has ended is dropped. Where the caller gives no round (kAnyRound), it has to leave such rows out.
//
// Thread safety: values and pure functions.

#ifndef TOKENSPEED_SCHEDULER_ROW_RESULTS_H_
#define TOKENSPEED_SCHEDULER_ROW_RESULTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "scheduler/late_results.h"
#include "scheduler/request_book.h"

namespace tokenspeed {

// tokens[i] of row r follow those of row r - 1; the counts sum up to the number of tokens.
struct RowResults {
  std::span<const int32_t> slots;
  std::span<const int32_t> token_counts;
  std::span<const int32_t> tokens;
  int64_t round = kAnyRound;
};

// The requests that the rows belong to, in order; null for a row that is dropped. Throws, naming the first bad row,
// std::invalid_argument for arrays that do not fit each other, a slot that occurs twice and more tokens than a row can
// have produced; std::runtime_error for a slot without a request, without a result out, or with an unfinished prompt
// and a token.
std::vector<Request*> JudgeRows(const RequestBook& book, const LateResults& late, const RowResults& rows);

// The requests that are to finish, in order. Throws, naming the first bad slot, std::invalid_argument for a slot that
// occurs twice; std::runtime_error for a slot without a request, with an unfinished prompt, or in a peer's hands.
std::vector<Request*> JudgeFinishes(const RequestBook& book, std::span<const int32_t> slots);

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_ROW_RESULTS_H_
