#include "prefix/eviction_queue.h"

namespace tokenspeed {

void EvictionQueue::Insert(Node& node) noexcept {
  node.parent = node.left = node.right = node.previous = node.next = nullptr;
  ++size_;
  if (root_ == nullptr) {
    root_ = front_ = back_ = &node;
    return;
  }
  Node* above = back_;
  bool behind = true;
  if (node.rank < back_->rank) {
    for (Node* next = root_; next != nullptr; next = behind ? next->right : next->left) {
      above = next;
      behind = above->rank < node.rank;
    }
  }
  node.parent = above;
  (behind ? above->right : above->left) = &node;
  node.previous = behind ? above : above->previous;
  node.next = behind ? above->next : above;
  (node.previous != nullptr ? node.previous->next : front_) = &node;
  (node.next != nullptr ? node.next->previous : back_) = &node;
  while (node.parent != nullptr && node.parent->weight < node.weight) Lift(node);
}

void EvictionQueue::Erase(Node& node) noexcept {
  while (node.left != nullptr && node.right != nullptr) {
    Lift(node.left->weight < node.right->weight ? *node.right : *node.left);
  }
  Node* const below = node.left != nullptr ? node.left : node.right;
  Replace(node, below);
  (node.previous != nullptr ? node.previous->next : front_) = node.next;
  (node.next != nullptr ? node.next->previous : back_) = node.previous;
  --size_;
}

void EvictionQueue::Replace(const Node& place, Node* node) noexcept {
  if (node != nullptr) node->parent = place.parent;
  if (place.parent == nullptr) {
    root_ = node;
  } else {
    (place.parent->left == &place ? place.parent->left : place.parent->right) = node;
  }
}

void EvictionQueue::Lift(Node& node) noexcept {
  Node& above = *node.parent;
  Replace(above, &node);
  above.parent = &node;
  if (above.left == &node) {
    above.left = node.right;
    if (node.right != nullptr) node.right->parent = &above;
    node.right = &above;
  } else {
    above.right = node.left;
    if (node.left != nullptr) node.left->parent = &above;
    node.left = &above;
  }
}

}  // namespace tokenspeed
