// The planner against exhaustive search on small pools: victims are minimal and exist whenever any would do (I27 to I30).

#include "coordinator/admission_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Full;
using testing::Hashes;
using testing::State;
using testing::Window;

// A random mixture of cached, pinned and own blocks over a small pool.
class Scene {
 public:
  Scene(std::mt19937& random, int32_t parents, std::vector<CacheGroupSpec> specs)
      : pool_(parents, Packings(specs)), pages_(Hashes(1, 32)) {
    for (std::size_t g = 0; g < specs.size(); ++g) {
      groups_.emplace_back(pool_, static_cast<int32_t>(g), specs[g], 4);
    }
    tables_.resize(specs.size());
    for (std::size_t g = 0; g < specs.size(); ++g) FillOwnTable(random, g);
    for (int32_t i = 0; i < 12; ++i) PlaceForeignBlock(random, i);
    for (std::size_t g = 0; g < specs.size(); ++g) {
      needed_.push_back(static_cast<int32_t>(random() % 4));
      keys_.push_back(groups_[g].ExpandKeys(pages_));
      ChooseHits(random, g);
    }
    if (random() % 2 == 0) frontier_ = static_cast<int32_t>(random() % 20);
  }

  AdmissionRequest Request() const {
    return {.blocks_needed = needed_,
            .hit_keys = keys_,
            .hit_masks = masks_,
            .tables = tables_,
            .num_computed_tokens = frontier_};
  }

  std::optional<std::vector<AdmissionVictim>> Plan() const { return AdmissionPlanner(groups_, pool_).Plan(Request()); }

  // A planner that refuses one request after another, each compared with a planner that remembers nothing.
  void CheckMemory(std::mt19937& random) {
    AdmissionPlanner planner(groups_, pool_);
    for (int round = 0; round < 12; ++round) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        needed_[g] = static_cast<int32_t>(random() % 6);
        for (uint8_t& hit : masks_[g]) hit = hit != 0 && random() % 3 != 0 ? 1 : 0;
      }
      frontier_ = random() % 2 == 0 ? std::nullopt : std::optional(static_cast<int32_t>(random() % 20));
      const auto plan = planner.Plan(Request());
      EXPECT_TRUE(plan == Plan());
      if (random() % 3 == 0 && !pins_.empty()) pins_.pop_back();
      if (random() % 4 == 0) pins_.push_back(pool_.AcquireBlock(static_cast<int32_t>(random() % groups_.size())));
    }
  }

  // Every block that could go: unpinned entries and what the request's own frontier lets go of, minus its hits.
  std::vector<AdmissionVictim> Candidates() const {
    std::vector<AdmissionVictim> candidates;
    for (const CacheGroup& group : groups_) {
      const auto hits = group.index().MatchedLocations(pool_, keys_[group.group_id()], masks_[group.group_id()]);
      std::vector<CacheBlockLocation> locations;
      for (const auto& entry : group.index().EvictableCandidates(pool_)) locations.push_back(entry.location);
      if (frontier_) {
        const int32_t expired = group.geometry().ExpiredBlocks(*frontier_);
        for (CacheBlockLocation own : group.ReclaimableBlockLocationsAt(tables_[group.group_id()], expired)) {
          locations.push_back(own);
        }
      }
      for (CacheBlockLocation location : locations) {
        if (std::find(hits.begin(), hits.end(), location) == hits.end()) candidates.push_back({group.group_id(), location});
      }
    }
    return candidates;
  }

  // Whether the needs can be placed if exactly `gone` were free: counts parents directly.
  bool FitsWithout(const std::vector<AdmissionVictim>& gone) const {
    std::vector<int32_t> free(groups_.size(), 0);
    int32_t empty = pool_.NumEmptyLcmBlocks();
    for (int32_t parent = 1; parent <= pool_.NumLcmBlocks(); ++parent) {
      const int32_t group = pool_.BoundGroup(parent);
      if (group < 0) continue;
      int32_t left = 0;
      for (CacheBlockLocation location : pool_.OccupiedLocations(parent)) {
        left += std::find(gone.begin(), gone.end(), AdmissionVictim{group, location}) == gone.end() ? 1 : 0;
      }
      if (left == 0) {
        ++empty;
      } else {
        free[group] += pool_.Packing(group) - left;
      }
    }
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (int32_t missing = needed_[g] - free[g]; missing > 0; missing -= pool_.Packing(static_cast<int32_t>(g))) --empty;
    }
    return empty >= 0;
  }

  uint64_t EpochOf(const AdmissionVictim& victim) const {
    const auto metadata = groups_[victim.group].index().MetadataFor(pool_, victim.location);
    return metadata ? metadata->last_access_epoch : 0;
  }

 private:
  static std::vector<int32_t> Packings(const std::vector<CacheGroupSpec>& specs) {
    std::vector<int32_t> packings;
    for (const CacheGroupSpec& spec : specs) packings.push_back(spec.cache_blocks_per_lcm_block);
    return packings;
  }

  void FillOwnTable(std::mt19937& random, std::size_t g) {
    for (int32_t slot = 0; slot < 3; ++slot) {
      CacheBlockRef block = pool_.AcquireBlock(static_cast<int32_t>(g));
      if (!block) return;
      if (random() % 2 == 0) Publish(random, g, block, 20 + slot, slot);
      if (random() % 4 == 0) pins_.push_back(block);
      tables_[g].blocks.push_back(block);
    }
  }

  void PlaceForeignBlock(std::mt19937& random, int32_t page) {
    const std::size_t g = random() % groups_.size();
    CacheBlockRef block = pool_.AcquireBlock(static_cast<int32_t>(g));
    if (!block) return;
    const auto fate = random() % 6;
    if (fate == 0) {
      pins_.push_back(block);  // somebody's uncached block
      return;
    }
    Publish(random, g, block, page, static_cast<int32_t>(random() % 8));
    if (fate == 1) pins_.push_back(block);
  }

  void Publish(std::mt19937& random, std::size_t g, CacheBlockRef& block, int32_t page, int32_t logical_index) {
    const CacheKey key = groups_[g].ExpandKeys(std::span(pages_).subspan(page, 1))[0];
    groups_[g].index().Register(pool_, block, key, 1 + random() % 5, logical_index,
                                static_cast<BoundaryKind>(random() % 3));
  }

  void ChooseHits(std::mt19937& random, std::size_t g) {
    PrefixMask mask;
    for (const CacheKey& key : keys_[g]) {
      mask.push_back(groups_[g].index().Contains(pool_, key) && random() % 5 == 0 ? 1 : 0);
    }
    masks_.push_back(mask);
  }

  BlockPool pool_;
  std::vector<CacheGroup> groups_;
  std::vector<PrefixHash> pages_;
  std::vector<CacheBlockRef> pins_;
  std::vector<BlockTable> tables_;
  std::vector<int32_t> needed_;
  std::vector<std::vector<CacheKey>> keys_;
  std::vector<PrefixMask> masks_;
  std::optional<int32_t> frontier_;
};

