// Which results may land on a resident request. One home for the rule, whichever way results arrive.
//
// Thread safety: values and pure functions.

#ifndef TOKENSPEED_SCHEDULER_LANDING_RULES_H_
#define TOKENSPEED_SCHEDULER_LANDING_RULES_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "scheduler/request.h"

namespace tokenspeed {

// What decides about the next result of a resident request.
struct LandingState {
  RequestState state = RequestState::kSubmitted;
  std::span<const RowOut> rows_out;
  int64_t token_size = 0;
  int64_t covered_tokens = 0;

  static LandingState Of(const Request& request) {
    return LandingState{.state = request.state(),
                        .rows_out = request.resources().rows_out,
                        .token_size = request.TokenSize(),
                        .covered_tokens = request.resources().covered_tokens};
  }
};

enum class LandingVerdict : uint8_t {
  kAllowed,
  kNothingOut,        // no forward of the request is in flight
  kOtherRound,        // some are, but not of the round that the result names
  kOutOfOrder,        // an older row that yields tokens has not landed
  kPromptUnfinished,  // a token for a chunk that does not complete its prompt
  kTooManyTokens,     // more than the row can have produced
};

inline LandingVerdict JudgeLanding(const LandingState& at, int64_t num_tokens, int64_t round) {
  if (at.rows_out.empty()) return LandingVerdict::kNothingOut;
  const auto row = RowOfResult(at.rows_out, num_tokens, round);
  if (!row.has_value()) return LandingVerdict::kOtherRound;
  const auto before = at.rows_out.first(*row);
  if (std::ranges::any_of(before, [](const RowOut& older) { return older.most_tokens > 0; })) {
    return LandingVerdict::kOutOfOrder;
  }
  if (num_tokens == 0) return LandingVerdict::kAllowed;
  if (at.state == RequestState::kPrefilling) return LandingVerdict::kPromptUnfinished;
  const bool too_many =
      num_tokens > at.rows_out[*row].most_tokens || at.token_size + num_tokens - 1 > at.covered_tokens;
  return too_many ? LandingVerdict::kTooManyTokens : LandingVerdict::kAllowed;
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_LANDING_RULES_H_
