// Capacity that a prompt takes beyond the tokens it computes now: the first decode step, and headroom so
// that a running request is rarely stopped. Reserve is storage only and never counts as progress.

#ifndef TOKENSPEED_SCHEDULER_RESERVE_H_
#define TOKENSPEED_SCHEDULER_RESERVE_H_

#include <cstdint>

#include "scheduler/cache_group_config.h"

namespace tokenspeed {

// Tokens of headroom granted per admission; every retraction of a request grants as much again.
inline constexpr int64_t kSafeHeadroomTokens = 4096;

struct GenerationBudget {
  int64_t max_new_tokens = 0;  // 0 = undeclared
  int64_t generated = 0;
  int64_t generated_at_admission = 0;
  int64_t retractions = 0;

  // Tokens to reserve for generation when the request is admitted now.
  [[nodiscard]] int64_t AdmissionHeadroom() const;
  // Whether the headroom of the present admission already holds everything that may be generated. Judged on
  // the rest at admission: decoding spends the reserve exactly as fast as the present rest shrinks.
  [[nodiscard]] bool ReserveCoversGeneration() const;
};

struct PrefillReserve {
  int64_t decode_width = 0;     // tokens of one decode step
  bool completes = false;            // this chunk finishes the prompt
  int64_t prompt_headroom = 0;  // tokens, unscheduled prompt included
  bool growth = false;               // a state group needs a block to move on to
  int64_t unrecycled = 0;       // tokens whose sliding blocks others may hold on to

  [[nodiscard]] int64_t TokensFor(const CacheGroupConfig& group) const;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_RESERVE_H_
