// Forks of tables: what is shared, what is copied, what is refused, and what a refusal leaves alone.

#include "coordinator/table_fork.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/broken_invariant.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Completed;
using testing::Dense;
using testing::Frontier;
using testing::Full;
using testing::Hashes;
using testing::Held;
using testing::Ids;
using testing::Replayable;
using testing::State;
using testing::Window;

struct Resident {
  std::vector<BlockTable> tables;
  uint64_t epoch = 0;
};

Resident Prefilled(CacheCoordinator& cache, int32_t tokens, int32_t reserve = 1) {
  Resident resident{.tables = cache.MakeTables()};
  const std::vector<TokenDemand> demands(static_cast<std::size_t>(cache.NumGroups()), Dense(tokens, reserve));
  const auto admitted = cache.Admit(cache.ProbePrefix({}), resident.tables, demands, {});
  EXPECT_TRUE(admitted.has_value());
  resident.epoch = admitted->access_epoch;
  return resident;
}

std::optional<ForkedAdmission> Fork(CacheCoordinator& cache, const Resident& parent, int32_t prompt, Resident& fork,
                                    int32_t reserve = 0) {
  fork.tables = cache.MakeTables();
  const auto plan = cache.PlanFork(parent.tables, prompt - 1, prompt);
  if (!plan) return std::nullopt;
  const std::vector<TokenDemand> demands(static_cast<std::size_t>(cache.NumGroups()), Dense(1, reserve));
  auto forked = cache.Fork(*plan, parent.tables, prompt - 1, demands, fork.tables);
  if (forked) fork.epoch = forked->access_epoch;
  return forked;
}

TEST(TableFork, the_block_that_is_written_is_copied_and_every_block_below_is_shared) {
  CacheCoordinator cache(4, 20, std::vector{Full(4)});
  Resident parent = Prefilled(cache, 10);
  Resident fork;
  const auto forked = Fork(cache, parent, 10, fork);
  ASSERT_TRUE(forked.has_value());
  const auto theirs = Ids(cache, 0, parent.tables);
  const auto own = Ids(cache, 0, fork.tables);
  ASSERT_EQ(own.size(), 3U);
  EXPECT_EQ(own[0], theirs[0]);
  EXPECT_EQ(own[1], theirs[1]);
  EXPECT_NE(own[2], theirs[2]);
  EXPECT_EQ(forked->copies[0], (std::vector<BlockCopy>{{theirs[2], own[2]}}));
  EXPECT_TRUE(forked->new_block_ids[0].empty());
  EXPECT_EQ(fork.tables[0].available_tokens, 2);
  EXPECT_EQ(forked->access_epoch, 2U);
  EXPECT_EQ(parent.tables[0].blocks[0].use_count(), 2);
  EXPECT_TRUE(parent.tables[0].blocks[2].unique());
  cache.Free(parent.tables);
  cache.Free(fork.tables);
  EXPECT_EQ(cache.NumEmptyLcmBlocks(), 20);
}

TEST(TableFork, at_the_start_of_a_block_nothing_is_copied) {
  CacheCoordinator cache(4, 20, std::vector{Full(4)});
  Resident parent = Prefilled(cache, 9);
  Resident fork;
  const auto forked = Fork(cache, parent, 9, fork, 4);
  ASSERT_TRUE(forked.has_value());
  EXPECT_TRUE(forked->copies[0].empty());
  const auto own = Ids(cache, 0, fork.tables);
  EXPECT_EQ(forked->new_block_ids[0], (std::vector<int32_t>{own[2], own[3]}));
  EXPECT_EQ(fork.tables[0].available_tokens, 7);
  cache.Free(parent.tables);
  cache.Free(fork.tables);
}

