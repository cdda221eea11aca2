// The host tier at the coordinator: probing two tiers (S-PM18 to S-PM22), host allocation, copies and clearing (S-HT15
// to S-HT20), snapshots on their way to the host (S-ST13), and what comes from an external store (S-L31 to S-L315).

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "coordinator/tier_transfers.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Completed;
using testing::Dense;
using testing::Full;
using testing::Hashes;
using testing::Held;
using testing::Sparse;
using testing::State;
using testing::Window;

using Demands = std::vector<TokenDemand>;

struct Admitted {
  AdmissionResult result;
  std::vector<BlockTable> tables;
};

class Tiers {
 public:
  Tiers(int32_t prefix_granularity, int32_t device, int32_t host, std::vector<CacheGroupSpec> specs,
        bool has_storage = false)
      : cache(prefix_granularity, device, specs, nullptr,
              {.num_lcm_blocks = host, .streams = true, .has_storage = has_storage}),
        transfers(cache) {}

  static CacheKey Key(int32_t group, const PrefixHash& hash, int32_t offset = 0) {
    return {.content_hash = hash, .namespace_id = 0, .group_id = group, .page_offset = offset};
  }

  void PutOnHost(int32_t group, std::span<const PrefixHash> hashes, std::vector<int32_t> pages, int32_t bucket = 0) {
    for (int32_t page : pages) {
      const HostBlockWish wish{group, bucket};
      HostAllocation room = cache.AllocateOnHost({&wish, 1});
      ASSERT_TRUE(bool(room.blocks[0]));
      cache.PublishOnHost(std::move(room.blocks[0]), Key(group, hashes[page]));
    }
  }

  // With one block per page.
  void PutOnDevice(int32_t group, std::span<const PrefixHash> hashes, std::vector<int32_t> pages) {
    for (int32_t page : pages) {
      std::vector<BlockTable> tables = cache.MakeTables();
      Demands demands(tables.size(), Dense(0));
      demands[group] = Sparse((page + 1) * cache.prefix_granularity(), page);
      ASSERT_TRUE(cache.Admit(cache.ProbePrefix({}), tables, demands, {}).has_value());
      cache.PublishOnDevice(tables[group].blocks[page], Key(group, hashes[page]));
      cache.Free(tables);
    }
  }

  std::optional<Admitted> Admit(std::span<const PrefixHash> hashes, const Demands& demands) {
    Admitted admitted{{}, cache.MakeTables()};
    auto result = cache.Admit(cache.ProbePrefix(hashes), admitted.tables, demands, {});
    if (!result) return std::nullopt;
    admitted.result = std::move(*result);
    return admitted;
  }

  void Register(std::vector<CacheKey> keys) { cache.RegisterStorageKeys(std::move(keys)); }
  bool OnHost(int32_t group, const PrefixHash& hash, int32_t offset = 0) const {
    return cache.HostHas(Key(group, hash, offset));
  }
  bool OnDevice(int32_t group, const PrefixHash& hash, int32_t offset = 0) const {
    return bool(cache.FindOnDevice(Key(group, hash, offset)));
  }
  int32_t EmptyOnHost() const { return cache.host_pool().NumEmptyLcmBlocks(); }

  CacheCoordinator cache;
  TierTransfers transfers;
};

std::vector<int32_t> UpTo(int32_t last) {
  std::vector<int32_t> pages;
  for (int32_t page = 0; page <= last; ++page) pages.push_back(page);
  return pages;
}

TEST(HostTier, PM18_the_host_reaches_further_than_the_device) {
  Tiers t(4, 12, 12, {Full(4), State(4)});
  const auto pages = Hashes(1, 8);
  t.PutOnDevice(0, pages, UpTo(7));
  t.PutOnDevice(1, pages, {3});
  EXPECT_EQ(t.cache.ProbePrefix(pages).promotion_boundary_tokens(), 32);
  t.PutOnHost(0, pages, UpTo(7));
  t.PutOnHost(1, pages, {7});
  const PrefixProbe probe = t.cache.ProbePrefix(pages);
  EXPECT_EQ(probe.device_prefix_tokens(), 16);
  EXPECT_EQ(probe.prefix_tokens(), 32);
  EXPECT_EQ(probe.promotion_boundary_tokens(), 0);
}

