// The pool against an obvious model, compared completely after every operation (invariants I1 to I10).

#include "core/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/group_allocator.h"

namespace tokenspeed {
namespace {

struct Geometry {
  int32_t packing;
  int32_t shards;
};

// Everything is recomputed by scanning every slot of every parent.
class NaivePool {
 public:
  NaivePool(int32_t num_parents, std::vector<Geometry> groups) : groups_(std::move(groups)) {
    parents_.resize(num_parents + 1);
    for (int32_t id = 1; id <= num_parents; ++id) empty_.push_back(id);
  }

  int32_t FreeSlots(int32_t group) const {
    int32_t free = 0;
    for (const Parent& parent : parents_) {
      if (parent.group == group) free += static_cast<int32_t>(std::count(parent.taken.begin(), parent.taken.end(), false));
    }
    return free;
  }
  int32_t BoundGroup(int32_t id) const { return parents_[id].group; }
  std::vector<CacheBlockLocation> Occupied(int32_t id) const {
    std::vector<CacheBlockLocation> locations;
    for (std::size_t s = 0; s < parents_[id].taken.size(); ++s) {
      if (parents_[id].taken[s]) locations.push_back({id, static_cast<int32_t>(s)});
    }
    return locations;
  }
  const std::deque<int32_t>& Empty() const { return empty_; }

  std::optional<CacheBlockLocation> Take(int32_t group, std::vector<int64_t>* loads) {
    const int32_t shards = groups_[group].shards;
    std::optional<CacheBlockLocation> best;
    std::vector<int64_t> best_rank;
    for (int32_t id = 1; id < static_cast<int32_t>(parents_.size()); ++id) {
      if (parents_[id].group != group) continue;
      const auto occupied = std::count(parents_[id].taken.begin(), parents_[id].taken.end(), true);
      for (int32_t slot = 0; slot < groups_[group].packing; ++slot) {
        if (parents_[id].taken[slot]) continue;
        std::vector<int64_t> rank;
        if (loads != nullptr) rank = {(*loads)[slot % shards], slot % shards};
        rank.insert(rank.end(), {-occupied, id, slot});
        if (best && best_rank <= rank) continue;
        best = CacheBlockLocation{id, slot};
        best_rank = rank;
      }
    }
    if (!best) {
      if (empty_.empty()) return std::nullopt;
      const auto lightest =
          loads == nullptr ? 0 : static_cast<int32_t>(std::min_element(loads->begin(), loads->end()) - loads->begin());
      best = CacheBlockLocation{empty_.front(), lightest};
      empty_.pop_front();
      parents_[best->lcm_block_id] = {group, std::vector<bool>(groups_[group].packing, false)};
    }
    parents_[best->lcm_block_id].taken[best->slot_index] = true;
    if (loads != nullptr) ++(*loads)[best->slot_index % shards];
    return best;
  }

  void Release(CacheBlockLocation location) {
    Parent& parent = parents_[location.lcm_block_id];
    parent.taken[location.slot_index] = false;
    if (std::count(parent.taken.begin(), parent.taken.end(), true) > 0) return;
    parent = Parent();
    empty_.push_back(location.lcm_block_id);
  }

