// AdmissionPlanner: which cached or expiring blocks must go so that an admission fits.
//
// Invariants:
// - Read-only: pool, indexes and tables are never changed; everything is computed on shadow counters.
// - When the demand fits without eviction there are no victims and no index is touched.
// - Blocks hit by the admission being planned are never victims; neither is a pinned entry.
// - Victims are minimal: restoring any single one makes the demand not fit.
//
// Thread safety: pure reads.

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
  // Per group: the keys and mask of the blocks this admission hits, which must survive it.
  std::span<const std::vector<CacheKey>> hit_keys;
  std::span<const PrefixMask> hit_masks;
  std::span<const BlockTable> tables;  // the request's own
  // Where the request stands; its expired blocks may fund the admission. Absent for a first admission.
  std::optional<int32_t> num_computed_tokens;
};

// The victims, least valuable first, or nothing when no eviction makes the demand fit. A victim that the request's own
// table still holds becomes free when its expired slots are reclaimed.
std::optional<std::vector<AdmissionVictim>> PlanAdmission(std::span<const CacheGroup> groups, const BlockPool& pool,
                                                          const AdmissionRequest& request);

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_ADMISSION_PLANNER_H_
