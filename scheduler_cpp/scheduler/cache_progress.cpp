#include "scheduler/cache_progress.h"

#include <algorithm>

namespace tokenspeed {

bool CacheProgress::HasMaterialized(int32_t boundary) const {
  return std::binary_search(state_boundaries_.begin(), state_boundaries_.end(), boundary);
}

void CacheProgress::Record(int32_t boundary, int32_t prefix_granularity) {
  const bool unhashed = boundary / prefix_granularity > num_hashed_pages;
  const bool advances = state_boundaries_.empty() || boundary > state_boundaries_.back();
  if (unhashed && advances && boundary % prefix_granularity == 0) state_boundaries_.push_back(boundary);
}

void CacheProgress::DiscardHashed(int32_t prefix_granularity) {
  const auto covered = [&](int32_t boundary) { return boundary / prefix_granularity <= num_hashed_pages; };
  const auto first_kept = std::find_if_not(state_boundaries_.begin(), state_boundaries_.end(), covered);
  state_boundaries_.erase(state_boundaries_.begin(), first_kept);
}

}  // namespace tokenspeed
