// Prefix matchers: how far one group's cached blocks cover a candidate prefix.
//
// Invariants:
// - Matching never changes recency or any other state of the index.
// - A block counts as present when the index has its key in the pool, or `stored` names it (null: nothing is stored).
// - A closed group's mask is all ones. Any other mask is zeros followed by a run of ones that is `lookback_blocks` long,
//   or reaches slot 0.
//
// Thread safety: pure reads of the index.

#ifndef TOKENSPEED_PREFIX_PREFIX_MATCHER_H_
#define TOKENSPEED_PREFIX_PREFIX_MATCHER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "prefix/prefix_cache_index.h"
#include "prefix/storage_key_set.h"

namespace tokenspeed {

struct MatchRule {
  // A closed group needs every block below a boundary. Any other needs `lookback_blocks` just below it.
  bool prefix_closed = true;
  int32_t lookback_blocks = 0;
};

// 1 = the block is cached and wanted, 0 = a hole that the group does not need. The length is the number of slots
// covered.
using PrefixMask = std::vector<uint8_t>;

// The longest match within the first `end` of `keys`, in slots.
PrefixMask MatchPrefix(const MatchRule& rule, const PrefixCacheIndex& index, const BlockPool& pool,
                       std::span<const CacheKey> keys, int32_t end, const StorageKeySet* stored);

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PREFIX_MATCHER_H_
