// StorageKeySet: the keys whose contents are believed to lie in an external store below the host tier.
//
// Invariants:
// - At most `limit` keys (>= 1), each once, in order of insertion.
// - It believes what it is told: whether an object is really there turns out when it is fetched. A key that proves
//   missing must be unregistered.
//
// Thread safety: none. Costs: one key O(1); a batch of n keys O(n log n + limit).

#ifndef TOKENSPEED_PREFIX_STORAGE_KEY_SET_H_
#define TOKENSPEED_PREFIX_STORAGE_KEY_SET_H_

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "prefix/cache_key.h"

namespace tokenspeed {

class StorageKeySet {
 public:
  explicit StorageKeySet(int64_t limit);

  bool Contains(const CacheKey& key) const { return known_.contains(key); }
  // Adds one key as the newest; the oldest makes way. A known key stays where it is.
  void Remember(const CacheKey& key);
  // Of a batch, prefix page by prefix page as they first appear, the first `limit` distinct keys become known and the
  // others unknown: a closed group can use a store only from its prompt's start on. Older keys make way, oldest first.
  void Register(std::vector<CacheKey> keys);
  void Unregister(std::span<const CacheKey> keys);
  void Clear();

  int64_t NumKeys() const { return static_cast<int64_t>(order_.size()); }
  int64_t limit() const { return limit_; }

 private:
  using Order = std::list<CacheKey>;

  void Append(const CacheKey& key) { known_.emplace(key, order_.insert(order_.end(), key)); }
  void Erase(const CacheKey& key);

  int64_t limit_;
  Order order_;  // oldest first
  std::unordered_map<CacheKey, Order::iterator, CacheKeyHash> known_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_STORAGE_KEY_SET_H_
