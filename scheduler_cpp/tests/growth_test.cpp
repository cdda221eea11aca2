// CacheCoordinator::Grow against the admission that it stands for, and when a promotion is worth a stop.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Completed;
using testing::Dense;
using testing::Frontier;
using testing::Full;
using testing::Hashes;
using testing::Ids;
using testing::State;
using testing::Window;

constexpr int32_t kPage = 4;

struct Resident {
  std::vector<BlockTable> tables;
  std::vector<PrefixHash> hashes;
  int32_t tokens = 0;
  int32_t published_pages = 0;
  uint64_t epoch = 0;
};

// One of two caches that are to stay equal; the one grows by admissions, the other by Grow.
class Twin {
 public:
  Twin(std::span<const CacheGroupSpec> specs, int32_t parents, bool grows)
      : cache_(kPage, parents, specs,
               [this](const CacheKey& key, DeviceMutation mutation) { mutations_.emplace_back(key, mutation); }),
        grows_(grows) {}
  ~Twin() {
    for (Resident& resident : residents_) cache_.Free(resident.tables);
  }

  bool Start(int32_t prompt, int32_t tokens) {
    Resident resident{.tables = cache_.MakeTables(), .hashes = Hashes(prompt, 64), .tokens = tokens};
    const std::vector<TokenDemand> demands(static_cast<std::size_t>(cache_.NumGroups()), Dense(tokens));
    const auto admitted = cache_.Admit(cache_.NeutralProbe(), resident.tables, demands, {});
    if (!admitted) return false;
    resident.epoch = admitted->access_epoch;
    residents_.push_back(std::move(resident));
    return true;
  }

  // The ids acquired per group, or nothing.
  std::optional<std::vector<std::vector<int32_t>>> Step(std::size_t place, int32_t tokens) {
    Resident& resident = residents_[place];
    const int32_t pages = resident.tokens / kPage;
    const auto hashes = std::span(resident.hashes).first(static_cast<std::size_t>(pages));
    const RequestProgress progress =
        pages > resident.published_pages
            ? Completed(hashes, resident.published_pages, BoundaryKind::kChunk, resident.tokens)
            : Frontier(resident.tokens);
    std::optional<std::vector<std::vector<int32_t>>> acquired;
    if (grows_) {
      std::vector<std::vector<int32_t>> ids;
      if (cache_.Grow(resident.tables, tokens, progress, resident.epoch, ids)) acquired = std::move(ids);
    } else {
      const std::vector<TokenDemand> demands(static_cast<std::size_t>(cache_.NumGroups()), Dense(tokens));
      auto admitted = cache_.Admit(cache_.NeutralProbe(), resident.tables, demands, progress, resident.epoch);
      if (admitted) acquired = std::move(admitted->new_block_ids);
    }
    if (!acquired) return acquired;
    resident.tokens += tokens;
    resident.published_pages = std::max(resident.published_pages, pages);
    return acquired;
  }