struct TwoTierCase {
  std::vector<int32_t> host_full, host_window;
  int32_t common;
  int32_t pins;
};

TEST(HostTier, PM19_PM20_PM21_the_host_is_matched_from_the_device_prefix_on) {
  for (const TwoTierCase& c :
       {TwoTierCase{{1, 2, 3}, {2, 3}, 8, 5}, {{1, 2, 3}, {1, 2}, 6, 4}, {{1, 3}, {1, 2, 3}, 4, 2}}) {
    Tiers t(2, 16, 8, {Full(2), Window(4, 2)});
    const auto pages = Hashes(1, 4);
    t.PutOnDevice(0, pages, {0});
    t.PutOnDevice(1, pages, {0});
    t.PutOnHost(0, pages, c.host_full);
    t.PutOnHost(1, pages, c.host_window);
    auto admitted = t.Admit(pages, {Dense(2), Dense(2)});
    ASSERT_TRUE(admitted.has_value());
    EXPECT_EQ(admitted->result.device_prefix_tokens, 2);
    EXPECT_EQ(admitted->result.host_prefix_tokens, c.common);
    EXPECT_EQ(t.cache.NumHostPinnedBlocks(), c.pins);
    EXPECT_EQ(static_cast<int32_t>(admitted->result.load_pairs.size()), c.pins);
    if (c.common == 8) {
      EXPECT_EQ(Held(admitted->tables[1]), (std::vector<int32_t>{1, 0, 1, 1, 1}));
    }
    t.cache.Free(admitted->tables);
    admitted.reset();
    EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 0);
  }
}

TEST(HostTier, PM22_what_the_device_has_is_not_asked_of_the_host) {
  Tiers t(2, 16, 8, {Full(2), Window(4, 2)});
  const auto pages = Hashes(1, 4);
  for (int32_t group : {0, 1}) {
    t.PutOnDevice(group, pages, {0, 1});
    t.PutOnHost(group, pages, {0, 1});
  }
  auto admitted = t.Admit(pages, {Dense(2), Dense(2)});
  EXPECT_EQ(admitted->result.host_prefix_tokens, 4);
  EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 0);
  EXPECT_TRUE(admitted->result.load_pairs.empty());
  t.cache.Free(admitted->tables);
}

