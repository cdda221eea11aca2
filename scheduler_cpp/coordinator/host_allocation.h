// Host allocation: finds room in the host tier for a list of blocks at once, evicting the least valuable of what is
// cached there.
//
// Invariants:
// - Partial success is normal: what cannot be placed stays empty, and only then.
// - A pinned host block is never evicted; the device tier is not touched.
// - A group's own entries go before a whole parent of anything else does; of a group's entries those that nobody has
//   ever hit go first, then the oldest.
//
// Ownership: borrows groups and pool. Thread safety: none.
// Costs: with room enough, as many picks as wishes. Under pressure one walk over a group's oldest entries per group and
// bucket, and if that is not enough one scan of all host parents.

#ifndef TOKENSPEED_COORDINATOR_HOST_ALLOCATION_H_
#define TOKENSPEED_COORDINATOR_HOST_ALLOCATION_H_

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/cache_group.h"

namespace tokenspeed {

// One host block wanted. A copy between the tiers stays with one shard, so the bucket is that of its other end.
struct HostBlockWish {
  int32_t group = 0;
  int32_t bucket = 0;

  friend auto operator<=>(const HostBlockWish&, const HostBlockWish&) = default;
};

struct HostAllocation {
  std::vector<CacheBlockRef> blocks;  // one per wish, empty where there was no room
  int32_t num_unallocated = 0;
  int32_t same_group_scans = 0;   // walks over the entries of one group
  int32_t cross_group_scans = 0;  // scans of all parents
};

HostAllocation AllocateHostBlocks(std::span<CacheGroup> groups, BlockPool& host_pool,
                                  std::span<const HostBlockWish> wishes);

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_HOST_ALLOCATION_H_
