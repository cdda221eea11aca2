// Convergence: the longest prefix that all groups can resume from.
//
// Invariants:
// - num_common_tokens is a multiple of the prefix granularity, supported by every group, and the largest such boundary;
//   it does not depend on the order of the groups that are not closed. It is never below the floor.
// - Each mask covers exactly the tokens from the floor to num_common_tokens, save that of a group that shares no
//   prefixes: it is empty. The mask of a group left out of the matching is all holes.
// - A cache in which no group is matched has nothing in common with any prompt.
// - Read-only: no epoch and no flag of any index changes.
//
// Thread safety: pure reads.

#ifndef TOKENSPEED_COORDINATOR_PREFIX_CONVERGENCE_H_
#define TOKENSPEED_COORDINATOR_PREFIX_CONVERGENCE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/cache_group.h"

namespace tokenspeed {

struct ConvergedPrefix {
  int32_t num_common_tokens = 0;
  // What the closed groups alone cover; 0 when there is none.
  int32_t prefix_closed_tokens = 0;
  std::vector<PrefixMask> masks;  // per group
};

// Who takes part. A state that arrives from elsewhere needs no snapshot at the boundary.
enum class MatchedGroups : uint8_t { kAll, kAllButState };

// Where a tier is probed.
struct TierProbe {
  const BlockPool& pool;
  // A boundary of the prefix granularity below which everything is there already, in a tier above.
  int32_t floor_tokens = 0;
  const StorageKeySet* stored = nullptr;  // what counts as present beside the pool; null for nothing
};

// `keys[g]` are the expanded keys of the candidate pages in group g, of which the first `num_prefix_pages` are tried.
ConvergedPrefix ConvergePrefix(std::span<const CacheGroup> groups, const TierProbe& tier,
                               std::span<const std::vector<CacheKey>> keys, int32_t num_prefix_pages,
                               int32_t prefix_granularity, MatchedGroups matched = MatchedGroups::kAll);

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_PREFIX_CONVERGENCE_H_