TEST(HostTier, HT15_a_window_that_reads_nothing_back_loads_nothing) {
  Tiers t(2, 8, 4, {Full(2), Window(1, 2)});
  const auto pages = Hashes(1, 3);
  t.PutOnHost(0, pages, UpTo(2));
  auto admitted = t.Admit(pages, {Dense(2), Dense(2)});
  EXPECT_EQ(admitted->result.load_pairs.size(), 3u);
  EXPECT_EQ(Held(admitted->tables[1]), (std::vector<int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(admitted->tables[1].reclaimed_prefix_blocks, 3);
  t.cache.Free(admitted->tables);
}

TEST(HostTier, HT16_a_group_replaces_its_own_before_a_parent_changes_hands) {
  Tiers t(4, 4, 1, {Full(4, 2), Full(4)});
  const auto pages = Hashes(1, 3);
  t.PutOnHost(0, pages, {0, 1});
  t.PutOnHost(0, pages, {2});
  EXPECT_FALSE(t.OnHost(0, pages[0]));
  EXPECT_TRUE(t.OnHost(0, pages[1]));
  t.PutOnHost(1, pages, {0});
  EXPECT_EQ(t.cache.NumHostCachedBlocks(), 1);
  EXPECT_EQ(t.cache.host_pool().BoundGroup(1), 1);
}

TEST(HostTier, HT16_entries_that_were_hit_outlive_older_ones_that_were_not) {
  Tiers t(4, 8, 2, {Full(4)});
  const auto hit = Hashes(1, 1);
  const auto missed = Hashes(2, 1);
  t.PutOnHost(0, hit, {0});
  t.cache.Free(t.Admit(hit, {Dense(4)})->tables);
  t.PutOnHost(0, missed, {0});
  t.PutOnHost(0, Hashes(3, 1), {0});
  EXPECT_TRUE(t.OnHost(0, hit[0]));
  EXPECT_FALSE(t.OnHost(0, missed[0]));
}

TEST(HostTier, HT17_stores_of_the_group_that_holds_the_host_get_its_room) {
  Tiers t(4, 4, 1, {Full(4), Full(4, 2)});
  const auto old_pages = Hashes(1, 2);
  const auto new_pages = Hashes(2, 2);
  t.PutOnHost(1, old_pages, {0, 1});
  t.PutOnDevice(0, new_pages, {0});
  t.PutOnDevice(1, new_pages, {0, 1});
  t.cache.QueueCachedBlocksForStore(new_pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  const auto started = t.transfers.TakeStartedStores();
  ASSERT_EQ(started.size(), 1u);
  ASSERT_EQ(started[0].transfers.size(), 2u);
  for (const BlockTransfer& transfer : started[0].transfers) EXPECT_EQ(transfer.group_id, 1);
  EXPECT_EQ(t.transfers.num_dropped_stores(), 1);
  EXPECT_EQ(t.cache.NumHostCachedBlocks(), 0);
  t.transfers.CompleteWriteBack(started[0].op_id);
  EXPECT_EQ(t.cache.NumHostCachedBlocks(), 2);
}

TEST(HostAllocation, no_scan_happens_while_there_is_room) {
  Tiers t(4, 4, 2, {Full(4, 2), Full(4)});
  const std::vector<HostBlockWish> wishes = {{0, 0}, {1, 0}, {0, 0}, {1, 0}};
  const HostAllocation room = t.cache.AllocateOnHost(wishes);
  EXPECT_EQ(room.num_unallocated, 1);
  EXPECT_FALSE(bool(room.blocks[3]));
  EXPECT_EQ(room.same_group_scans, 1);  // for the last one alone
  EXPECT_EQ(room.cross_group_scans, 1);
  const HostBlockWish none[] = {{0, 0}};
  EXPECT_EQ(t.cache.AllocateOnHost({none, 0}).same_group_scans, 0);
}

TEST(HostAllocation, the_least_valuable_parent_changes_hands_first) {
  Tiers t(4, 8, 2, {Full(4), Full(4)});
  const auto pages = Hashes(1, 2);
  t.PutOnHost(0, pages, {0, 1});
  t.cache.Free(t.Admit(std::span(pages).first(1), {Dense(4), Dense(4)})->tables);  // common 0, for lack of group 1
  t.PutOnHost(1, pages, {0});
  EXPECT_FALSE(t.OnHost(0, pages[0]));
  EXPECT_TRUE(t.OnHost(0, pages[1]));
}

// A request that has computed and published `num_pages` pages in every group.
Admitted Publish(Tiers& t, std::span<const PrefixHash> pages) {
  const int32_t tokens = static_cast<int32_t>(pages.size()) * t.cache.prefix_granularity();
  Admitted admitted = *t.Admit({}, Demands(t.cache.NumGroups(), Dense(tokens)));
  RequestProgress progress = Completed(pages, 0, BoundaryKind::kChunk, tokens);
  progress.completed_pages->stream_completed_to_host = true;
  t.cache.CacheCompletedBlocks(admitted.tables, progress, admitted.result.access_epoch);
  return admitted;
}

TEST(HostTier, HT18_a_stream_ordered_store_holds_nothing_on_the_device) {
  Tiers t(4, 4, 4, {Full(4)});
  const auto pages = Hashes(1, 2);
  Admitted r = Publish(t, pages);
  t.transfers.StartPendingStores(SourceGuard::kStreamOrdered);
  const auto started = t.transfers.TakeStartedStores();
  EXPECT_FALSE(started[0].source_pinned);
  EXPECT_FALSE(t.transfers.OldestHoldingDevice().has_value());
  t.cache.Free(r.tables);
  EXPECT_TRUE(t.cache.ClearDeviceCache());
  EXPECT_EQ(t.cache.NumEmptyLcmBlocks(), 4);
  EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 2);
  t.transfers.CompleteWriteBack(started[0].op_id);
  EXPECT_TRUE(t.OnHost(0, pages[0]) && t.OnHost(0, pages[1]));
  EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 0);
}

TEST(HostTier, HT19_a_pinned_store_holds_its_sources) {
  Tiers t(4, 2, 4, {Full(4)});
  const auto pages = Hashes(1, 2);
  Admitted r = Publish(t, pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  const auto started = t.transfers.TakeStartedStores();
  EXPECT_TRUE(started[0].source_pinned);
  t.cache.Free(r.tables);
  EXPECT_EQ(t.cache.NumAvailableLcmBlocks(), 0);
  EXPECT_FALSE(t.cache.ClearDeviceCache());
  EXPECT_FALSE(t.cache.CacheIsClearable());
  EXPECT_FALSE(t.Admit({}, {Dense(4)}).has_value());
  t.transfers.CompleteWriteBack(started[0].op_id);
  EXPECT_EQ(t.cache.NumAvailableLcmBlocks(), 2);
  auto newcomer = t.Admit({}, {Dense(4)});
  ASSERT_TRUE(newcomer.has_value());
  t.cache.Free(newcomer->tables);
  EXPECT_TRUE(t.cache.ClearCache());
  EXPECT_EQ(t.cache.NumHostCachedBlocks(), 0);
}

TEST(HostTier, HT20_parents_held_by_a_store_or_by_another_are_not_released) {
  Tiers t(4, 4, 4, {Full(4)});
  const auto pages = Hashes(1, 1);
  Admitted a = Publish(t, pages);
  auto b = t.Admit(pages, {Dense(4)});
  EXPECT_EQ(t.cache.NumNewlyReleasableLcmBlocks(b->tables), 1);
  t.cache.Free(a.tables);
  EXPECT_EQ(t.cache.NumNewlyReleasableLcmBlocks(b->tables), 2);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  EXPECT_EQ(t.cache.NumNewlyReleasableLcmBlocks(b->tables), 1);
  t.transfers.CompleteWriteBack(t.transfers.TakeStartedStores()[0].op_id);
  EXPECT_EQ(t.cache.NumNewlyReleasableLcmBlocks(b->tables), 2);
  t.cache.Free(b->tables);
}

TEST(HostTier, HT8_only_the_first_acknowledgement_of_a_known_store_counts) {
  Tiers t(4, 4, 4, {Full(4)});
  const auto pages = Hashes(1, 1);
  Admitted r = Publish(t, pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  t.transfers.CompleteWriteBack(1);  // of which nobody has been told yet
  t.transfers.CompleteWriteBack(2);
  EXPECT_TRUE(t.transfers.HasAnyInFlight());
  const auto started = t.transfers.TakeStartedStores();
  EXPECT_EQ(started[0].op_id, 1u);
  t.transfers.CompleteLoadBack(1, true);
  EXPECT_FALSE(t.OnHost(0, pages[0]));
  t.transfers.CompleteWriteBack(1);
  EXPECT_TRUE(t.OnHost(0, pages[0]));
  t.transfers.CompleteWriteBack(1);
  EXPECT_EQ(t.cache.NumHostCachedBlocks(), 1);
  t.cache.Free(r.tables);
}

TEST(HostTier, a_key_is_stored_once_however_often_it_is_queued) {
  Tiers t(4, 4, 4, {Full(4)});
  const auto pages = Hashes(1, 2);
  Admitted r = Publish(t, pages);
  t.cache.QueueCachedBlocksForStore(pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  auto started = t.transfers.TakeStartedStores();
  EXPECT_EQ(started[0].transfers.size(), 2u);
  t.cache.QueueCachedBlocksForStore(pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  EXPECT_TRUE(t.transfers.TakeStartedStores().empty());
  t.transfers.CompleteWriteBack(started[0].op_id);
  t.cache.QueueCachedBlocksForStore(pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  EXPECT_TRUE(t.transfers.TakeStartedStores().empty());
  EXPECT_FALSE(t.transfers.HasAnyInFlight());
  t.cache.Free(r.tables);
}

TEST(HostTier, what_left_the_device_before_the_store_began_is_not_stored) {
  Tiers t(4, 4, 4, {Full(4)});
  Admitted r = Publish(t, Hashes(1, 2));
  t.cache.Free(r.tables);
  EXPECT_TRUE(t.cache.EvictDeviceCache());
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  EXPECT_FALSE(t.transfers.HasAnyInFlight());
}

TEST(HostTier, ST13_a_snapshot_is_stored_once_it_is_an_endpoint) {
  Tiers t(4, 8, 8, {State(4)});
  const auto pages = Hashes(1, 2);
  Admitted r = *t.Admit({}, {Dense(8)});
  const std::vector<int32_t> boundaries = {4, 8};
  RequestProgress progress = Completed(std::span(pages).first(1), 0, BoundaryKind::kChunk, 4, boundaries);
  progress.completed_pages->stream_completed_to_host = true;
  t.cache.CacheCompletedBlocks(r.tables, progress, r.result.access_epoch);
  EXPECT_FALSE(t.OnDevice(0, pages[0]));
  EXPECT_FALSE(t.cache.HasPendingStores());
  progress = Completed(pages, 1, BoundaryKind::kEndpoint, 8, boundaries);
  progress.completed_pages->stream_completed_to_host = true;
  t.cache.CacheCompletedBlocks(r.tables, progress, r.result.access_epoch);
  EXPECT_TRUE(t.OnDevice(0, pages[1]));
  EXPECT_EQ(t.cache.TakePendingStores(), (std::vector<CacheKey>{Tiers::Key(0, pages[1])}));
  t.cache.QueueCachedBlocksForStore(pages);
  EXPECT_FALSE(t.cache.HasPendingStores());
  t.cache.QueueLatestSnapshotBlocksForStore(pages);
  EXPECT_EQ(t.cache.TakePendingStores(), (std::vector<CacheKey>{Tiers::Key(0, pages[1])}));
  t.cache.Free(r.tables);
}

TEST(ExternalStore, L31_L32_a_block_from_the_store_appears_when_it_has_arrived) {
  for (const bool success : {true, false}) {
    Tiers t(2, 4, 4, {Full(2)}, /*has_storage=*/true);
    const auto pages = Hashes(1, 1);
    t.Register({Tiers::Key(0, pages[0])});
    EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 2);
    auto r = t.Admit(pages, {Dense(2)});
    ASSERT_EQ(r->result.load_pairs.size(), 1u);
    EXPECT_TRUE(r->result.load_pairs[0].from_storage);
    EXPECT_EQ(r->result.load_pairs[0].key, Tiers::Key(0, pages[0]));
    EXPECT_EQ(r->result.new_block_ids[0].size(), 1u);
    t.transfers.StartPrefixLoad(std::move(r->result.load_pairs));
    const auto started = t.transfers.TakeStartedLoads();
    EXPECT_FALSE(t.OnHost(0, pages[0]) || t.OnDevice(0, pages[0]));
    EXPECT_EQ(t.transfers.CompleteLoadBack(started[0].op_id, success).size(), 1u);
    EXPECT_EQ(t.OnHost(0, pages[0]), success);
    EXPECT_EQ(t.OnDevice(0, pages[0]), success);
    EXPECT_TRUE(t.transfers.CompleteLoadBack(started[0].op_id, true).empty());
    EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 0);
    EXPECT_EQ(t.EmptyOnHost(), success ? 3 : 4);
    t.cache.Free(r->tables);
  }
}

TEST(ExternalStore, L33_one_page_may_come_from_host_and_store_together) {
  Tiers t(2, 8, 4, {Full(2), Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 1);
  t.PutOnHost(0, pages, {0});
  t.Register({Tiers::Key(1, pages[0])});
  auto r = t.Admit(pages, {Dense(2), Dense(2)});
  ASSERT_EQ(r->result.load_pairs.size(), 2u);
  EXPECT_FALSE(r->result.load_pairs[0].from_storage);
  EXPECT_TRUE(r->result.load_pairs[1].from_storage);
  EXPECT_TRUE(r->result.load_pairs[0].key.has_value());
  t.transfers.StartPrefixLoad(std::move(r->result.load_pairs));
  t.transfers.CompleteLoadBack(t.transfers.TakeStartedLoads()[0].op_id, true);
  for (int32_t group : {0, 1}) EXPECT_TRUE(t.OnHost(group, pages[0]) && t.OnDevice(group, pages[0]));
  t.cache.Free(r->tables);
}

TEST(ExternalStore, L34_what_the_host_has_needs_no_key) {
  Tiers t(2, 8, 4, {Full(2)});
  const auto pages = Hashes(1, 1);
  t.Register({Tiers::Key(0, Hashes(2, 1)[0])});  // without a store nothing comes of it
  EXPECT_EQ(t.cache.ProbePrefix(Hashes(2, 1)).prefix_tokens(), 0);
  t.PutOnHost(0, pages, {0});
  auto r = t.Admit(pages, {Dense(2)});
  ASSERT_EQ(r->result.load_pairs.size(), 1u);
  EXPECT_FALSE(r->result.load_pairs[0].from_storage || r->result.load_pairs[0].key.has_value());
  t.cache.Free(r->tables);
}

TEST(ExternalStore, a_failed_load_takes_back_what_was_published_ahead_of_it) {
  Tiers t(2, 8, 4, {Full(2)});
  const auto pages = Hashes(1, 1);
  t.PutOnHost(0, pages, {0});
  auto r = t.Admit(pages, {Dense(2)});
  t.cache.CacheFullBlocks(r->tables, pages, r->result.access_epoch, 0, BoundaryKind::kChunk);
  EXPECT_TRUE(t.OnDevice(0, pages[0]));
  t.transfers.StartPrefixLoad(std::move(r->result.load_pairs));
  t.transfers.CompleteLoadBack(t.transfers.TakeStartedLoads()[0].op_id, false);
  EXPECT_FALSE(t.OnDevice(0, pages[0]));
  EXPECT_TRUE(t.OnHost(0, pages[0]));
  t.cache.Free(r->tables);
  EXPECT_EQ(t.cache.NumEmptyLcmBlocks(), 8);
}

TEST(ExternalStore, L39_a_short_host_gives_a_shorter_prefix) {
  Tiers t(2, 8, 2, {Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 2);
  const HostBlockWish wish{0, 0};
  const HostAllocation pinned = t.cache.AllocateOnHost({&wish, 1});
  t.Register({Tiers::Key(0, pages[0]), Tiers::Key(0, pages[1])});
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 4);
  EXPECT_EQ(t.cache.ProbePrefix(pages, 3).prefix_tokens(), 2);
  auto r = t.Admit(pages, {Dense(2)});
  EXPECT_EQ(r->result.host_prefix_tokens, 2);
  EXPECT_EQ(r->result.load_pairs.size(), 1u);
  t.cache.Free(r->tables);
}

TEST(ExternalStore, L310_half_a_window_is_given_up_and_its_room_with_it) {
  Tiers t(2, 8, 2, {Window(5, 2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 3);
  const HostBlockWish wish{0, 0};
  const HostAllocation pinned = t.cache.AllocateOnHost({&wish, 1});
  t.Register({Tiers::Key(0, pages[1]), Tiers::Key(0, pages[2])});
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 6);
  auto r = t.Admit(pages, {Dense(2)});
  EXPECT_EQ(r->result.host_prefix_tokens, 0);
  EXPECT_EQ(t.EmptyOnHost(), 1);
  t.cache.Free(r->tables);
}

TEST(ExternalStore, L311_a_prefix_ends_where_all_groups_have_whole_pages) {
  Tiers t(4, 8, 1, {Full(2), Full(4)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 1);
  t.Register({Tiers::Key(0, pages[0], 0), Tiers::Key(0, pages[0], 1), Tiers::Key(1, pages[0])});
  // The limit keeps one key per host block and group: two of the three.
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 0);
  Tiers u(4, 8, 2, {Full(2), Full(4)}, /*has_storage=*/true);
  const HostBlockWish wish{0, 0};
  const HostAllocation pinned = u.cache.AllocateOnHost({&wish, 1});
  u.Register({Tiers::Key(0, pages[0], 0), Tiers::Key(0, pages[0], 1), Tiers::Key(1, pages[0])});
  EXPECT_EQ(u.cache.ProbePrefix(pages).prefix_tokens(), 4);
  auto r = u.Admit(pages, {Dense(4), Dense(4)});
  EXPECT_EQ(r->result.host_prefix_tokens, 0);
  EXPECT_EQ(u.EmptyOnHost(), 1);
  u.cache.Free(r->tables);
}

TEST(ExternalStore, groups_share_a_short_host_page_by_page) {
  Tiers t(2, 16, 4, {Full(2), Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 4);
  std::vector<CacheKey> keys;
  for (int32_t group : {0, 1}) {
    for (const PrefixHash& page : pages) keys.push_back(Tiers::Key(group, page));
  }
  t.Register(keys);
  auto r = t.Admit(pages, {Dense(2), Dense(2)});
  EXPECT_EQ(r->result.host_prefix_tokens, 4);
  t.cache.Free(r->tables);
}

TEST(ExternalStore, room_for_the_store_is_not_made_of_what_the_same_prefix_hits) {
  Tiers t(2, 8, 2, {Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 3);
  t.PutOnHost(0, pages, {1, 2});
  t.cache.UnregisterStorageKeys(std::vector{Tiers::Key(0, pages[1]), Tiers::Key(0, pages[2])});
  t.Register({Tiers::Key(0, pages[0])});
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 6);
  auto r = t.Admit(pages, {Dense(2)});
  // The first page has no room beside them; a prefix without it is none.
  EXPECT_EQ(r->result.host_prefix_tokens, 0);
  EXPECT_TRUE(t.OnHost(0, pages[1]) && t.OnHost(0, pages[2]));
  t.cache.Free(r->tables);
}

TEST(ExternalStore, L315_an_admission_holds_its_host_blocks_until_it_is_dropped) {
  Tiers t(2, 8, 2, {Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 1);
  t.Register({Tiers::Key(0, pages[0])});
  auto r = t.Admit(pages, {Dense(2)});
  t.cache.Free(r->tables);
  EXPECT_EQ(t.EmptyOnHost(), 1);
  EXPECT_EQ(t.cache.NumEmptyLcmBlocks(), 7);
  r.reset();
  EXPECT_EQ(t.EmptyOnHost(), 2);
  EXPECT_EQ(t.cache.NumEmptyLcmBlocks(), 8);
}

TEST(ExternalStore, clearing_the_device_forgets_the_stores_keys) {
  Tiers t(2, 8, 2, {Full(2)}, /*has_storage=*/true);
  const auto pages = Hashes(1, 1);
  t.Register({Tiers::Key(0, pages[0])});
  EXPECT_TRUE(t.cache.EvictDeviceCache());
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 2);
  EXPECT_TRUE(t.cache.ClearDeviceCache());
  EXPECT_EQ(t.cache.ProbePrefix(pages).prefix_tokens(), 0);
}

TEST(HostTier, copies_stay_with_their_shard) {
  constexpr int32_t kShards = 2;
  Tiers t(4, 4, 2, {Full(4, 4, kShards)});
  const auto pages = Hashes(1, 3);
  Admitted r = Publish(t, pages);
  t.transfers.StartPendingStores(SourceGuard::kPinnedUntilAck);
  const auto started = t.transfers.TakeStartedStores();
  ASSERT_EQ(started[0].transfers.size(), 3u);
  for (const BlockTransfer& transfer : started[0].transfers) {
    EXPECT_EQ((transfer.source_id - 1) % kShards, (transfer.destination_id - 1) % kShards);
  }
  t.transfers.CompleteWriteBack(started[0].op_id);
  t.cache.Free(r.tables);
  EXPECT_TRUE(t.cache.ClearDeviceCache());
  auto back = t.Admit(pages, {Dense(4)});
  ASSERT_EQ(back->result.load_pairs.size(), 3u);
  for (const LoadPair& pair : back->result.load_pairs) {
    EXPECT_EQ(pair.source->Location().slot_index % kShards, pair.destination->Location().slot_index % kShards);
  }
  t.cache.Free(back->tables);
}

TEST(HostTier, an_admission_is_refused_when_a_shard_has_no_room_for_its_copies) {
  constexpr int32_t kShards = 2;
  Tiers t(4, 2, 2, {Full(4, 2, kShards)});
  const auto pages = Hashes(1, 3);
  const auto others = Hashes(2, 1);
  t.PutOnHost(0, pages, {0, 1}, /*bucket=*/1);
  // Two copies in bucket 1 and one new block fit two parents; a fourth block in use leaves room for one copy only.
  auto r = t.Admit(std::span(pages).first(2), {Dense(4)});
  ASSERT_TRUE(r.has_value());
  t.cache.Free(r->tables);
  r.reset();
  std::vector<BlockTable> three = t.cache.MakeTables();
  ASSERT_TRUE(t.cache.Admit(t.cache.ProbePrefix({}), three, Demands{Dense(8)}, {}).has_value());
  EXPECT_FALSE(t.Admit(std::span(pages).first(2), {Dense(0)}).has_value());
  EXPECT_EQ(t.cache.NumHostPinnedBlocks(), 0);
  t.cache.Free(three);
}

}  // namespace
}  // namespace tokenspeed
