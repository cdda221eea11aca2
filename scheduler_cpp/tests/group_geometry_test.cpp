// Vectors S-GT of the specification: tokens to blocks, tables, retention.

#include "coordinator/group_geometry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "tests/cache_fixture.h"
#include "tests/broken_invariant.h"

namespace tokenspeed {
namespace {

using testing::Dense;
using testing::Frontier;
using testing::Full;
using testing::Held;
using testing::NumHoles;
using testing::Sparse;
using testing::State;
using testing::Window;

// One request over a cache of its own.
struct Resident {
  Resident(int32_t prefix_granularity, int32_t parents, std::vector<CacheGroupSpec> specs)
      : cache(prefix_granularity, parents, specs), tables(cache.MakeTables()) {}
  ~Resident() { cache.Free(tables); }

  bool Admit(const std::vector<TokenDemand>& demands, const RequestProgress& progress = {}) {
    const auto result = cache.Admit(cache.ProbePrefix({}), tables, demands, progress, epoch);
    if (result) epoch = result->access_epoch;
    return result.has_value();
  }
  int32_t Blocks(int32_t group) const { return tables[group].NumSlots(); }
  int32_t Available(int32_t group) const { return tables[group].available_tokens; }

  CacheCoordinator cache;
  std::vector<BlockTable> tables;
  std::optional<uint64_t> epoch;
};

TEST(GroupGeometry, GT1_growth_uses_the_tail_first) {
  Resident r(4, 8, {Full(4)});
  EXPECT_TRUE(r.Admit({Dense(3)}));
  EXPECT_EQ(r.Blocks(0), 1);
  EXPECT_EQ(r.Available(0), 1);
  EXPECT_TRUE(r.Admit({Dense(1)}));
  EXPECT_EQ(r.Blocks(0), 1);
  EXPECT_EQ(r.Available(0), 0);
}

TEST(GroupGeometry, GT2_growth_across_blocks) {
  Resident r(4, 8, {Full(4)});
  EXPECT_TRUE(r.Admit({Dense(2)}) && r.Admit({Dense(7)}));
  EXPECT_EQ(r.Blocks(0), 3);
  EXPECT_EQ(r.Available(0), 3);
}

TEST(GroupGeometry, GT3_reserve_is_capacity_and_consuming_it_touches_no_block) {
  Resident r(4, 8, {Full(4)});
  EXPECT_TRUE(r.Admit({Dense(1, 8)}));
  EXPECT_EQ(r.Blocks(0), 3);
  EXPECT_EQ(r.Available(0), 11);
  EXPECT_FALSE(r.cache.ConsumeInPlace(r.tables, 12, 1));
  EXPECT_TRUE(r.cache.ConsumeInPlace(r.tables, 8, 1));
  EXPECT_EQ(r.Available(0), 3);
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 5);
  EXPECT_FALSE(r.cache.ConsumeInPlace(r.tables, 4, 1));
  EXPECT_FATAL(r.cache.ConsumeInPlace(r.tables, -1, 1));
}

TEST(GroupGeometry, GT4_refused_growth_changes_nothing) {
  Resident r(4, 2, {Full(4)});
  EXPECT_FALSE(r.Admit({Dense(12)}));
  EXPECT_EQ(r.Blocks(0), 0);
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 2);
}

TEST(GroupGeometry, GT5_window_drops_what_no_query_can_read) {
  const std::vector<std::pair<int32_t, int32_t>> holes_at = {{0, 0}, {4, 0}, {5, 1}, {6, 1}, {7, 2}};
  for (const auto& [frontier, holes] : holes_at) {
    Resident r(2, 8, {Window(4, 2)});
    EXPECT_TRUE(r.Admit({Dense(10)}));
    EXPECT_EQ(r.cache.ConsumeInPlace(r.tables, 0, frontier), holes == 0);
    EXPECT_TRUE(r.Admit({Dense(0)}, Frontier(frontier)));
    EXPECT_EQ(NumHoles(r.tables[0]), holes);
    EXPECT_EQ(r.tables[0].reclaimed_prefix_blocks, holes);
    EXPECT_TRUE(r.cache.ConsumeInPlace(r.tables, 0, frontier));
  }
}