 private:
  struct Parent {
    int32_t group = -1;
    std::vector<bool> taken;
  };
  std::vector<Geometry> groups_;
  std::vector<Parent> parents_;
  std::deque<int32_t> empty_;
};

class Comparison {
 public:
  Comparison(int32_t num_parents, std::vector<Geometry> groups, uint64_t seed)
      : num_parents_(num_parents),
        groups_(std::move(groups)),
        pool_(num_parents, Packings()),
        model_(num_parents, groups_),
        random_(seed) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      pool_.RegisterGroup(static_cast<int32_t>(g), groups_[g].packing, groups_[g].shards);
    }
  }

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      switch (Below(5)) {
        case 0:
        case 1:
          Acquire();
          break;
        case 2:
          if (!held_.empty()) held_.push_back(held_[Below(held_.size())]);  // one more owner: no change in the pool
          break;
        default:
          Drop();
      }
      Compare();
      if (::testing::Test::HasFailure()) return;
    }
    while (!held_.empty()) Drop();
    Compare();
    EXPECT_EQ(pool_.NumEmptyLcmBlocks(), num_parents_);
  }

 private:
  std::vector<int32_t> Packings() const {
    std::vector<int32_t> packings;
    for (const Geometry& g : groups_) packings.push_back(g.packing);
    return packings;
  }

  std::size_t Below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

  void Acquire() {
    const auto group = static_cast<int32_t>(Below(groups_.size()));
    const auto count = static_cast<int32_t>(Below(2 * groups_[group].packing + 2));
    const bool balanced = groups_[group].shards > 1 && Below(3) > 0;
    std::vector<int64_t> loads;
    for (int32_t s = 0; balanced && s < groups_[group].shards; ++s) loads.push_back(static_cast<int64_t>(Below(4)));

    const auto capacity =
        static_cast<int64_t>(model_.FreeSlots(group)) + static_cast<int64_t>(model_.Empty().size()) * groups_[group].packing;
    EXPECT_EQ(pool_.Capacity(group), capacity);
    const std::vector<CacheBlockRef> blocks = pool_.AcquireBlocks(group, count, loads);
    EXPECT_EQ(static_cast<int32_t>(blocks.size()), capacity >= count ? count : 0);
    for (const CacheBlockRef& block : blocks) {
      EXPECT_TRUE(block->Location() == *model_.Take(group, balanced ? &loads : nullptr));
      EXPECT_EQ(block->group(), group);
      const int32_t id = ResolveCacheBlockId(block->Location(), groups_[group].packing);
      EXPECT_TRUE(id >= 1 && id <= num_parents_ * groups_[group].packing);
    }
    held_.insert(held_.end(), blocks.begin(), blocks.end());
  }

  void Drop() {
    if (held_.empty()) return;
    const std::size_t i = Below(held_.size());
    if (held_[i].unique()) model_.Release(held_[i]->Location());
    std::swap(held_[i], held_.back());
    held_.pop_back();
  }

  void Compare() {
    EXPECT_EQ(pool_.NumEmptyLcmBlocks(), static_cast<int32_t>(model_.Empty().size()));
    int32_t bound = 0;
    const std::vector<int32_t> uses = pool_.LcmBlockUses();
    EXPECT_EQ(static_cast<int32_t>(uses.size()), num_parents_);
    for (int32_t id = 1; id <= num_parents_; ++id) {
      EXPECT_EQ(uses[id - 1], model_.BoundGroup(id) + 1);  // whoever holds a block here is no cache
      EXPECT_EQ(pool_.BoundGroup(id), model_.BoundGroup(id));
      EXPECT_TRUE(pool_.OccupiedLocations(id) == model_.Occupied(id));
      EXPECT_EQ(pool_.OccupiedCount(id), static_cast<int32_t>(model_.Occupied(id).size()));
      bound += pool_.BoundGroup(id) >= 0 ? 1 : 0;
    }
    EXPECT_EQ(bound + pool_.NumEmptyLcmBlocks(), num_parents_);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      EXPECT_EQ(pool_.NumFreeSlots(static_cast<int32_t>(g)), model_.FreeSlots(static_cast<int32_t>(g)));
    }
    std::set<CacheBlockLocation> distinct;
    for (const CacheBlockRef& block : held_) distinct.insert(block->Location());
    for (CacheBlockLocation location : distinct) {
      const auto owners = std::count_if(held_.begin(), held_.end(),
                                        [&](const CacheBlockRef& block) { return block->Location() == location; });
      EXPECT_EQ(pool_.UseCount(location), static_cast<int32_t>(owners));
    }
  }

  int32_t num_parents_;
  std::vector<Geometry> groups_;
  BlockPool pool_;
  NaivePool model_;
  std::mt19937_64 random_;
  std::vector<CacheBlockRef> held_;  // dies before the pool
};

TEST(BlockPoolProperty, pool_agrees_with_a_scan_of_every_slot) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Comparison(5, {{1, 1}, {3, 1}, {4, 2}}, seed).Run(400);
    Comparison(3, {{6, 3}, {8, 4}, {2, 1}}, seed).Run(400);
    Comparison(1, {{2, 2}, {5, 1}}, seed).Run(200);
  }
}

TEST(BlockPoolProperty, pool_agrees_when_a_parent_spans_several_bitmap_words) {
  for (uint64_t seed = 1; seed <= 3; ++seed) Comparison(2, {{200, 1}, {260, 2}}, seed).Run(120);
}

}  // namespace
}  // namespace tokenspeed
