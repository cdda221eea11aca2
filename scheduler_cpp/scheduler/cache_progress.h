// CacheProgress: what the cache knows of a resident request, and which of its snapshots may be shared.
//
// Invariants: materialized_state_boundaries() is increasing, aligned to the prefix granularity, and holds only
// boundaries at which a scheduled step writes a snapshot.
// Thread safety: a value. Copying one without boundaries allocates nothing, so decode steps copy it freely.

#ifndef TOKENSPEED_SCHEDULER_CACHE_PROGRESS_H_
#define TOKENSPEED_SCHEDULER_CACHE_PROGRESS_H_

#include <cstdint>
#include <span>
#include <vector>

namespace tokenspeed {

class CacheProgress {
 public:
  int32_t num_hashed_pages = 0;  // prefix pages claimed from the cache or published to it
  uint64_t access_epoch = 0;
  int32_t promotion_boundary_tokens = 0;  // 0 = none pending

  // Boundaries, tokens, whose snapshot is written and which are not hashed yet.
  std::span<const int32_t> materialized_state_boundaries() const { return state_boundaries_; }
  bool HasMaterialized(int32_t boundary) const;
  // Ignored unless the boundary is a multiple of `prefix_granularity`, beyond the hashed pages and beyond the last one
  // recorded.
  void Record(int32_t boundary, int32_t prefix_granularity);
  // Forgets the boundaries that the hashed pages cover. Only after an admission that succeeded: a refused one publishes
  // nothing, and the proof is still needed.
  void DiscardHashed(int32_t prefix_granularity);

 private:
  std::vector<int32_t> state_boundaries_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_CACHE_PROGRESS_H_