struct Outcomes {
  int refused = 0;
  int without_victims = 0;
  int with_victims = 0;
};

void CheckPlan(const Scene& scene, Outcomes& outcomes) {
  const std::vector<AdmissionVictim> candidates = scene.Candidates();
  const auto plan = scene.Plan();
  // More victims never hurt, so all of them together decide whether any choice works.
  EXPECT_EQ(plan.has_value(), scene.FitsWithout(candidates));
  if (!plan) {
    ++outcomes.refused;
    return;
  }
  EXPECT_EQ(plan->empty(), scene.FitsWithout({}));
  ++(plan->empty() ? outcomes.without_victims : outcomes.with_victims);
  EXPECT_TRUE(scene.FitsWithout(*plan));
  for (std::size_t i = 0; i < plan->size(); ++i) {
    EXPECT_TRUE(std::find(candidates.begin(), candidates.end(), (*plan)[i]) != candidates.end());
    if (i > 0) {
      EXPECT_TRUE(scene.EpochOf((*plan)[i - 1]) <= scene.EpochOf((*plan)[i]));
    }
    std::vector<AdmissionVictim> fewer = *plan;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_FALSE(scene.FitsWithout(fewer));
  }
}

Scene RandomScene(std::mt19937& random) {
  const std::vector<std::vector<CacheGroupSpec>> configurations = {
      {Full(4)},
      {Full(4, 3), Window(5, 4)},
      {Full(4, 2), State(4), Window(5, 4, 3)},
      {Full(4, 4, 2), Window(9, 4, 2)},
  };
  const int32_t parents = 3 + static_cast<int32_t>(random() % 6);
  return Scene(random, parents, configurations[random() % configurations.size()]);
}

TEST(AdmissionPlanner, victims_are_minimal_and_found_whenever_they_exist) {
  std::mt19937 random(17);
  Outcomes outcomes;
  for (int round = 0; round < 1500; ++round) CheckPlan(RandomScene(random), outcomes);
  EXPECT_TRUE(outcomes.refused > 100 && outcomes.without_victims > 100 && outcomes.with_victims > 100);
}

TEST(AdmissionPlanner, what_the_planner_remembers_changes_no_plan) {
  std::mt19937 random(23);
  for (int round = 0; round < 800; ++round) {
    Scene scene = RandomScene(random);
    scene.CheckMemory(random);
  }
}

}  // namespace
}  // namespace tokenspeed
