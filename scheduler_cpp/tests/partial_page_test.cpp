// Partial pages: which are known, what of them is found and copied, and what happens to their blocks.

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "prefix/partial_pages.h"
#include "tests/broken_invariant.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Dense;
using testing::Full;
using testing::Hashes;
using testing::Held;
using testing::Ids;
using testing::Replayable;
using testing::State;
using testing::Window;

constexpr int32_t kPage = 8;
const PrefixHash kRoot = HashPrefixPage({}, std::nullopt);

PrefixHash Leave(PartialPages& pages, const std::vector<int32_t>& tokens, int32_t num_new_blocks) {
  const PrefixHash name = PartialPages::NameOf(kRoot, tokens);
  pages.Leave(kRoot, name, tokens, num_new_blocks);
  return name;
}

std::vector<std::vector<int32_t>> Known(const PartialPages& pages) {
  std::vector<std::vector<int32_t>> tokens;
  for (const PartialPages::Page& page : pages.Behind(kRoot)) tokens.push_back(page.tokens);
  return tokens;
}

TEST(PartialPages, are_known_in_the_order_in_which_they_were_last_left) {
  PartialPages pages;
  Leave(pages, {1, 2}, 1);
  Leave(pages, {3}, 2);
  Leave(pages, {1, 2}, 0);
  EXPECT_EQ(Known(pages), (std::vector<std::vector<int32_t>>{{3}, {1, 2}}));
  EXPECT_TRUE(pages.Behind(PartialPages::NameOf(kRoot, std::vector{3})).empty());
}

TEST(PartialPages, are_known_until_their_last_block_is_gone) {
  PartialPages pages;
  EXPECT_TRUE(Known(pages).empty());
  const PrefixHash name = Leave(pages, {1}, 1);
  Leave(pages, {1}, 1);
  pages.ForgetBlock(name);
  EXPECT_EQ(Known(pages).size(), 1U);
  pages.ForgetBlock(name);
  EXPECT_TRUE(Known(pages).empty());
  EXPECT_FATAL(pages.ForgetBlock(name));
}

TEST(PartialPages, without_a_block_are_not_known) {
  PartialPages pages;
  Leave(pages, {1}, 0);
  EXPECT_TRUE(Known(pages).empty());
}

// A cache, and a request that has ended in it.
class PartialPageReuse : public ::testing::Test {
 protected:
  void Open(int32_t parents, std::vector<CacheGroupSpec> specs) {
    cache_.emplace(kPage, parents, specs, [this](const CacheKey&, DeviceMutation) { ++reports_; });
  }

  // Computes `tokens` behind `hashes` in tables of its own, leaves the last page and lets go. Returns its block ids.
  std::vector<std::vector<int32_t>> End(const std::vector<PrefixHash>& hashes, const std::vector<int32_t>& tokens,
                                        int32_t expired_at = 0) {
    const auto begin = static_cast<int32_t>(hashes.size()) * kPage;
    const auto end = begin + static_cast<int32_t>(tokens.size());
    std::vector<BlockTable> tables = cache_->MakeTables();
    const auto admitted = cache_->Admit(cache_->NeutralProbe(), tables, Demands(end), {});
    EXPECT_TRUE(admitted.has_value());
    if (!hashes.empty()) {
      cache_->CacheCompletedBlocks(tables, testing::Completed(hashes, 0, BoundaryKind::kEndpoint, end),
                                   admitted->access_epoch);
    }
    for (int32_t g = 0; g < cache_->NumGroups(); ++g) {
      const CacheGroup& group = cache_->group(g);
      group.allocator().ReclaimExpired(tables[g], group.geometry().ExpiredBlocks(expired_at));
    }
    cache_->CachePartialPage(tables, Before(hashes), begin, tokens, admitted->access_epoch);
    std::vector<std::vector<int32_t>> ids;
    for (int32_t g = 0; g < cache_->NumGroups(); ++g) ids.push_back(Ids(*cache_, g, tables));
    cache_->Free(tables);
    return ids;
  }

