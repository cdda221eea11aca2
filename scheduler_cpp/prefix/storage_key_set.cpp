#include "prefix/storage_key_set.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_set>

namespace tokenspeed {
namespace {

// Page by page in order of first appearance; within a page by offset, then by group.
void SortByPage(std::vector<CacheKey>& keys) {
  std::map<PrefixHash, std::size_t> appearance;
  for (const CacheKey& key : keys) appearance.try_emplace(key.content_hash, appearance.size());
  const auto rank = [&](const CacheKey& key) {
    return std::tuple(appearance.at(key.content_hash), key.page_offset, key.group_id, key.namespace_id);
  };
  std::sort(keys.begin(), keys.end(), [&](const CacheKey& a, const CacheKey& b) { return rank(a) < rank(b); });
}

}  // namespace

StorageKeySet::StorageKeySet(int64_t limit) : limit_(std::max<int64_t>(1, limit)) {}

void StorageKeySet::Erase(const CacheKey& key) {
  const auto entry = known_.find(key);
  if (entry == known_.end()) return;
  order_.erase(entry->second);
  known_.erase(entry);
}

void StorageKeySet::Remember(const CacheKey& key) {
  if (Contains(key)) return;
  Append(key);
  if (NumKeys() > limit_) Erase(CacheKey(order_.front()));
}

void StorageKeySet::Register(std::vector<CacheKey> keys) {
  SortByPage(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const auto num_kept = static_cast<std::size_t>(std::min<int64_t>(limit_, static_cast<int64_t>(keys.size())));
  for (const CacheKey& beyond : std::span(keys).subspan(num_kept)) Erase(beyond);
  keys.resize(num_kept);
  const std::unordered_set<CacheKey, CacheKeyHash> kept(keys.begin(), keys.end());
  auto oldest = order_.begin();
  for (const CacheKey& key : keys) {
    if (Contains(key)) continue;
    if (NumKeys() == limit_) {
      while (kept.contains(*oldest)) ++oldest;
      known_.erase(*oldest);
      oldest = order_.erase(oldest);
    }
    Append(key);
  }
}

void StorageKeySet::Unregister(std::span<const CacheKey> keys) {
  for (const CacheKey& key : keys) Erase(key);
}

void StorageKeySet::Clear() {
  known_.clear();
  order_.clear();
}

}  // namespace tokenspeed
