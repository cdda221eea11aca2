// Vectors S-BP of the specification: the pool's placement, reuse order, balance and references.

#include "core/block_pool.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/group_allocator.h"
#include "tests/broken_invariant.h"

namespace tokenspeed {
namespace {

using Locations = std::vector<std::pair<int32_t, int32_t>>;

Locations Of(const std::vector<CacheBlockRef>& blocks) {
  Locations locations;
  for (const CacheBlockRef& block : blocks) {
    locations.emplace_back(block->Location().lcm_block_id, block->Location().slot_index);
  }
  return locations;
}

Locations Of(const CacheBlockRef& block) { return Of(std::vector<CacheBlockRef>{block}); }

TEST(BlockPool, BP1_exact_acquisition_takes_all_or_nothing) {
  BlockPool pool(3, {1});
  EXPECT_TRUE(pool.AcquireBlocks(0, 4).empty());
  EXPECT_EQ(pool.NumEmptyLcmBlocks(), 3);
  const auto blocks = pool.AcquireBlocks(0, 3);
  EXPECT_EQ(Of(blocks), (Locations{{1, 0}, {2, 0}, {3, 0}}));
  EXPECT_EQ(pool.NumEmptyLcmBlocks(), 0);
}

TEST(BlockPool, BP2_first_block_binds_the_first_parent) {
  BlockPool pool(3, {2});
  const CacheBlockRef block = pool.AcquireBlock(0);
  EXPECT_EQ(Of(block), (Locations{{1, 0}}));
  EXPECT_EQ(pool.BoundGroup(1), 0);
  EXPECT_EQ(pool.OccupiedCount(1), 1);
  EXPECT_EQ(pool.NumFreeSlots(0), 1);
}

TEST(BlockPool, BP3_refused_acquisition_changes_nothing) {
  BlockPool pool(1, {2});
  const CacheBlockRef held = pool.AcquireBlock(0);
  EXPECT_TRUE(pool.AcquireBlocks(0, 2).empty());
  EXPECT_EQ(pool.OccupiedCount(1), 1);
  EXPECT_EQ(pool.BoundGroup(1), 0);
  EXPECT_EQ(pool.NumFreeSlots(0), 1);
}

TEST(BlockPool, BP4_parent_changes_group_only_when_empty) {
  BlockPool pool(1, {2, 8});
  CacheBlockRef a = pool.AcquireBlock(0);
  EXPECT_FALSE(bool(pool.AcquireBlock(1)));
  a.reset();
  EXPECT_EQ(pool.NumEmptyLcmBlocks(), 1);
  EXPECT_EQ(pool.BoundGroup(1), -1);
  const CacheBlockRef b = pool.AcquireBlock(1);
  EXPECT_EQ(Of(b), (Locations{{1, 0}}));
  EXPECT_EQ(pool.BoundGroup(1), 1);
  EXPECT_EQ(pool.NumFreeSlots(1), 7);
}

TEST(BlockPool, BP5_freed_parents_are_reused_in_release_order) {
  BlockPool pool(4, {1, 1});
  auto blocks = pool.AcquireBlocks(0, 4);
  blocks[0].reset();
  blocks[2].reset();
  EXPECT_EQ(Of(pool.AcquireBlocks(1, 2)), (Locations{{1, 0}, {3, 0}}));
}

TEST(BlockPool, BP6_densest_parent_is_filled_first) {
  BlockPool pool(3, {3});
  auto first = pool.AcquireBlocks(0, 4);
  first[2].reset();
  EXPECT_EQ(Of(pool.AcquireBlocks(0, 4)), (Locations{{1, 2}, {2, 1}, {2, 2}, {3, 0}}));
}

TEST(BlockPool, BP7_exactly_the_released_slot_is_taken_again) {
  BlockPool pool(1, {2});
  auto blocks = pool.AcquireBlocks(0, 2);
  blocks[0].reset();
  const CacheBlockRef again = pool.AcquireBlock(0);
  EXPECT_EQ(Of(again), (Locations{{1, 0}}));
  EXPECT_EQ(Of(blocks[1]), (Locations{{1, 1}}));
}

TEST(BlockPool, BP8_balanced_placement_deals_cyclically) {
  BlockPool pool(2, {4});
  pool.RegisterGroup(0, 4, 2);
  const auto blocks = pool.AcquireBlocks(0, 4, std::vector<int64_t>{0, 0});
  EXPECT_EQ(Of(blocks), (Locations{{1, 0}, {1, 1}, {1, 2}, {1, 3}}));
  for (int32_t i = 0; i < 4; ++i) EXPECT_EQ(ResolveCacheBlockId(blocks[i]->Location(), 4), i + 1);
}

TEST(BlockPool, BP9_parent_is_opened_at_the_lighter_bucket) {
  BlockPool pool(1, {4});
  pool.RegisterGroup(0, 4, 2);
  EXPECT_EQ(Of(pool.AcquireBlocks(0, 3, std::vector<int64_t>{2, 0})), (Locations{{1, 1}, {1, 3}, {1, 0}}));
}

TEST(BlockPool, BP10_bound_hole_outranks_balance) {
  BlockPool pool(2, {4});
  pool.RegisterGroup(0, 4, 2);
  auto blocks = pool.AcquireBlocks(0, 4);
  EXPECT_EQ(Of(blocks), (Locations{{1, 0}, {1, 1}, {1, 2}, {1, 3}}));
  blocks[0].reset();
  blocks[2].reset();
  EXPECT_EQ(Of(pool.AcquireBlocks(0, 1, std::vector<int64_t>{5, 0})), (Locations{{1, 0}}));
}

TEST(BlockPool, BP11_geometry_never_changes_after_registration) {
  BlockPool pool(2, {4, 4});
  pool.RegisterGroup(0, 4, 2);
  pool.AcquireBlock(0).reset();
  pool.RegisterGroup(0, 4, 2);
  EXPECT_FATAL(pool.RegisterGroup(0, 4, 1));
  EXPECT_FATAL(pool.RegisterGroup(1, 8, 1));
  pool.AcquireBlock(1).reset();  // fixes one bucket
  pool.RegisterGroup(1, 4, 1);
  EXPECT_FATAL(pool.RegisterGroup(1, 4, 2));
  EXPECT_FATAL(pool.RegisterGroup(0, 4, 3));
}

TEST(BlockPool, BP12_block_ids) {
  EXPECT_EQ(ResolveCacheBlockId({1, 0}, 8), 1);
  EXPECT_EQ(ResolveCacheBlockId({1, 7}, 8), 8);
  EXPECT_EQ(ResolveCacheBlockId({2, 0}, 8), 9);
  EXPECT_EQ(ResolveCacheBlockId({2, 0}, 1), 2);
  EXPECT_FATAL(ResolveCacheBlockId({0, 0}, 8));
  EXPECT_FATAL(ResolveCacheBlockId({1, -1}, 8));
  EXPECT_FATAL(ResolveCacheBlockId({1, 8}, 8));
  EXPECT_FATAL(ResolveCacheBlockId({0x7fffffff, 7}, 8));
}

TEST(BlockPool, BP13_last_copy_frees_exactly_its_slot) {
  BlockPool pool(1, {3});
  auto blocks = pool.AcquireBlocks(0, 3);
  std::vector<CacheBlockRef> copies(8, blocks[1]);
  EXPECT_EQ(blocks[1].use_count(), 9);
  blocks[1].reset();
  while (!copies.empty()) {
    EXPECT_TRUE(pool.IsOccupied({1, 1}));
    EXPECT_EQ(pool.UseCount({1, 1}), static_cast<int32_t>(copies.size()));
    copies.pop_back();
  }
  EXPECT_FALSE(pool.IsOccupied({1, 1}));
  EXPECT_TRUE(pool.IsOccupied({1, 0}) && pool.IsOccupied({1, 2}));
}

TEST(BlockPool, BP14_pool_must_outlive_its_blocks) {
  EXPECT_FATAL({
    auto* pool = new BlockPool(1, {1});
    CacheBlockRef held = pool->AcquireBlock(0);
    delete pool;
  });
}

TEST(BlockPool, handles_share_move_and_swap) {
  BlockPool pool(2, {1});
  BlockPool other(1, {1});
  CacheBlockRef a = pool.AcquireBlock(0);
  CacheBlockRef b = pool.AcquireBlock(0);
  EXPECT_TRUE(a.unique() && a.IsOwnedBy(pool) && !a.IsOwnedBy(other));
  CacheBlockRef& alias = a;
  a = alias;
  EXPECT_EQ(a.use_count(), 1);
  CacheBlockRef moved = std::move(a);
  EXPECT_EQ(moved.use_count(), 1);
  EXPECT_FALSE(bool(a));  // NOLINT: a moved-from handle is empty by contract
  EXPECT_EQ(a.use_count(), 0);
  EXPECT_FALSE(a.unique());
  swap(moved, b);
  EXPECT_EQ(Of(moved), (Locations{{2, 0}}));
  EXPECT_FALSE(moved == b);
  b = moved;  // drops parent 1
  EXPECT_TRUE(b == moved);
  EXPECT_EQ(pool.NumEmptyLcmBlocks(), 1);
}

struct Cache final : CachedBlock {
  void OnUnpinned() noexcept override {}
  void OnPinned() noexcept override {}
};

TEST(BlockPool, uses_tell_what_requests_hold_from_what_is_only_cached_or_copied) {
  BlockPool pool(5, {1, 2});
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>(5, 0)));
  auto whole = pool.AcquireBlocks(0, 2);
  auto halves = pool.AcquireBlocks(1, 2);
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>{1, 1, 2, 0, 0}));
  Cache cache;
  const CacheBlockRef request = whole[0];
  pool.SetCached(whole[0], &cache);
  pool.SetCached(whole[1], &cache);
  pool.SetCached(halves[0], &cache);
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>{1, -1, 2, 0, 0})) << "the other half has a request still";
  pool.BeginTransfer(halves[1]);
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>{1, -1, -2, 0, 0}));
  for (const CacheBlockRef& block : whole) pool.SetCached(block, nullptr);
  whole.clear();
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>{1, 0, -2, 0, 0}));
  pool.EndTransfer(halves[1]);
  EXPECT_EQ(pool.LcmBlockUses(), (std::vector<int32_t>{1, 0, 2, 0, 0}));
  pool.SetCached(halves[0], nullptr);
  EXPECT_EQ(BlockPool(0, {1}).LcmBlockUses(), std::vector<int32_t>());
}