  PrefixProbe Probe(const std::vector<PrefixHash>& hashes, const std::vector<int32_t>& tokens) {
    PrefixProbe probe = cache_->ProbePrefix(hashes);
    cache_->ProbePartialPage(probe, Before(hashes), tokens);
    return probe;
  }

  std::vector<TokenDemand> Demands(int32_t tokens) const {
    return std::vector<TokenDemand>(static_cast<std::size_t>(cache_->NumGroups()), Dense(tokens));
  }

  static PrefixHash Before(const std::vector<PrefixHash>& hashes) { return hashes.empty() ? kRoot : hashes.back(); }

  std::optional<CacheCoordinator> cache_;
  int32_t reports_ = 0;
};

TEST_F(PartialPageReuse, copies_the_rows_in_common_into_blocks_of_its_own) {
  Open(20, {Full(2, 4), Full(8)});
  const auto hashes = Hashes(1, 1);
  const auto left = End(hashes, {1, 2, 3, 4, 5});
  const PrefixProbe probe = Probe(hashes, {1, 2, 3, 9, 9});
  EXPECT_EQ(probe.prefix_tokens(), 8);
  EXPECT_EQ(probe.resume_tokens(), 11);
  std::vector<BlockTable> tables = cache_->MakeTables();
  auto admitted = cache_->Admit(probe, tables, Demands(7), {});
  ASSERT_TRUE(admitted.has_value());
  const auto own = Ids(*cache_, 0, tables);
  ASSERT_EQ(own.size(), 8U);
  EXPECT_EQ(admitted->copies[0], (std::vector<BlockCopy>{{left[0][4], own[4]}, {left[0][5], own[5]}}));
  EXPECT_EQ(admitted->new_block_ids[0], (std::vector<int32_t>{own[6], own[7]}));
  EXPECT_EQ(admitted->copies[1], (std::vector<BlockCopy>{{left[1][1], Ids(*cache_, 1, tables)[1]}}));
  EXPECT_TRUE(admitted->new_block_ids[1].empty());
  EXPECT_EQ(admitted->copied_blocks.size(), 3U);
  EXPECT_FALSE(cache_->CacheIsClearable());
  admitted.reset();
  cache_->Free(tables);
  EXPECT_TRUE(cache_->ClearCache());
  EXPECT_EQ(cache_->NumEmptyLcmBlocks(), 20);
  EXPECT_EQ(Probe({}, {1, 2, 3}).resume_tokens(), 0);
}

TEST_F(PartialPageReuse, is_reported_neither_when_it_comes_nor_when_it_goes) {
  Open(20, {Full(8)});
  End({}, {1, 2, 3});
  EXPECT_EQ(Probe({}, {1, 2, 3}).resume_tokens(), 3);
  EXPECT_TRUE(cache_->ClearCache());
  EXPECT_EQ(Probe({}, {1, 2, 3}).resume_tokens(), 0);
  EXPECT_EQ(reports_, 0);
}

TEST_F(PartialPageReuse, is_never_found_as_a_whole_page_nor_a_whole_page_as_one) {
  Open(20, {Full(8)});
  const auto hashes = Hashes(1, 1);
  End(hashes, {1, 2});
  const PrefixHash name = PartialPages::NameOf(hashes.back(), std::vector{1, 2});
  EXPECT_EQ(cache_->ProbePrefix(std::vector{hashes[0], name}).prefix_tokens(), 8);
  EXPECT_EQ(Probe({}, {1, 0}).resume_tokens(), 0);
}

TEST_F(PartialPageReuse, spares_what_it_copies_when_it_evicts) {
  Open(4, {Full(8)});
  const auto hashes = Hashes(1, 1);
  End(hashes, {1, 2, 3});
  const PrefixProbe probe = Probe(hashes, {1, 2, 3});
  std::vector<BlockTable> tables = cache_->MakeTables();
  EXPECT_FALSE(cache_->Admit(probe, tables, Demands(3 * kPage), {}).has_value());
  EXPECT_EQ(Probe(hashes, {1, 2, 3}).resume_tokens(), 11) << "a refusal changes nothing";
  EXPECT_TRUE(cache_->Admit(probe, tables, Demands(2 * kPage), {}).has_value());
  cache_->Free(tables);
  PrefixProbe without = probe;
  without.partial = {};
  EXPECT_TRUE(cache_->Admit(without, tables, Demands(3 * kPage), {}).has_value());
  EXPECT_EQ(Probe(hashes, {1, 2, 3}).resume_tokens(), 8);
  cache_->Free(tables);
}

