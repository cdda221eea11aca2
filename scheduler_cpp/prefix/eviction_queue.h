// EvictionQueue: which of a group's unpinned blocks goes first.
//
// A search tree by rank whose nodes lie in the entries themselves, so that joining, leaving and walking never allocate.
// It is kept shallow by weights (a treap): no node weighs more than its parent. Weights come from content hashes, which
// are as good as random and the same everywhere; they decide the shape of the tree and nothing else. The nodes are
// threaded in order as well, for the walk from the front is what an eviction does.
//
// Ownership: refers to its nodes, which must leave before they die. Thread safety: none.
// Costs: joining O(log nodes) expected, O(1) behind all others, as what has just been let go of mostly is; leaving O(1)
// expected; the front and the next one O(1).

#ifndef TOKENSPEED_PREFIX_EVICTION_QUEUE_H_
#define TOKENSPEED_PREFIX_EVICTION_QUEUE_H_

#include <compare>
#include <cstddef>
#include <cstdint>

#include "core/cache_block_ref.h"

namespace tokenspeed {

// Value of a block to the cache, within a group. The smallest goes first.
struct EvictionRank {
  uint64_t epoch = 0;
  int32_t tier = 0;  // 0 uncached, 1 probationary boundary, 2 established boundary, 3 closed prefix
  int32_t position = 0;
  CacheBlockLocation location;

  friend auto operator<=>(const EvictionRank&, const EvictionRank&) = default;
};

class EvictionQueue {
 public:
  struct Node {
    EvictionRank rank;  // must not change while the node is in a queue
    uint32_t weight = 0;
    Node* parent = nullptr;
    Node* left = nullptr;
    Node* right = nullptr;
    Node* previous = nullptr;
    Node* next = nullptr;
  };

  // No other node may have its rank.
  void Insert(Node& node) noexcept;
  void Erase(Node& node) noexcept;

  // Null when there is none.
  Node* front() const { return front_; }
  std::size_t size() const { return size_; }

 private:
  // Hangs `node` where `place` hangs, which may be null.
  void Replace(const Node& place, Node* node) noexcept;
  // Lifts a node above its parent.
  void Lift(Node& node) noexcept;

  Node* root_ = nullptr;
  Node* front_ = nullptr;
  Node* back_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_EVICTION_QUEUE_H_
