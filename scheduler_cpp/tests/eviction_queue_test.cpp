#include "prefix/eviction_queue.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace tokenspeed {
namespace {

std::vector<const EvictionQueue::Node*> Walk(const EvictionQueue& queue) {
  std::vector<const EvictionQueue::Node*> nodes;
  for (const EvictionQueue::Node* node = queue.front(); node != nullptr; node = node->next) nodes.push_back(node);
  return nodes;
}

// What becomes of a queue is held against an ordered map under the same random calls.
void CompareWithMap(uint32_t seed, uint32_t num_weights, uint32_t num_epochs) {
  std::mt19937 random(seed);
  std::vector<EvictionQueue::Node> nodes(300);
  EvictionQueue queue;
  std::map<EvictionRank, const EvictionQueue::Node*> reference;
  std::vector<bool> is_in(nodes.size(), false);
  for (int call = 0; call < 6000; ++call) {
    const std::size_t i = random() % nodes.size();
    if (is_in[i]) {
      queue.Erase(nodes[i]);
      reference.erase(nodes[i].rank);
    } else {
      nodes[i].rank = {.epoch = random() % num_epochs,
                       .tier = static_cast<int32_t>(random() % 3),
                       .position = static_cast<int32_t>(random() % 3),
                       .location = {static_cast<int32_t>(i), 0}};
      nodes[i].weight = static_cast<uint32_t>(random() % num_weights);
      queue.Insert(nodes[i]);
      reference.emplace(nodes[i].rank, &nodes[i]);
    }
    is_in[i] = !is_in[i];
    ASSERT_EQ(queue.size(), reference.size());
    ASSERT_EQ(queue.front(), reference.empty() ? nullptr : reference.begin()->second);
    if (call % 50 != 0) continue;
    std::vector<const EvictionQueue::Node*> expected;
    for (const auto& [rank, node] : reference) expected.push_back(node);
    ASSERT_EQ(Walk(queue), expected) << "call " << call;
  }
}

TEST(EvictionQueue, follows_an_ordered_map) { CompareWithMap(1, 1u << 31, 40); }

TEST(EvictionQueue, equal_weights_cost_time_and_no_order) { CompareWithMap(2, 1, 40); }

TEST(EvictionQueue, one_epoch_is_ordered_by_what_follows_it) { CompareWithMap(3, 1u << 31, 1); }

TEST(EvictionQueue, the_newest_last_and_from_the_front_is_a_fifo) {
  std::mt19937 random(4);
  std::vector<EvictionQueue::Node> nodes(1000);
  EvictionQueue queue;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].rank.epoch = i;
    nodes[i].weight = static_cast<uint32_t>(random());
    queue.Insert(nodes[i]);
  }
  for (EvictionQueue::Node& node : nodes) {
    ASSERT_EQ(queue.front(), &node);
    queue.Erase(node);
  }
  EXPECT_EQ(queue.size(), 0u);
}

}  // namespace
}  // namespace tokenspeed