TEST(GroupGeometry, GT6_state_keeps_the_snapshot_below_the_frontier) {
  Resident r(4, 8, {State(4)});
  EXPECT_TRUE(r.Admit({Dense(16)}));
  EXPECT_TRUE(r.Admit({Dense(0)}, Frontier(16)));
  EXPECT_EQ(Held(r.tables[0]), (std::vector<int32_t>{0, 0, 0, 1}));
}

TEST(GroupGeometry, GT7_expired_slots_of_all_groups_return) {
  Resident r(2, 15, {Full(2), Window(6, 2), Window(2, 2)});
  EXPECT_TRUE(r.Admit({Dense(10), Dense(10), Dense(10)}));
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 0);
  EXPECT_TRUE(r.Admit({Dense(0), Dense(0), Dense(0)}, Frontier(10)));
  EXPECT_EQ(NumHoles(r.tables[0]), 0);
  EXPECT_EQ(NumHoles(r.tables[1]), 2);
  EXPECT_EQ(NumHoles(r.tables[2]), 4);
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 6);
}

TEST(GroupGeometry, GT8_sparse_suffix_materialises_only_its_blocks) {
  Resident r(2, 5, {Full(2, 2), State(2)});
  EXPECT_TRUE(r.Admit({Dense(8, 1), Sparse(8, 3, 1)}));
  EXPECT_EQ(r.Blocks(0), 5);
  EXPECT_EQ(Held(r.tables[1]), (std::vector<int32_t>{0, 0, 0, 1, 1}));
  EXPECT_EQ(r.Available(0), 2);
  EXPECT_EQ(r.Available(1), 2);
  EXPECT_EQ(r.tables[1].reclaimed_prefix_blocks, 3);
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 0);

  Resident smaller(2, 4, {Full(2, 2), State(2)});
  EXPECT_FALSE(smaller.Admit({Dense(8, 1), Sparse(8, 3, 1)}));
  EXPECT_EQ(smaller.Blocks(0) + smaller.Blocks(1), 0);
  EXPECT_EQ(smaller.cache.NumEmptyLcmBlocks(), 4);
}

TEST(GroupGeometry, GT9_successive_sparse_suffixes_keep_the_last_snapshot) {
  Resident r(2, 4, {State(2)});
  EXPECT_TRUE(r.Admit({Sparse(8, 3)}, Frontier(0)));
  EXPECT_EQ(Held(r.tables[0]), (std::vector<int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 3);
  EXPECT_TRUE(r.Admit({Sparse(16, 7)}, Frontier(8)));
  EXPECT_EQ(Held(r.tables[0]), (std::vector<int32_t>{0, 0, 0, 1, 0, 0, 0, 1}));
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 2);
  EXPECT_TRUE(r.Admit({Sparse(24, 11)}, Frontier(16)));
  EXPECT_EQ(Held(r.tables[0]), (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1}));
  EXPECT_EQ(r.cache.NumEmptyLcmBlocks(), 2);
}

TEST(GroupGeometry, GT10_frontier_moves_slot_by_slot) {
  Resident r(2, 16, {Full(2), Window(4, 2)});
  EXPECT_TRUE(r.Admit({Dense(4), Dense(4)}));
  const std::vector<std::vector<int32_t>> first_slots = {{1, 1}, {0, 1}, {0, 1}, {0, 0}};
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(r.Admit({Dense(1), Dense(1)}, Frontier(4 + i)));
    const std::vector<int32_t> held = Held(r.tables[1]);
    EXPECT_EQ(std::vector<int32_t>(held.begin(), held.begin() + 2), first_slots[i]);
    EXPECT_EQ(NumHoles(r.tables[0]), 0);
  }
}

TEST(GroupGeometry, GT11_claimed_pages_are_full) {
  Resident r(4, 8, {Full(4)});
  const auto hashes = testing::Hashes(1, 1);
  EXPECT_TRUE(r.Admit({Dense(4)}));
  r.cache.CacheFullBlocks(r.tables, hashes, *r.epoch, 0, BoundaryKind::kChunk);
  r.cache.Free(r.tables);
  const auto result = r.cache.Admit(r.cache.ProbePrefix(hashes), r.tables, std::vector{Dense(3)}, {});
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->device_prefix_tokens, 4);
  EXPECT_EQ(r.Blocks(0), 2);
  EXPECT_EQ(r.Available(0), 1);
  EXPECT_EQ(result->new_block_ids[0].size(), std::size_t{1});
}

