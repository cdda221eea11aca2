// Which results may land on a resident request. One home for the rule, whichever way results arrive.
//
// Thread safety: values and pure functions.

#ifndef TOKENSPEED_SCHEDULER_LANDING_RULES_H_
#define TOKENSPEED_SCHEDULER_LANDING_RULES_H_

#include <cstdint>

#include "scheduler/request.h"

namespace tokenspeed {

// What decides about the next result of a resident request.
struct LandingState {
  RequestState state = RequestState::kSubmitted;
  int64_t results_in_flight = 0;
  int64_t token_size = 0;
  int64_t covered_tokens = 0;

  static LandingState Of(const Request& request) {
    return LandingState{.state = request.state(),
                        .results_in_flight = request.resources().results_in_flight,
                        .token_size = request.TokenSize(),
                        .covered_tokens = request.resources().covered_tokens};
  }
};

enum class LandingVerdict : uint8_t {
  kAllowed,
  kNothingOut,        // no forward of the request is in flight
  kPromptUnfinished,  // a token for a chunk that does not complete its prompt
  kTooManyTokens,     // more than the scheduled forwards can have produced
};

inline LandingVerdict JudgeLanding(const LandingState& at, int64_t num_tokens) {
  if (at.results_in_flight == 0) return LandingVerdict::kNothingOut;
  if (num_tokens == 0) return LandingVerdict::kAllowed;
  if (at.state == RequestState::kPrefilling) return LandingVerdict::kPromptUnfinished;
  if (at.token_size + num_tokens - 1 > at.covered_tokens) return LandingVerdict::kTooManyTokens;
  return LandingVerdict::kAllowed;
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_LANDING_RULES_H_
