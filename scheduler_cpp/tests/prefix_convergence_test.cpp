// Vectors S-PM8 to S-PM17 and S-PM23, and convergence against exhaustive search (invariants I20 and I21).

#include "coordinator/prefix_convergence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Full;
using testing::Hashes;
using testing::State;
using testing::Window;

struct GroupContents {
  CacheGroupSpec spec;
  std::vector<int32_t> cached_slots;
};

// Groups whose indexes hold exactly the listed slots of one prompt.
class CachedGroups {
 public:
  CachedGroups(int32_t prefix_granularity, const std::vector<GroupContents>& contents, int32_t pages)
      : prefix_granularity_(prefix_granularity),
        pages_(pages),
        pool_(1000, std::vector<int32_t>(contents.size(), 1)) {
    for (std::size_t g = 0; g < contents.size(); ++g) {
      groups_.emplace_back(pool_, static_cast<int32_t>(g), contents[g].spec, prefix_granularity);
      keys_.push_back(groups_[g].ExpandKeys(Hashes(1, pages)));
      for (int32_t slot : contents[g].cached_slots) {
        CacheBlockRef block = pool_.AcquireBlock(static_cast<int32_t>(g));
        groups_[g].index().Register(pool_, block, keys_[g][slot], 1, slot, BoundaryKind::kChunk);
      }
    }
  }

  ConvergedPrefix Converge() const { return ConvergePrefix(groups_, {pool_}, keys_, pages_, prefix_granularity_); }

  // The largest boundary that every group supports, by trying all of them.
  int32_t LongestCommon() const {
    int32_t best = pages_ * prefix_granularity_;
    while (!std::all_of(groups_.begin(), groups_.end(), [&](const CacheGroup& g) { return Supports(g, best); })) {
      best -= prefix_granularity_;
    }
    return best;
  }
  bool Supports(const CacheGroup& group, int32_t tokens) const {
    const int32_t end = tokens / group.geometry().block_granularity();
    const int32_t begin =
        group.geometry().IsPrefixClosed() ? 0 : std::max(0, end - group.geometry().LookbackBlocks());
    return std::all_of(keys_[group.group_id()].begin() + begin, keys_[group.group_id()].begin() + end,
                       [&](const CacheKey& key) { return group.index().Contains(pool_, key); });
  }
  const std::vector<CacheGroup>& groups() const { return groups_; }

 private:
  int32_t prefix_granularity_;
  int32_t pages_;
  BlockPool pool_;
  std::vector<CacheGroup> groups_;
  std::vector<std::vector<CacheKey>> keys_;
};

