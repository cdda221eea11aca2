// Vectors S-PM1 to S-PM7, and the matchers against exhaustive search (invariants I20 and I22).

#include "prefix/prefix_matcher.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

constexpr MatchRule kFull{.prefix_closed = true, .lookback_blocks = 0};
constexpr MatchRule Lookback(int32_t blocks) { return {.prefix_closed = false, .lookback_blocks = blocks}; }
constexpr int32_t kWindow10 = 3;  // blocks of 4 tokens

class Cached {
 public:
  Cached(std::vector<int32_t> slots, int32_t num_keys)
      : pool_(num_keys + 1, {1}), index_(0, /*prefix_closed=*/false), keys_(ExpandCacheKeys(testing::Hashes(1, num_keys), 0, 1)) {
    for (int32_t slot : slots) {
      CacheBlockRef block = pool_.AcquireBlock(0);
      index_.Register(pool_, block, keys_[slot], 1, slot, BoundaryKind::kChunk);
    }
  }

  PrefixMask Match(const MatchRule& rule) const { return Match(rule, static_cast<int32_t>(keys_.size())); }
  PrefixMask Match(const MatchRule& rule, int32_t end) const { return MatchPrefix(rule, index_, pool_, keys_, end, nullptr); }
  std::vector<PrefixCacheIndex::Candidate> Entries() const { return index_.EvictableCandidates(pool_); }
  bool Has(int32_t slot) const { return index_.Contains(pool_, keys_[slot]); }

 private:
  BlockPool pool_;
  PrefixCacheIndex index_;
  std::vector<CacheKey> keys_;
};

TEST(PrefixMatcher, PM1_full_match_ends_at_the_first_absent_key) {
  EXPECT_EQ(Cached({0, 1}, 3).Match(kFull), (PrefixMask{1, 1}));
  EXPECT_EQ(Cached({1, 2}, 3).Match(kFull), PrefixMask{});
}

TEST(PrefixMatcher, PM2_window_needs_only_its_lookback) {
  EXPECT_EQ(Cached({1, 2, 3}, 5).Match(Lookback(kWindow10)), (PrefixMask{0, 1, 1, 1}));
}

TEST(PrefixMatcher, PM3_window_match_is_derived_anew_under_a_lower_bound) {
  const Cached cached({2, 3, 4}, 5);
  EXPECT_EQ(cached.Match(Lookback(kWindow10), 5), (PrefixMask{0, 0, 1, 1, 1}));
  EXPECT_EQ(cached.Match(Lookback(kWindow10), 4), PrefixMask{});
}

TEST(PrefixMatcher, PM4_newest_boundary_wins) { EXPECT_EQ(Cached({0, 2}, 3).Match(Lookback(1)), (PrefixMask{0, 0, 1})); }

TEST(PrefixMatcher, PM5_short_run_that_reaches_the_start_is_enough) {
  EXPECT_EQ(Cached({0, 1}, 2).Match(Lookback(kWindow10)), (PrefixMask{1, 1}));
}

TEST(PrefixMatcher, PM6_broken_run_falls_back_without_touching_recency) {
  const Cached cached({0, 1, 3, 4}, 5);
  const auto before = cached.Entries();
  EXPECT_EQ(cached.Match(Lookback(kWindow10)), (PrefixMask{1, 1}));
  const auto after = cached.Entries();
  ASSERT_TRUE(before.size() == after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(before[i].location == after[i].location && before[i].metadata == after[i].metadata);
  }
}

TEST(PrefixMatcher, PM7_window_of_one_token_needs_nothing) { EXPECT_EQ(Cached({}, 3).Match(Lookback(0)), (PrefixMask{0, 0, 0})); }

bool Supports(const Cached& cached, const MatchRule& rule, int32_t boundary) {
  for (int32_t slot = 0; slot < boundary; ++slot) {
    const bool wanted = rule.prefix_closed || slot >= boundary - rule.lookback_blocks;
    if (wanted && !cached.Has(slot)) return false;
  }
  return true;
}

TEST(PrefixMatcher, matchers_find_what_exhaustive_search_finds) {
  std::mt19937 random(3);
  for (int round = 0; round < 600; ++round) {
    const int32_t num_keys = 1 + static_cast<int32_t>(random() % 12);
    std::vector<int32_t> slots;
    for (int32_t slot = 0; slot < num_keys; ++slot) {
      if (random() % 4 != 0) slots.push_back(slot);
    }
    const Cached cached(slots, num_keys);
    const int32_t end = static_cast<int32_t>(random() % (num_keys + 1));
    for (const MatchRule& rule : {kFull, Lookback(0), Lookback(1), Lookback(2), Lookback(5)}) {
      int32_t best = end;
      while (best > 0 && !Supports(cached, rule, best)) --best;
      const PrefixMask mask = cached.Match(rule, end);
      ASSERT_TRUE(static_cast<int32_t>(mask.size()) == best);
      for (int32_t slot = 0; slot < best; ++slot) {
        const bool wanted = rule.prefix_closed || slot >= best - rule.lookback_blocks;
        EXPECT_EQ(static_cast<int>(mask[slot]), wanted ? 1 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace tokenspeed
