// Rows of a request that a plan has named and whose results have not landed, oldest first.
//
// A row is known by the round that planned it, for a request is in at most one row of a round. A result that does not
// name its round is taken for the oldest row that can have produced it.
//
// Thread safety: values and pure functions. Costs: O(rows out), of which there are one or two.

#ifndef TOKENSPEED_SCHEDULER_ROWS_OUT_H_
#define TOKENSPEED_SCHEDULER_ROWS_OUT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tokenspeed {

// The round of a result that does not name one; rounds count from 1.
inline constexpr int64_t kAnyRound = 0;

struct RowOut {
  int64_t round = 0;
  int32_t most_tokens = 0;  // that its result can have; 0 for a chunk that does not complete its prompt
};

using RowsOut = std::vector<RowOut>;

// The row that a result of `num_tokens` belongs to; nothing when no row of that round is out.
inline std::optional<std::size_t> RowOfResult(std::span<const RowOut> rows, int64_t num_tokens, int64_t round) {
  for (std::size_t index = 0; index < rows.size(); ++index) {
    if (round == kAnyRound ? num_tokens == 0 || rows[index].most_tokens > 0 : rows[index].round == round) return index;
  }
  const bool oldest = round == kAnyRound && !rows.empty();
  return oldest ? std::optional<std::size_t>(0) : std::nullopt;
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_ROWS_OUT_H_