TEST(BlockPool, unbalanced_acquisition_of_a_sharded_group_is_ordinary) {
  BlockPool pool(2, {6});
  pool.RegisterGroup(0, 6, 3);
  auto blocks = pool.AcquireBlocks(0, 7);
  EXPECT_EQ(Of(blocks).back(), (std::pair<int32_t, int32_t>(2, 0)));
  blocks[4].reset();
  blocks[3].reset();
  EXPECT_EQ(Of(pool.AcquireBlocks(0, 3)), (Locations{{1, 3}, {1, 4}, {2, 1}}));
}

TEST(BlockPool, misuse_is_a_broken_invariant) {
  BlockPool pool(2, {4});
  pool.RegisterGroup(0, 4, 2);
  EXPECT_FATAL(pool.AcquireBlock(1));
  EXPECT_FATAL(pool.AcquireBlock(-1));
  EXPECT_FATAL(pool.OccupiedCount(0));
  EXPECT_FATAL(pool.OccupiedCount(3));
  EXPECT_FATAL(pool.IsOccupied({1, -1}));
  const CacheBlockRef held = pool.AcquireBlock(0);
  EXPECT_FATAL(pool.IsOccupied({1, 4}));
  EXPECT_FATAL(pool.AcquireBlocks(0, 1, std::vector<int64_t>{1, 2, 3}));
  EXPECT_FATAL(pool.AcquireBlocks(0, 1, std::vector<int64_t>{1, -2}));
  EXPECT_FATAL(BlockPool(-1, {1}));
  EXPECT_FATAL(BlockPool(1, {0}));
  EXPECT_FATAL(BlockPool(0x10000, {0x10000}));
}

TEST(BlockPool, empty_pool_has_no_capacity) {
  BlockPool pool(0, {3});
  EXPECT_EQ(pool.Capacity(0), int64_t{0});
  EXPECT_FALSE(bool(pool.AcquireBlock(0)));
  EXPECT_TRUE(pool.AcquireBlocks(0, 0).empty());
}

}  // namespace
}  // namespace tokenspeed
