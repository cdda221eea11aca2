#include "prefix/cache_key.h"

#include <cstring>

namespace tokenspeed {

std::size_t CacheKeyHash::operator()(const CacheKey& key) const {
  // The digest is uniform already; the small fields only have to be spread over the word.
  uint64_t mixed;
  std::memcpy(&mixed, key.content_hash.bytes.data(), sizeof(mixed));
  const uint64_t fields = (uint64_t{key.namespace_id} << 32) ^ (static_cast<uint64_t>(key.group_id) << 20) ^
                          static_cast<uint64_t>(key.page_offset);
  constexpr uint64_t kOddMultiplier = 0x9e3779b97f4a7c15;
  return static_cast<std::size_t>(mixed ^ (fields * kOddMultiplier));
}

std::vector<CacheKey> ExpandCacheKeys(std::span<const PrefixHash> hashes, int32_t group_id,
                                      int32_t blocks_per_prefix_page) {
  std::vector<CacheKey> keys;
  keys.reserve(hashes.size() * static_cast<std::size_t>(blocks_per_prefix_page));
  for (const PrefixHash& hash : hashes) {
    for (int32_t offset = 0; offset < blocks_per_prefix_page; ++offset) {
      keys.push_back({.content_hash = hash, .namespace_id = kWholePages, .group_id = group_id, .page_offset = offset});
    }
  }
  return keys;
}

}  // namespace tokenspeed