TEST_F(PartialPageReuse, in_a_window_needs_and_copies_only_what_is_read) {
  Open(40, {Window(3, 1)});
  const auto left = End({}, {1, 2, 3, 4, 5, 6}, /*expired_at=*/5);  // rows 3, 4 and 5 are left
  EXPECT_EQ(Probe({}, {1, 2, 3, 9}).resume_tokens(), 0) << "rows 1 and 2 are gone";
  const PrefixProbe probe = Probe({}, {1, 2, 3, 4, 5, 9});
  EXPECT_EQ(probe.resume_tokens(), 5);
  std::vector<BlockTable> tables = cache_->MakeTables();
  const auto admitted = cache_->Admit(probe, tables, Demands(6), {});
  ASSERT_TRUE(admitted.has_value());
  EXPECT_EQ(Held(tables[0]), (std::vector<int32_t>{0, 0, 0, 1, 1, 1}));
  const auto own = Ids(*cache_, 0, tables);
  EXPECT_EQ(admitted->copies[0], (std::vector<BlockCopy>{{left[0][3], own[3]}, {left[0][4], own[4]}}));
  EXPECT_EQ(admitted->new_block_ids[0], (std::vector<int32_t>{own[5]}));
  cache_->Free(tables);
}

TEST_F(PartialPageReuse, ends_before_the_first_block_that_is_gone) {
  Open(4, {Full(2)});
  End({}, {1, 2, 3, 4, 5});
  EXPECT_EQ(Probe({}, {1, 2, 3, 4, 5}).resume_tokens(), 5);
  std::vector<BlockTable> tables = cache_->MakeTables();
  ASSERT_TRUE(cache_->Admit(cache_->NeutralProbe(), tables, Demands(4), {}).has_value());
  EXPECT_EQ(Probe({}, {1, 2, 3, 4, 5}).resume_tokens(), 4) << "the deepest block goes first";
  cache_->Free(tables);
  End({}, {1, 2, 3, 4, 5});
  EXPECT_EQ(Probe({}, {1, 2, 3, 4, 5}).resume_tokens(), 5) << "what was gone is back";
}

TEST_F(PartialPageReuse, gives_way_to_a_ninth_behind_the_same_page_with_all_its_blocks) {
  Open(60, {Full(4, 2), Window(100, 8)});
  for (int32_t page = 0; page < 8; ++page) End({}, {page, 1, 2, 3, 4});
  const int32_t cached = cache_->group(0).index().NumEntries(cache_->device_pool());
  EXPECT_EQ(cached, 16);
  End({}, {8, 1, 2, 3, 4});
  EXPECT_EQ(cache_->group(0).index().NumEntries(cache_->device_pool()), cached);
  EXPECT_EQ(cache_->group(1).index().NumEntries(cache_->device_pool()), 8);
  EXPECT_EQ(Probe({}, {0, 1}).resume_tokens(), 0);
  EXPECT_EQ(Probe({}, {1, 1}).resume_tokens(), 2);
  EXPECT_EQ(Probe({}, {8, 1}).resume_tokens(), 2);
}

TEST_F(PartialPageReuse, of_groups_without_rows_to_match_is_a_broken_invariant) {
  for (const CacheGroupSpec& spec : {State(8), Replayable(4, 8)}) {
    CacheCoordinator cache(kPage, 8, std::vector{spec});
    std::vector<BlockTable> tables = cache.MakeTables();
    ASSERT_TRUE(cache.Admit(cache.NeutralProbe(), tables, std::vector{Dense(3)}, {}).has_value());
    EXPECT_FATAL(cache.CachePartialPage(tables, kRoot, 0, std::vector{1, 2, 3}, 1));
    cache.Free(tables);
  }
}

}  // namespace
}  // namespace tokenspeed