TEST(TableFork, an_unfinished_prefix_page_is_copied_whole_unless_it_is_never_cached) {
  CacheCoordinator cache(8, 99, std::vector{Full(2), Window(4, 1), Window(12, 2), Replayable(4, 1)});
  Resident parent = Prefilled(cache, 15);
  Resident fork;
  const auto forked = Fork(cache, parent, 15, fork);
  ASSERT_TRUE(forked.has_value());
  EXPECT_EQ(forked->copies[0].size(), 3U);  // rows 8..13
  EXPECT_EQ(forked->copies[1].size(), 3U);  // rows 11..13; the page begins below the window
  EXPECT_EQ(Held(fork.tables[1]), (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(forked->copies[2].size(), 3U);  // rows 3..7 are shared
  EXPECT_EQ(Held(fork.tables[2]), (std::vector<int32_t>{0, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(Ids(cache, 2, fork.tables)[3], Ids(cache, 2, parent.tables)[3]);
  EXPECT_TRUE(forked->copies[3].empty());
  EXPECT_EQ(Ids(cache, 3, fork.tables)[13], Ids(cache, 3, parent.tables)[13]);
  cache.Free(parent.tables);
  cache.Free(fork.tables);
}

TEST(TableFork, continuations_publish_the_unfinished_page_under_keys_of_their_own) {
  CacheCoordinator cache(4, 20, std::vector{Full(2)});
  Resident parent = Prefilled(cache, 7);
  Resident fork;
  ASSERT_TRUE(Fork(cache, parent, 7, fork, 1).has_value());
  std::vector<PrefixHash> hashes = Hashes(1, 2);
  cache.CacheCompletedBlocks(parent.tables, Completed(hashes, 0, BoundaryKind::kChunk, 8), parent.epoch);
  hashes[1] = Hashes(2, 2)[1];
  cache.CacheCompletedBlocks(fork.tables, Completed(hashes, 0, BoundaryKind::kChunk, 8), fork.epoch);
  const auto& index = cache.group(0).index();
  EXPECT_EQ(index.NumEntries(cache.device_pool()), 2 + 2 + 2);
  // The common page takes the later epoch, as after a hit.
  EXPECT_EQ(index.MetadataFor(cache.device_pool(), fork.tables[0].blocks[0]->Location())->last_access_epoch,
            fork.epoch);
  cache.Free(parent.tables);
  cache.Free(fork.tables);
}

TEST(TableFork, what_a_window_has_let_go_of_cannot_be_forked) {
  CacheCoordinator cache(4, 20, std::vector{Full(4), Window(4, 2)});
  Resident parent = Prefilled(cache, 10, 4);
  EXPECT_TRUE(cache.PlanFork(parent.tables, 9, 10).has_value());
  const std::vector<TokenDemand> demands(2, Dense(1));
  ASSERT_TRUE(cache.Admit(cache.ProbePrefix({}), parent.tables, demands, Frontier(10), parent.epoch).has_value());
  EXPECT_TRUE(cache.PlanFork(parent.tables, 9, 10).has_value());  // reads from 6 on, which the query at 10 spares
  ASSERT_TRUE(cache.Admit(cache.ProbePrefix({}), parent.tables, demands, Frontier(11), parent.epoch).has_value());
  EXPECT_FALSE(cache.PlanFork(parent.tables, 9, 10).has_value());
  cache.Free(parent.tables);
}

TEST(TableFork, snapshots_cannot_be_forked) {
  CacheCoordinator cache(4, 20, std::vector{Full(4), State(4)});
  Resident parent = Prefilled(cache, 10);
  EXPECT_FALSE(cache.PlanFork(parent.tables, 9, 10).has_value());
  cache.Free(parent.tables);
}

TEST(TableFork, a_fork_evicts_what_it_needs_and_nothing_that_it_shares) {
  CacheCoordinator cache(4, 4, std::vector{Full(4)});
  Resident old = Prefilled(cache, 4, 0);
  cache.CacheFullBlocks(old.tables, Hashes(1, 1), old.epoch, 0, BoundaryKind::kChunk);
  cache.Free(old.tables);
  Resident parent = Prefilled(cache, 10, 0);
  cache.CacheFullBlocks(parent.tables, Hashes(2, 2), parent.epoch, 0, BoundaryKind::kChunk);
  ASSERT_EQ(cache.NumEmptyLcmBlocks(), 0);
  Resident fork;
  ASSERT_TRUE(Fork(cache, parent, 10, fork).has_value());
  EXPECT_EQ(cache.group(0).index().NumEntries(cache.device_pool()), 2);
  EXPECT_EQ(Ids(cache, 0, fork.tables)[1], Ids(cache, 0, parent.tables)[1]);
  EXPECT_EQ(cache.NumNewlyReleasableLcmBlocks(parent.tables), 1);  // the others are the fork's as well
  cache.Free(parent.tables);
  cache.Free(fork.tables);
}

TEST(TableFork, a_refused_fork_changes_nothing) {
  CacheCoordinator cache(4, 3, std::vector{Full(4)});
  Resident parent = Prefilled(cache, 10, 0);
  Resident fork;
  EXPECT_FALSE(Fork(cache, parent, 10, fork).has_value());
  EXPECT_TRUE(fork.tables[0].blocks.empty());
  EXPECT_TRUE(parent.tables[0].blocks[0].unique());
  cache.Free(parent.tables);
  Resident next = Prefilled(cache, 4);
  EXPECT_EQ(next.epoch, 2U);  // the refusal has used up none
  cache.Free(next.tables);
}

TEST(TableFork, a_table_is_not_forked_above_its_end_nor_into_one_in_use) {
  CacheCoordinator cache(4, 20, std::vector{Full(4)});
  Resident parent = Prefilled(cache, 4, 0);
  EXPECT_FATAL(cache.PlanFork(parent.tables, 9, 10));
  const auto plan = cache.PlanFork(parent.tables, 3, 4);
  Resident other = Prefilled(cache, 4);
  const std::vector<TokenDemand> demands(1, Dense(1));
  EXPECT_FATAL(cache.Fork(*plan, parent.tables, 3, demands, other.tables));
  cache.Free(parent.tables);
  cache.Free(other.tables);
}

}  // namespace
}  // namespace tokenspeed
