#include "prefix/prefix_matcher.h"

#include <algorithm>

namespace tokenspeed {
namespace {

bool IsPresent(const PrefixCacheIndex& index, const BlockPool& pool, const StorageKeySet* stored, const CacheKey& key) {
  return index.Contains(pool, key) || (stored != nullptr && stored->Contains(key));
}

PrefixMask MatchClosed(const PrefixCacheIndex& index, const BlockPool& pool, std::span<const CacheKey> keys,
                       const StorageKeySet* stored) {
  const auto absent = std::find_if(keys.begin(), keys.end(),
                                   [&](const CacheKey& key) { return !IsPresent(index, pool, stored, key); });
  return PrefixMask(static_cast<std::size_t>(absent - keys.begin()), 1);
}

// Scans from the right: the first run that is long enough, or that reaches the start, ends at the largest boundary.
PrefixMask MatchWindow(const PrefixCacheIndex& index, const BlockPool& pool, std::span<const CacheKey> keys,
                       const StorageKeySet* stored, int32_t lookback_blocks) {
  int32_t boundary = static_cast<int32_t>(keys.size());
  for (int32_t slot = boundary - 1; slot >= 0; --slot) {
    if (!IsPresent(index, pool, stored, keys[slot])) {
      boundary = slot;
    } else if (boundary - slot == lookback_blocks || slot == 0) {
      PrefixMask mask(static_cast<std::size_t>(boundary), 0);
      std::fill(mask.begin() + slot, mask.end(), uint8_t{1});
      return mask;
    }
  }
  return {};
}

}  // namespace

PrefixMask MatchPrefix(const MatchRule& rule, const PrefixCacheIndex& index, const BlockPool& pool,
                       std::span<const CacheKey> keys, int32_t end, const StorageKeySet* stored) {
  keys = keys.first(static_cast<std::size_t>(end));
  if (rule.prefix_closed) return MatchClosed(index, pool, keys, stored);
  if (rule.lookback_blocks == 0) return PrefixMask(keys.size(), 0);
  return MatchWindow(index, pool, keys, stored, rule.lookback_blocks);
}

}  // namespace tokenspeed