TEST(GroupGeometry, GT12_hits_are_claimed_into_empty_tables_only) {
  Resident r(4, 8, {Full(4)});
  EXPECT_TRUE(r.Admit({Dense(4)}));
  const GroupAllocator& allocator = r.cache.group(0).allocator();
  EXPECT_FATAL(allocator.ClaimHitBlocks(r.tables[0], {}));
  const auto hashes = testing::Hashes(1, 1);
  r.cache.CacheFullBlocks(r.tables, hashes, *r.epoch, 0, BoundaryKind::kChunk);
  EXPECT_FATAL(r.cache.Admit(r.cache.ProbePrefix(hashes), r.tables, std::vector{Dense(1)}, {}));
}

TEST(GroupGeometry, leading_holes_of_a_hit_become_the_frontier) {
  BlockPool pool(4, {1});
  const GroupAllocator allocator(pool, 0, 1, 1);
  BlockTable table;
  std::vector<CacheBlockRef> hit(3);
  hit[2] = pool.AcquireBlock(0);
  allocator.ClaimHitBlocks(table, hit);
  EXPECT_EQ(table.reclaimed_prefix_blocks, 2);
  EXPECT_EQ(allocator.BlockIds(table), (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(allocator.SlotId(table, 1), 0);
  EXPECT_EQ(allocator.SlotId(table, 2), 1);
  hit.clear();
  allocator.Free(table);
  EXPECT_EQ(table.reclaimed_prefix_blocks, 0);
  EXPECT_EQ(pool.NumEmptyLcmBlocks(), 4);
}

TEST(GroupGeometry, tables_are_released_from_the_last_slot_to_the_first) {
  Resident r(4, 3, {Full(4)});
  EXPECT_TRUE(r.Admit({Dense(12)}));
  r.cache.Free(r.tables);
  EXPECT_TRUE(r.Admit({Dense(12)}));
  EXPECT_EQ(testing::Ids(r.cache, 0, r.tables), (std::vector<int32_t>{3, 2, 1}));
}

TEST(GroupGeometry, sharded_tables_prefer_the_least_loaded_owner) {
  Resident r(4, 2, {Full(4, 4, 2)});
  EXPECT_TRUE(r.Admit({Dense(12)}));
  EXPECT_EQ(testing::Ids(r.cache, 0, r.tables), (std::vector<int32_t>{1, 2, 3}));
  std::vector<BlockTable> other = r.cache.MakeTables();
  EXPECT_TRUE(r.cache.Admit(r.cache.ProbePrefix({}), other, std::vector{Dense(8)}, {}).has_value());
  // The other request takes the hole that is left in parent 1, of owner 1, and then opens parent 2 at owner 0.
  EXPECT_EQ(testing::Ids(r.cache, 0, other), (std::vector<int32_t>{4, 5}));
  r.cache.Free(other);
}

TEST(GroupGeometry, geometry_by_kind) {
  const GroupGeometry full(Full(4), 8);
  const GroupGeometry window(Window(10, 4), 8);
  const GroupGeometry narrow(Window(1, 4), 8);
  const GroupGeometry state(State(4), 8);
  EXPECT_TRUE(full.IsPrefixClosed());
  EXPECT_FALSE(window.IsPrefixClosed() || state.IsPrefixClosed());
  EXPECT_EQ(full.LookbackBlocks(), 0);
  EXPECT_EQ(window.LookbackBlocks(), 3);
  EXPECT_EQ(narrow.LookbackBlocks(), 0);
  EXPECT_EQ(state.LookbackBlocks(), 1);
  EXPECT_EQ(full.ExpiredBlocks(1000), 0);
  EXPECT_EQ(window.ExpiredBlocks(12), 0);
  EXPECT_EQ(window.ExpiredBlocks(13), 1);
  EXPECT_EQ(state.ExpiredBlocks(8), 1);
  EXPECT_EQ(state.ExpiredBlocks(9), 2);
  EXPECT_EQ(full.BlocksPerPrefixPage(), 2);
}

TEST(GroupGeometry, T19_expiry_leaves_what_the_next_token_reads) {
  const GroupGeometry window(Window(128, 64), 128);
  EXPECT_EQ(window.ExpiredBlocks(200), 1);
  EXPECT_EQ(window.ExpiredBlocks(127), 0);
  EXPECT_EQ(window.ExpiredBlocks(191), 1);
  const GroupGeometry state(State(128), 128);
  EXPECT_EQ(state.ExpiredBlocks(129), 1);
  EXPECT_EQ(state.ExpiredBlocks(128), 0);
}

TEST(GroupGeometry, T20_lookback_is_what_the_token_at_a_boundary_reads_below_it) {
  EXPECT_EQ(GroupGeometry(Window(128, 64), 128).LookbackBlocks(), 2);
  EXPECT_EQ(GroupGeometry(Window(1, 64), 128).LookbackBlocks(), 0);
  EXPECT_EQ(GroupGeometry(Window(65, 64), 128).LookbackBlocks(), 1);
  EXPECT_EQ(GroupGeometry(State(64), 128).LookbackBlocks(), 1);
}

TEST(GroupGeometry, impossible_demands_are_broken_invariants) {
  const GroupGeometry geometry(State(4), 4);
  BlockTable table;
  EXPECT_FATAL(geometry.BlocksNeeded(table, Dense(-1)));
  EXPECT_FATAL(geometry.BlocksNeeded(table, Dense(1, -1)));
  EXPECT_FATAL(geometry.BlocksNeeded(table, Sparse(0, 0)));
  EXPECT_FATAL(geometry.BlocksNeeded(table, Sparse(8, 2)));
  table.available_tokens = 1;
  EXPECT_FATAL(geometry.Plan(table, Sparse(8, 1)));
  table.available_tokens = 0;
  table.blocks.resize(2);
  EXPECT_FATAL(geometry.Plan(table, Sparse(8, 1)));
  EXPECT_FATAL(GroupGeometry(Full(3), 4));
  EXPECT_FATAL(GroupGeometry(Window(0, 4), 4));
}

// The blocks that a chunk with state needs, from the token count of its first snapshot.
TEST(GroupGeometry, AR9_AR10_a_snapshot_suffix_starts_at_the_block_of_its_first_snapshot) {
  const GroupGeometry coarse(State(128), 128);
  const BlockTable empty;
  const AcquirePlan crossing =
      coarse.Plan(empty, {.extent = coarse.SnapshotSuffix(51200, 51300), .reserve_tokens = 128});
  EXPECT_EQ(crossing.suffix_start, 399);
  EXPECT_EQ(crossing.num_blocks, 3);  // the checkpoint, the end, and one to move on to
  EXPECT_EQ(crossing.table_blocks_after, 402);
  EXPECT_EQ(coarse.SnapshotSuffix(51300, 51300).first_block, 400);

  const GroupGeometry fine(State(4), 8);
  EXPECT_EQ(fine.SnapshotSuffix(8, 10).first_block, 1);
  EXPECT_EQ(fine.SnapshotSuffix(10, 10).first_block, 2);
  EXPECT_EQ(fine.SnapshotSuffix(8, 10).extent_tokens, 10);
  EXPECT_FATAL(fine.SnapshotSuffix(0, 10));
  EXPECT_FATAL(fine.SnapshotSuffix(11, 10));
}

// The slots that a query reads below its own row, by going through the rows.
TEST(GroupGeometry, slots_read_below_a_position_are_those_of_its_rows) {
  for (int32_t granularity : {1, 2, 4, 8}) {
    for (int32_t window = 0; window <= 20; ++window) {  // 0: full attention
      const GroupGeometry geometry(window == 0 ? Full(granularity) : Window(window, granularity), 8);
      for (int32_t position = 0; position <= 40; ++position) {
        std::set<int32_t> slots;
        for (int32_t row = window == 0 ? 0 : std::max(0, position - window + 1); row < position; ++row) {
          slots.insert(row / granularity);
        }
        std::set<int32_t> told;
        const int32_t end = geometry.EndOfReadBlocks(position);
        for (int32_t slot = geometry.ExpiredBlocks(position); slot < end; ++slot) told.insert(slot);
        EXPECT_EQ(told, slots) << granularity << ' ' << window << ' ' << position;
        EXPECT_EQ(geometry.BlocksInPrefixPages(position), position / 8 * (8 / granularity));
      }
    }
  }
}

}  // namespace
}  // namespace tokenspeed
