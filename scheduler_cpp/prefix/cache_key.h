// CacheKey: the name under which the contents of one block can be found again.
//
// Invariants: all four fields take part in equality and in hashing. A prefix page of P tokens expands, in a group of
// block granularity g, to P/g keys with page_offset 0..P/g-1 in token order; a partial page, to those of its blocks.
// Thread safety: values.

#ifndef TOKENSPEED_PREFIX_CACHE_KEY_H_
#define TOKENSPEED_PREFIX_CACHE_KEY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefix/prefix_hasher.h"

namespace tokenspeed {

// Namespaces: whole prefix pages, and beginnings of them that somebody left (partial_pages.h).
inline constexpr uint32_t kWholePages = 0;
inline constexpr uint32_t kPartialPages = 1;

struct CacheKey {
  PrefixHash content_hash;
  uint32_t namespace_id = kWholePages;
  int32_t group_id = 0;
  int32_t page_offset = 0;

  friend bool operator==(const CacheKey&, const CacheKey&) = default;
};

struct CacheKeyHash {
  // Not noexcept: libstdc++ keeps the hash of a fast function that cannot throw nowhere, and would fetch the key of every
  // neighbour in a bucket to compute it again.
  std::size_t operator()(const CacheKey& key) const;
};

// Keys of consecutive prefix pages, page by page and in token order within each.
std::vector<CacheKey> ExpandCacheKeys(std::span<const PrefixHash> hashes, int32_t group_id,
                                      int32_t blocks_per_prefix_page);

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_CACHE_KEY_H_