std::vector<int32_t> UpTo(int32_t last) {
  std::vector<int32_t> slots(static_cast<std::size_t>(last) + 1);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

ConvergedPrefix Converge(int32_t prefix_granularity, const std::vector<GroupContents>& contents, int32_t pages) {
  return CachedGroups(prefix_granularity, contents, pages).Converge();
}

int32_t Promotion(const ConvergedPrefix& converged) {
  return PrefixProbe{.keys = {}, .device = converged}.promotion_boundary_tokens();
}

TEST(PrefixConvergence, PM8_window_that_supports_no_shorter_boundary_gives_nothing) {
  EXPECT_EQ(Converge(4, {{Full(4), UpTo(3)}, {Window(10, 4), {2, 3, 4}}}, 5).num_common_tokens, 0);
}

TEST(PrefixConvergence, PM9_common_boundary_of_full_and_window) {
  const ConvergedPrefix c = Converge(4, {{Full(4), UpTo(3)}, {Window(10, 4), {1, 2, 3, 4}}}, 5);
  EXPECT_EQ(c.num_common_tokens, 16);
  EXPECT_EQ(c.masks[0], (PrefixMask{1, 1, 1, 1}));
  EXPECT_EQ(c.masks[1], (PrefixMask{0, 1, 1, 1}));
}

TEST(PrefixConvergence, PM10_order_of_window_groups_does_not_matter) {
  const GroupContents full{Full(4), UpTo(5)};
  const GroupContents a{Window(10, 4), {0, 2, 3, 4}};
  const GroupContents b{Window(10, 4), {0, 1, 2, 3}};
  EXPECT_EQ(Converge(4, {full, a, b}, 6).num_common_tokens, 4);
  EXPECT_EQ(Converge(4, {full, b, a}, 6).num_common_tokens, 4);
  EXPECT_EQ(Converge(4, {a, b, full}, 6).num_common_tokens, 4);
}

TEST(PrefixConvergence, PM11_second_pass_is_needed) {
  const ConvergedPrefix c = Converge(
      4, {{Full(4), UpTo(7)}, {Window(10, 4), {0, 1, 2, 4, 5, 6}}, {Window(10, 4), {0, 1, 3, 4, 5}}}, 8);
  EXPECT_EQ(c.num_common_tokens, 8);
}

TEST(PrefixConvergence, PM12_windows_of_different_length) {
  const ConvergedPrefix c =
      Converge(2, {{Full(2), UpTo(4)}, {Window(6, 2), {2, 3, 4}}, {Window(2, 2), {4}}}, 5);
  EXPECT_EQ(c.num_common_tokens, 10);
  const std::vector<int32_t> hits = {5, 3, 1};
  for (std::size_t g = 0; g < hits.size(); ++g) {
    EXPECT_EQ(std::accumulate(c.masks[g].begin(), c.masks[g].end(), 0), hits[g]);
  }
}

TEST(PrefixConvergence, PM13_windows_that_never_agree) {
  EXPECT_EQ(Converge(2, {{Full(2), UpTo(4)}, {Window(6, 2), {2, 3, 4}}, {Window(2, 2), {3}}}, 5).num_common_tokens, 0);
}

TEST(PrefixConvergence, PM14_what_closed_groups_cover_is_worth_a_promotion) {
  const ConvergedPrefix c = Converge(4, {{Full(4), UpTo(7)}, {State(4), {3}}}, 8);
  EXPECT_EQ(c.num_common_tokens, 16);
  EXPECT_EQ(c.prefix_closed_tokens, 32);
  EXPECT_EQ(Promotion(c), 32);
}

TEST(PrefixConvergence, PM15_closed_coverage_is_that_of_all_closed_groups) {
  const ConvergedPrefix c = Converge(4, {{Full(4), UpTo(7)}, {Full(4), UpTo(5)}, {State(4), {3}}}, 8);
  EXPECT_EQ(c.num_common_tokens, 16);
  EXPECT_EQ(c.prefix_closed_tokens, 24);
}

TEST(PrefixConvergence, PM16_no_promotion_where_the_match_reaches_the_closed_cover) {
  const ConvergedPrefix c = Converge(4, {{Full(4), UpTo(3)}, {Window(10, 4), {1, 2, 3, 5, 6, 7}}}, 8);
  EXPECT_EQ(c.num_common_tokens, 16);
  EXPECT_EQ(c.prefix_closed_tokens, 16);
  EXPECT_EQ(Promotion(c), 0);
}

TEST(PrefixConvergence, PM17_without_closed_groups_nothing_is_closed) {
  const ConvergedPrefix c = Converge(4, {{Window(5, 4), {2, 3}}}, 4);
  EXPECT_EQ(c.num_common_tokens, 16);
  EXPECT_EQ(c.prefix_closed_tokens, 0);
  EXPECT_EQ(Promotion(c), 0);
}

TEST(PrefixConvergence, PM23_window_publishes_and_matches_only_its_lookback) {
  const std::vector<CacheGroupSpec> specs = {Full(8), Window(5, 2)};
  CacheCoordinator cache(8, 8, specs);
  const auto hashes = Hashes(1, 1);
  auto tables = cache.MakeTables();
  const std::vector<TokenDemand> demands(2, testing::Dense(8));
  const auto admitted = cache.Admit(cache.ProbePrefix({}), tables, demands, {});
  ASSERT_TRUE(admitted.has_value());
  cache.CacheCompletedBlocks(tables, testing::Completed(hashes, 0, BoundaryKind::kChunk, 8), admitted->access_epoch);
  const CacheGroup& window = cache.group(1);
  EXPECT_EQ(cache.group(0).index().NumEntries(cache.device_pool()), 1);
  EXPECT_EQ(window.index().NumEntries(cache.device_pool()), 2);
  for (const CacheKey& key : window.ExpandKeys(hashes)) {
    EXPECT_EQ(window.index().Contains(cache.device_pool(), key), key.page_offset >= 2);
  }
  const PrefixProbe probe = cache.ProbePrefix(hashes);
  EXPECT_EQ(probe.device_prefix_tokens(), 8);
  EXPECT_EQ(probe.device.masks[1], (PrefixMask{0, 0, 1, 1}));
  cache.Free(tables);
}

TEST(PrefixConvergence, no_candidate_pages_give_the_neutral_result) {
  const ConvergedPrefix c = Converge(4, {{Full(4), {}}, {Window(1, 4), {}}}, 0);
  EXPECT_EQ(c.num_common_tokens, 0);
  EXPECT_TRUE(c.masks[0].empty() && c.masks[1].empty());
}

TEST(PrefixConvergence, convergence_finds_what_exhaustive_search_finds) {
  std::mt19937 random(5);
  const auto kinds = std::vector<CacheGroupSpec>{Full(4),      Full(2),       Window(10, 4), Window(6, 1),
                                                 Window(3, 2), Window(1, 4), State(4),      State(2)};
  int matched = 0;
  for (int round = 0; round < 500; ++round) {
    const int32_t pages = 1 + static_cast<int32_t>(random() % 6);
    std::vector<GroupContents> contents(1 + random() % 4);
    for (GroupContents& group : contents) {
      group.spec = kinds[random() % kinds.size()];
      for (int32_t slot = 0; slot < pages * 4 / group.spec.block_granularity; ++slot) {
        if (random() % 8 != 0) group.cached_slots.push_back(slot);
      }
    }
    const CachedGroups cached(4, contents, pages);
    const ConvergedPrefix c = cached.Converge();
    EXPECT_EQ(c.num_common_tokens, cached.LongestCommon());
    matched += c.num_common_tokens > 0 ? 1 : 0;
    for (std::size_t g = 0; g < contents.size(); ++g) {
      const GroupGeometry& geometry = cached.groups()[g].geometry();
      const int32_t end = c.num_common_tokens / geometry.block_granularity();
      ASSERT_TRUE(static_cast<int32_t>(c.masks[g].size()) == end);
      for (int32_t slot = 0; slot < end; ++slot) {
        const bool wanted = geometry.IsPrefixClosed() || slot >= end - geometry.LookbackBlocks();
        EXPECT_EQ(static_cast<int>(c.masks[g][slot]), wanted ? 1 : 0);
      }
    }
    std::shuffle(contents.begin(), contents.end(), random);
    EXPECT_EQ(Converge(4, contents, pages).num_common_tokens, c.num_common_tokens);
  }
  EXPECT_TRUE(matched > 100);
}

}  // namespace
}  // namespace tokenspeed
