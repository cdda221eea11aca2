#include "scheduler/reserve.h"

#include <algorithm>

namespace tokenspeed {

int64_t GenerationBudget::AdmissionHeadroom() const {
  const int64_t remaining = std::max<int64_t>(0, max_new_tokens - generated);
  return std::min(remaining, kSafeHeadroomTokens * (1 + retractions));
}

bool GenerationBudget::ReserveCoversGeneration() const {
  const int64_t remaining = std::max<int64_t>(0, max_new_tokens - generated_at_admission);
  return max_new_tokens > 0 && kSafeHeadroomTokens * (1 + retractions) >= remaining;
}

int64_t PrefillReserve::TokensFor(const CacheGroupConfig& group) const {
  const int64_t decode = completes ? decode_width : 0;
  if (group.IsState()) {
    return growth ? std::max<int64_t>(group.block_granularity, decode_width) : 0;
  }
  if (group.IsSliding()) {
    const int64_t kept = int64_t{group.sliding_window_tokens.value_or(1)} - 1;
    return std::max(decode, std::min({prompt_headroom, unrecycled, kept}));
  }
  return std::max(decode, prompt_headroom);
}

}  // namespace tokenspeed
