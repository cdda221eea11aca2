// Registration, canonical blocks, recency, pins and eviction order of one group's index.

#include "prefix/prefix_cache_index.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cache_fixture.h"
#include "tests/broken_invariant.h"

namespace tokenspeed {
namespace {

struct Fixture {
  explicit Fixture(int32_t parents = 8, int32_t packing = 1, bool prefix_closed = false)
      : pool(parents, {packing}), index(0, prefix_closed), keys(ExpandCacheKeys(testing::Hashes(1, 16), 0, 1)) {}

  // Publishes a fresh block under key `k` and lets go of it; returns its location.
  CacheBlockLocation Cache(int32_t k, uint64_t epoch, BoundaryKind kind = BoundaryKind::kChunk) {
    CacheBlockRef block = pool.AcquireBlock(0);
    EXPECT_TRUE(index.Register(pool, block, keys[k], epoch, k, kind));
    return block->Location();
  }

  BlockPool pool;
  PrefixCacheIndex index;
  std::vector<CacheKey> keys;
};

TEST(PrefixCacheIndex, entry_keeps_its_block_alive_until_evicted) {
  Fixture f;
  const CacheBlockLocation location = f.Cache(0, 1);
  EXPECT_TRUE(f.index.Contains(f.pool, f.keys[0]) && f.index.Contains(f.pool, location));
  EXPECT_TRUE(f.pool.IsOccupied(location));
  EXPECT_TRUE(f.index.Evict(f.pool, location) == std::optional(f.keys[0]));
  EXPECT_FALSE(f.pool.IsOccupied(location));
  EXPECT_FALSE(f.index.Contains(f.pool, f.keys[0]));
  EXPECT_EQ(f.index.NumEntries(f.pool), 0);
  EXPECT_FALSE(f.index.Evict(f.pool, location).has_value());
}

TEST(PrefixCacheIndex, pinned_entry_is_not_evicted) {
  Fixture f;
  const CacheBlockLocation location = f.Cache(0, 1);
  CacheBlockRef pin = f.index.Find(f.pool, f.keys[0]);
  EXPECT_EQ(pin.use_count(), 2);
  EXPECT_EQ(f.index.NumPinnedEntries(f.pool), 1);
  EXPECT_FALSE(f.index.Evict(f.pool, location).has_value());
  EXPECT_FALSE(f.pool.IsEvictable(location.lcm_block_id));
  pin.reset();
  EXPECT_TRUE(f.pool.IsEvictable(location.lcm_block_id));
  EXPECT_TRUE(f.index.Evict(f.pool, location).has_value());
}

TEST(PrefixCacheIndex, duplicate_storage_is_replaced_by_the_canonical_block) {
  Fixture f;
  const CacheBlockLocation canonical = f.Cache(0, 1);
  CacheBlockRef twin = f.pool.AcquireBlock(0);
  const CacheBlockLocation freed = twin->Location();
  EXPECT_FALSE(f.index.Register(f.pool, twin, f.keys[0], 5, 0, BoundaryKind::kEndpoint));
  EXPECT_TRUE(twin->Location() == canonical);
  EXPECT_FALSE(f.pool.IsOccupied(freed));
  const PrefixEntryMetadata expected{
      .last_access_epoch = 5, .logical_block_index = 0, .boundary_kind = BoundaryKind::kEndpoint, .was_acquired = false};
  EXPECT_TRUE(f.index.MetadataFor(f.pool, canonical) == expected);
}

TEST(PrefixCacheIndex, boundary_kind_only_rises) {
  Fixture f;
  CacheBlockRef block = f.pool.AcquireBlock(0);
  f.index.Register(f.pool, block, f.keys[0], 1, 0, BoundaryKind::kPromoted);
  EXPECT_FALSE(f.index.Register(f.pool, block, f.keys[0], 2, 0, BoundaryKind::kChunk));
  EXPECT_TRUE(f.index.MetadataFor(f.pool, block->Location())->boundary_kind == BoundaryKind::kPromoted);
  EXPECT_EQ(f.index.MetadataFor(f.pool, block->Location())->last_access_epoch, uint64_t{2});
}

TEST(PrefixCacheIndex, location_has_one_key_and_blocks_belong_to_their_group) {
  Fixture f;
  CacheBlockRef block = f.pool.AcquireBlock(0);
  f.index.Register(f.pool, block, f.keys[0], 1, 0, BoundaryKind::kChunk);
  EXPECT_FATAL(f.index.Register(f.pool, block, f.keys[1], 1, 1, BoundaryKind::kChunk));
  EXPECT_FATAL(f.index.Register(f.pool, block, f.keys[0], 0, 0, BoundaryKind::kChunk));
  BlockPool other(1, {1, 1});
  CacheBlockRef foreign = other.AcquireBlock(0);
  EXPECT_FATAL(f.index.Register(f.pool, foreign, f.keys[1], 1, 0, BoundaryKind::kChunk));
  CacheBlockRef wrong_group = other.AcquireBlock(1);
  EXPECT_FALSE(bool(wrong_group));
  CacheKey wrong_key = f.keys[2];
  wrong_key.group_id = 1;
  CacheBlockRef second = f.pool.AcquireBlock(0);
  EXPECT_FATAL(f.index.Register(f.pool, second, wrong_key, 1, 0, BoundaryKind::kChunk));
}

TEST(PrefixCacheIndex, acquiring_a_match_marks_it_and_probing_does_not) {
  Fixture f;
  const CacheBlockLocation a = f.Cache(0, 1);
  const CacheBlockLocation b = f.Cache(1, 1);
  const std::vector<uint8_t> mask = {0, 1};
  EXPECT_TRUE(f.index.MatchedLocations(f.pool, f.keys, mask) == std::vector<CacheBlockLocation>{b});
  EXPECT_FALSE(f.index.MetadataFor(f.pool, b)->was_acquired);
  {
    const auto blocks = f.index.AcquireMatched(f.pool, f.keys, mask, 9);
    EXPECT_FALSE(bool(blocks[0]));
    EXPECT_TRUE(blocks[1]->Location() == b);
  }
  EXPECT_TRUE(f.index.MetadataFor(f.pool, b)->was_acquired);
  EXPECT_EQ(f.index.MetadataFor(f.pool, b)->last_access_epoch, uint64_t{9});
  EXPECT_EQ(f.index.MetadataFor(f.pool, a)->last_access_epoch, uint64_t{1});
  CacheBlockRef again = f.index.Find(f.pool, f.keys[1]);
  f.index.Register(f.pool, again, f.keys[1], 10, 1, BoundaryKind::kChunk);
  EXPECT_TRUE(f.index.MetadataFor(f.pool, b)->was_acquired);
  const std::vector<uint8_t> absent = {0, 0, 1};
  EXPECT_FATAL(f.index.AcquireMatched(f.pool, f.keys, absent, 11));
}

TEST(PrefixCacheIndex, ranges_skip_holes_and_report_new_keys) {
  Fixture f;
  f.Cache(1, 1);
  std::vector<CacheBlockRef> blocks(4);
  for (int32_t i : {1, 3}) blocks[i] = f.pool.AcquireBlock(0);
  std::vector<CacheKey> new_keys;
  f.index.RegisterFullBlocks(f.pool, blocks, std::span(f.keys).first(4), 2, 10, BoundaryKind::kChunk, new_keys);
  EXPECT_TRUE(new_keys == std::vector<CacheKey>{f.keys[3]});
  EXPECT_EQ(f.index.MetadataFor(f.pool, blocks[3]->Location())->logical_block_index, 13);
  EXPECT_EQ(f.index.NumEntries(f.pool), 2);
}

// The locations that a cursor yields, in its order.
std::vector<CacheBlockLocation> EvictionOrder(const Fixture& f) {
  std::vector<CacheBlockLocation> locations;
  for (auto cursor = f.index.StartEviction(f.pool); cursor.rank() != nullptr; cursor.Advance()) {
    locations.push_back(cursor.rank()->location);
  }
  return locations;
}

TEST(PrefixCacheIndex, cursor_yields_the_oldest_first_and_skips_pinned_ones) {
  Fixture f;
  const CacheBlockLocation old_a = f.Cache(0, 2);
  const CacheBlockLocation held = f.Cache(1, 3);
  const CacheBlockLocation young = f.Cache(2, 7);
  const CacheBlockLocation old_b = f.Cache(3, 2);
  CacheBlockRef pin = f.index.Find(f.pool, f.keys[1]);
  EXPECT_EQ(EvictionOrder(f), (std::vector{old_a, old_b, young}));
  EXPECT_EQ(f.index.EvictableCandidates(f.pool).size(), std::size_t{3});
  EXPECT_EQ(f.pool.NumEvictableLcmBlocks(), 3);
  pin.reset();
  EXPECT_EQ(EvictionOrder(f), (std::vector{old_a, old_b, held, young}));
}

TEST(PrefixCacheIndex, within_an_epoch_a_closed_group_gives_up_suffixes_first) {
  Fixture f(8, 1, /*prefix_closed=*/true);
  const CacheBlockLocation first = f.Cache(0, 2);
  const CacheBlockLocation last = f.Cache(9, 2);
  const CacheBlockLocation middle = f.Cache(4, 2);
  EXPECT_EQ(EvictionOrder(f), (std::vector{last, middle, first}));
}

TEST(PrefixCacheIndex, within_an_epoch_other_groups_keep_what_has_proved_itself) {
  Fixture f;
  const CacheBlockLocation endpoint = f.Cache(0, 2, BoundaryKind::kEndpoint);
  const CacheBlockLocation deep = f.Cache(9, 2);
  const CacheBlockLocation shallow = f.Cache(4, 2);
  const CacheBlockLocation acquired = f.Cache(1, 1);
  f.index.AcquireMatched(f.pool, std::span(f.keys).subspan(1, 1), std::vector<uint8_t>{1}, 2);
  EXPECT_EQ(EvictionOrder(f), (std::vector{shallow, deep, endpoint, acquired}));
}

TEST(PrefixCacheIndex, an_unpinned_entry_moves_when_it_is_published_again) {
  Fixture f;
  const CacheBlockLocation a = f.Cache(0, 2);
  const CacheBlockLocation b = f.Cache(1, 3);
  EXPECT_EQ(EvictionOrder(f), (std::vector{a, b}));
  CacheBlockRef twin = f.pool.AcquireBlock(0);
  EXPECT_FALSE(f.index.Register(f.pool, twin, f.keys[0], 9, 0, BoundaryKind::kChunk));
  twin.reset();
  EXPECT_EQ(EvictionOrder(f), (std::vector{b, a}));
}

TEST(PrefixCacheIndex, parent_is_evictable_only_when_every_block_is) {
  Fixture f(2, 3);
  f.Cache(0, 1);
  f.Cache(1, 2);
  EXPECT_TRUE(f.pool.IsEvictable(1));
  const CacheBlockRef uncached = f.pool.AcquireBlock(0);
  EXPECT_FALSE(f.pool.IsEvictable(1));
  EXPECT_FALSE(f.pool.IsEvictable(2));
}

TEST(PrefixCacheIndex, pools_have_separate_entries) {
  Fixture f;
  BlockPool second(2, {1});
  {
    PrefixCacheIndex index(0, /*prefix_closed=*/true);
    CacheBlockRef here = f.pool.AcquireBlock(0);
    CacheBlockRef there = second.AcquireBlock(0);
    EXPECT_TRUE(index.Register(f.pool, here, f.keys[0], 1, 0, BoundaryKind::kChunk));
    EXPECT_FALSE(index.Contains(second, f.keys[0]));
    EXPECT_TRUE(index.Register(second, there, f.keys[0], 2, 0, BoundaryKind::kChunk));
    EXPECT_EQ(index.NumEntries(second), 1);
    EXPECT_EQ(index.MetadataFor(f.pool, here->Location())->last_access_epoch, uint64_t{1});
  }
}

}  // namespace
}  // namespace tokenspeed