  void End(std::size_t place) {
    cache_.Free(residents_[place].tables);
    residents_.erase(residents_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  const std::vector<Resident>& residents() const { return residents_; }
  const CacheCoordinator& cache() const { return cache_; }
  const std::vector<std::pair<CacheKey, DeviceMutation>>& mutations() const { return mutations_; }

 private:
  CacheCoordinator cache_;
  bool grows_;
  std::vector<std::pair<CacheKey, DeviceMutation>> mutations_;
  std::vector<Resident> residents_;
};

class GrowthOfTwins : public ::testing::TestWithParam<std::pair<std::vector<CacheGroupSpec>, int32_t>> {};

TEST_P(GrowthOfTwins, is_that_of_an_admission_that_looks_nothing_up) {
  const auto& [specs, parents] = GetParam();
  std::mt19937 random(7);
  Twin admits(specs, parents, false);
  Twin grows(specs, parents, true);
  int evictions = 0;
  int refusals = 0;
  for (int call = 0; call < 3000; ++call) {
    const std::size_t count = admits.residents().size();
    const auto draw = random() % 12;
    if (count < 2 || draw == 0) {
      const auto tokens = static_cast<int32_t>(1 + random() % 20);
      ASSERT_EQ(admits.Start(call, tokens), grows.Start(call, tokens));
    } else if (draw == 1 || admits.residents()[count - 1].tokens > 200) {
      admits.End(count - 1);
      grows.End(count - 1);
    } else {
      const std::size_t place = random() % count;
      const auto tokens = static_cast<int32_t>(1 + random() % 9);
      if (admits.residents()[place].tokens > 200) continue;
      const std::size_t before = admits.mutations().size();
      const auto expected = admits.Step(place, tokens);
      ASSERT_EQ(grows.Step(place, tokens), expected) << "call " << call;
      refusals += expected ? 0 : 1;
      for (std::size_t i = before; i < admits.mutations().size(); ++i) {
        evictions += admits.mutations()[i].second == DeviceMutation::kRemoved ? 1 : 0;
      }
    }
    if (call % 10 != 0) continue;
    ASSERT_EQ(grows.mutations(), admits.mutations()) << "call " << call;
    for (std::size_t r = 0; r < admits.residents().size(); ++r) {
      for (int32_t g = 0; g < admits.cache().NumGroups(); ++g) {
        ASSERT_EQ(Ids(grows.cache(), g, grows.residents()[r].tables),
                  Ids(admits.cache(), g, admits.residents()[r].tables));
      }
    }
  }
  EXPECT_GT(evictions, 50);
  EXPECT_GT(refusals, 5);
}

INSTANTIATE_TEST_SUITE_P(Geometries, GrowthOfTwins,
                         ::testing::Values(
                             std::pair(std::vector{Full(4)}, 60),
                             std::pair(std::vector{Full(4, 3), Window(8, 4, 2)}, 40),
                             std::pair(std::vector{Full(2, 4), Full(4), Window(6, 2, 6), Window(12, 4)}, 120)));

// A cache of full attention and state that has seen the pages of one prompt.
struct Seen {
  explicit Seen(int32_t num_pages) : cache(kPage, 64, std::vector{Full(kPage), State(kPage)}), hashes(Hashes(1, 16)) {
    Publish(num_pages);
  }
  ~Seen() { cache.Free(tables); }

  void Publish(int32_t num_pages) {
    const int32_t tokens = kPage * num_pages;
    if (published == 0) {
      tables = cache.MakeTables();
      const std::vector demands = {Dense(64), Dense(64)};
      epoch = cache.Admit(cache.NeutralProbe(), tables, demands, {})->access_epoch;
    }
    const auto first = std::span(hashes).first(static_cast<std::size_t>(num_pages));
    cache.CacheCompletedBlocks(tables, Completed(first, published, BoundaryKind::kChunk, tokens), epoch);
    published = num_pages;
  }
  int32_t Stop(int32_t num_pages) const {
    std::vector<PrefixHash> prompt(hashes.begin(), hashes.begin() + num_pages);
    for (const PrefixHash& other : Hashes(2, 4)) prompt.push_back(other);
    const PrefixProbe probe = cache.ProbePrefix(prompt);
    EXPECT_EQ(probe.promotion_boundary_tokens(), kPage * num_pages);
    return cache.PromotionWorthStopping(probe);
  }

  CacheCoordinator cache;
  std::vector<PrefixHash> hashes;
  std::vector<BlockTable> tables;
  int32_t published = 0;
  uint64_t epoch = 0;
};

TEST(PromotionStop, is_worth_it_where_a_cached_prompt_went_on) {
  const Seen seen(5);
  for (int32_t pages = 1; pages < 5; ++pages) EXPECT_EQ(seen.Stop(pages), kPage * pages);
}

TEST(PromotionStop, is_not_worth_it_where_the_cached_prompt_ends) { EXPECT_EQ(Seen(5).Stop(5), 0); }

TEST(PromotionStop, is_worth_it_once_the_next_page_is_there_too) {
  Seen seen(5);
  ASSERT_EQ(seen.Stop(5), 0);
  seen.Publish(6);
  EXPECT_EQ(seen.Stop(5), kPage * 5);
  EXPECT_EQ(seen.Stop(6), 0);
}

}  // namespace
}  // namespace tokenspeed
