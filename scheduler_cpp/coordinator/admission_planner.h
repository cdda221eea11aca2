// AdmissionPlanner: which cached or expiring blocks must go so that an admission fits.
//
// Invariants:
// - Pool, indexes and tables are never changed; everything is computed on shadow counters.
// - When the demand fits without eviction there are no victims and no index is touched.
// - A plan is a function of pool, indexes and request alone; what the planner remembers only saves time.
// - Blocks that the admission being planned hits or copies are never victims; neither is a pinned entry.
// - Victims are minimal: restoring any single one makes the demand not fit.
//
// Thread safety: none, because of what it remembers.

#ifndef TOKENSPEED_COORDINATOR_ADMISSION_PLANNER_H_
#define TOKENSPEED_COORDINATOR_ADMISSION_PLANNER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "coordinator/cache_group.h"

namespace tokenspeed {

struct AdmissionVictim {
  int32_t group = 0;
  CacheBlockLocation location;

  friend bool operator==(const AdmissionVictim&, const AdmissionVictim&) = default;
};

struct AdmissionRequest {
  std::span<const int32_t> blocks_needed;  // per group
  // Per group: how many of these must lie in each bucket. Empty where any bucket will do; so may be the whole.
  std::span<const std::vector<int32_t>> needed_in_bucket = {};
  // Per group: the keys and mask of the blocks this admission hits, which must survive it.
  std::span<const std::vector<CacheKey>> hit_keys;
  std::span<const PrefixMask> hit_masks;
  // Per group: the keys of the blocks that it copies, which must survive it too. Empty when it copies none.
  std::span<const std::vector<CacheKey>> copied_keys = {};
  std::span<const BlockTable> tables;  // the request's own
  // Where the request stands; its expired blocks may fund the admission. Absent for a first admission.
  std::optional<int32_t> num_computed_tokens;
};

// Borrows groups and pool, which must outlive it and stay where they are.
class AdmissionPlanner {
 public:
  AdmissionPlanner(std::span<const CacheGroup> groups, const BlockPool& pool) : groups_(groups), pool_(pool) {}

  // The victims, least valuable first, or nothing when no eviction makes the demand fit. A victim that the request's own
  // table still holds becomes free when its expired slots are reclaimed.
  std::optional<std::vector<AdmissionVictim>> Plan(const AdmissionRequest& request);

 private:
  // What evicting everything evictable would leave free: at most that, for as long as no handle lets go of a block.
  // A refusal measures it, so that the next waiting request is refused without walking the indexes again.
  struct ObtainableCapacity {
    uint64_t dropped_handles = 0;
    int64_t empty_parents = 0;
    std::vector<int64_t> free_slots;  // per group
  };

  std::span<const CacheGroup> groups_;
  const BlockPool& pool_;
  std::optional<ObtainableCapacity> obtainable_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_ADMISSION_PLANNER_H_
