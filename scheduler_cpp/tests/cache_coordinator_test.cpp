// Vectors S-EV, and the state vectors S-ST12 and S-ST13: admission, publication, eviction, clearing and gauges.

#include "coordinator/cache_coordinator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/cache_fixture.h"
#include "tests/broken_invariant.h"

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
using testing::Sparse;
using testing::State;
using testing::Window;

using Demands = std::vector<TokenDemand>;

// Drives a cache; each resident request is a set of tables and its epoch.
struct Request {
  std::vector<BlockTable> tables;
  uint64_t epoch = 0;
};

class Cache {
 public:
  Cache(int32_t prefix_granularity, int32_t parents, std::vector<CacheGroupSpec> specs)
      : coordinator(prefix_granularity, parents, specs,
                    [this](const CacheKey& key, DeviceMutation mutation) { mutations.emplace_back(key, mutation); }) {}

  std::optional<AdmissionResult> Admit(Request& request, const Demands& demands, const RequestProgress& progress = {}) {
    if (request.tables.empty()) request.tables = coordinator.MakeTables();
    const std::optional<uint64_t> epoch = request.epoch == 0 ? std::nullopt : std::optional(request.epoch);
    auto result = coordinator.Admit(coordinator.ProbePrefix({}), request.tables, demands, progress, epoch);
    if (result) request.epoch = result->access_epoch;
    return result;
  }

  std::optional<AdmissionResult> AdmitPrompt(Request& request, std::span<const PrefixHash> hashes,
                                             const Demands& demands) {
    request.tables = coordinator.MakeTables();
    auto result = coordinator.Admit(coordinator.ProbePrefix(hashes), request.tables, demands, {});
    if (result) request.epoch = result->access_epoch;
    return result;
  }

  // A request that fills the pages of `hashes` in every group, publishes them and leaves.
  void CachePages(std::span<const PrefixHash> hashes, BoundaryKind kind = BoundaryKind::kChunk) {
    Request request;
    const auto tokens = static_cast<int32_t>(hashes.size()) * coordinator.prefix_granularity();
    ASSERT_TRUE(Admit(request, Demands(coordinator.NumGroups(), Dense(tokens))).has_value());
    coordinator.CacheFullBlocks(request.tables, hashes, request.epoch, 0, kind);
    coordinator.Free(request.tables);
  }

  // Publishes one block of one group: slot `slot` of `hashes`. Needs K = 1 capacity for a sparse table.
  void CacheSlot(int32_t group, std::span<const PrefixHash> hashes, int32_t slot, BoundaryKind kind, Request& request) {
    Demands demands(coordinator.NumGroups(), Dense(0));
    const int32_t granularity = coordinator.group(group).geometry().block_granularity();
    demands[group] = Sparse((slot + 1) * granularity, slot);
    ASSERT_TRUE(Admit(request, demands).has_value());
    PublishIn(group, request, hashes.subspan(slot, 1), slot, kind);
  }

  // Publishes slots of one group alone; the scheduler always publishes in all of them.
  void PublishIn(int32_t group, Request& request, std::span<const PrefixHash> hashes, int32_t first_slot,
                 BoundaryKind kind) {
    std::vector<CacheKey> new_keys;
    const_cast<CacheGroup&>(coordinator.group(group))
        .PublishRange(request.tables[group], hashes, first_slot, request.epoch, kind, new_keys);
  }

  bool IsCached(int32_t group, const PrefixHash& hash, int32_t offset = 0) const {
    const CacheKey key{.content_hash = hash, .namespace_id = 0, .group_id = group, .page_offset = offset};
    return coordinator.group(group).index().Contains(coordinator.device_pool(), key);
  }

  std::optional<PrefixEntryMetadata> Metadata(int32_t group, const PrefixHash& hash, int32_t offset = 0) const {
    const CacheKey key{.content_hash = hash, .namespace_id = 0, .group_id = group, .page_offset = offset};
    const PrefixCacheIndex& index = coordinator.group(group).index();
    const CacheBlockRef block = index.Find(coordinator.device_pool(), key);
    return block ? index.MetadataFor(coordinator.device_pool(), block->Location()) : std::nullopt;
  }

  std::vector<std::pair<CacheKey, DeviceMutation>> mutations;
  CacheCoordinator coordinator;
};

TEST(CacheCoordinator, EV1_oldest_goes_first) {
  Cache c(4, 4, {Full(4)});
  const auto old_pages = Hashes(1, 1);
  const auto new_pages = Hashes(2, 3);
  c.CachePages(old_pages);
  c.CachePages(new_pages);
  Request r;
  EXPECT_TRUE(c.Admit(r, {Dense(4)}).has_value());
  EXPECT_FALSE(c.IsCached(0, old_pages[0]));
  for (const PrefixHash& hash : new_pages) EXPECT_TRUE(c.IsCached(0, hash));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV2_closed_prefix_loses_its_end_first) {
  Cache c(4, 4, {Full(4)});
  const auto pages = Hashes(1, 4);
  c.CachePages(pages);
  Request r;
  EXPECT_TRUE(c.Admit(r, {Dense(4)}).has_value());
  for (int32_t i = 0; i < 4; ++i) EXPECT_EQ(c.IsCached(0, pages[i]), i < 3);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV3_probationary_boundaries_keep_the_deeper_one) {
  for (const CacheGroupSpec& spec : {State(4), Window(5, 4)}) {
    Cache c(4, 2, {spec});
    const auto pages = Hashes(1, 8);
    Request r;
    c.CacheSlot(0, pages, 3, BoundaryKind::kChunk, r);
    c.CacheSlot(0, pages, 7, BoundaryKind::kChunk, r);
    c.coordinator.Free(r.tables);
    Request next;
    EXPECT_TRUE(c.Admit(next, {Dense(4)}).has_value());
    EXPECT_FALSE(c.IsCached(0, pages[3]));
    EXPECT_TRUE(c.IsCached(0, pages[7]));
    c.coordinator.Free(next.tables);
  }
}

TEST(CacheCoordinator, EV4_established_boundaries_outlive_probationary_ones) {
  for (const BoundaryKind kind : {BoundaryKind::kEndpoint, BoundaryKind::kPromoted}) {
    Cache c(4, 2, {State(4)});
    const auto pages = Hashes(1, 8);
    Request r;
    c.CacheSlot(0, pages, 2, kind, r);
    c.CacheSlot(0, pages, 6, BoundaryKind::kChunk, r);
    c.coordinator.Free(r.tables);
    Request next;
    EXPECT_TRUE(c.Admit(next, {Dense(4)}).has_value());
    EXPECT_TRUE(c.IsCached(0, pages[2]));
    EXPECT_FALSE(c.IsCached(0, pages[6]));
    c.coordinator.Free(next.tables);
  }
}

TEST(CacheCoordinator, EV4_acquired_chunk_counts_as_established) {
  Cache c(4, 2, {State(4)});
  const auto pages = Hashes(1, 8);
  Request seed;
  c.CacheSlot(0, pages, 2, BoundaryKind::kChunk, seed);
  c.coordinator.Free(seed.tables);
  // The next request acquires the boundary and publishes its own under the same epoch.
  Request r;
  ASSERT_TRUE(c.AdmitPrompt(r, std::span(pages).first(3), {Dense(0)}).has_value());
  c.CacheSlot(0, pages, 6, BoundaryKind::kChunk, r);
  c.coordinator.Free(r.tables);
  EXPECT_EQ(c.Metadata(0, pages[2])->last_access_epoch, c.Metadata(0, pages[6])->last_access_epoch);
  Request next;
  EXPECT_TRUE(c.Admit(next, {Dense(4)}).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[2]));
  EXPECT_FALSE(c.IsCached(0, pages[6]));
  c.coordinator.Free(next.tables);
}

TEST(CacheCoordinator, EV5_recency_dominates_kind) {
  Cache c(4, 2, {State(4)});
  const auto a = Hashes(1, 1);
  const auto b = Hashes(2, 1);
  c.CachePages(a);
  Request hit;
  ASSERT_TRUE(c.AdmitPrompt(hit, a, {Dense(0)}).has_value());
  c.coordinator.Free(hit.tables);
  c.CachePages(b, BoundaryKind::kEndpoint);
  EXPECT_TRUE(c.Metadata(0, a[0])->was_acquired);
  Request next;
  EXPECT_TRUE(c.Admit(next, {Dense(4)}).has_value());
  EXPECT_FALSE(c.IsCached(0, a[0]));
  EXPECT_TRUE(c.IsCached(0, b[0]));
  c.coordinator.Free(next.tables);
}

TEST(CacheCoordinator, EV6_within_an_epoch_closed_groups_keep_their_entries) {
  Cache c(4, 3, {Full(4), State(4), Full(4)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages, BoundaryKind::kEndpoint);
  Request r;
  EXPECT_TRUE(c.Admit(r, {Dense(4), Dense(0), Dense(0)}).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[0]) && c.IsCached(2, pages[0]));
  EXPECT_FALSE(c.IsCached(1, pages[0]));
  c.coordinator.Free(r.tables);
}

// Publishes a page into the next block of group A alone (K = 2), under an epoch of its own.
void CacheOneOfA(Cache& c, const std::vector<PrefixHash>& page) {
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(4), Dense(0)}).has_value());
  c.PublishIn(0, r, page, 0, BoundaryKind::kChunk);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV7_victims_that_free_no_parent_are_restored) {
  Cache c(4, 2, {Full(4, 2), Full(4, 1)});
  const auto first = Hashes(1, 1);
  const auto second = Hashes(2, 1);
  const auto third = Hashes(3, 1);
  // Parent 1 must hold epochs 1 and 3, parent 2 epoch 2: fill parent 1, then re-publish its second block last.
  CacheOneOfA(c, first);
  Request filler;
  ASSERT_TRUE(c.Admit(filler, {Dense(4), Dense(0)}).has_value());  // parent 1, slot 1; epoch 2
  CacheOneOfA(c, second);                                       // parent 2, slot 0; epoch 3
  c.coordinator.Free(filler.tables);
  CacheOneOfA(c, third);                                        // equally dense, so the lower id: parent 1, slot 1
  ASSERT_TRUE(c.coordinator.device_pool().OccupiedCount(1) == 2 && c.coordinator.device_pool().OccupiedCount(2) == 1);
  Request b;
  EXPECT_TRUE(c.Admit(b, {Dense(0), Dense(4)}).has_value());
  EXPECT_TRUE(c.IsCached(0, first[0]) && c.IsCached(0, third[0]));
  EXPECT_FALSE(c.IsCached(0, second[0]));
  EXPECT_EQ(Ids(c.coordinator, 1, b.tables), std::vector<int32_t>{2});
  c.coordinator.Free(b.tables);
}

TEST(CacheCoordinator, EV8_hit_blocks_are_protected) {
  Cache c(4, 2, {Full(4, 2), Full(4, 1)});
  const auto pages = Hashes(1, 2);
  Request seed;
  ASSERT_TRUE(c.Admit(seed, {Dense(8), Dense(4)}).has_value());
  c.PublishIn(0, seed, pages, 0, BoundaryKind::kChunk);
  c.PublishIn(1, seed, std::span(pages).first(1), 0, BoundaryKind::kChunk);
  c.coordinator.Free(seed.tables);
  EXPECT_EQ(c.coordinator.ProbePrefix(pages).device_prefix_tokens(), 4);
  Request r;
  EXPECT_FALSE(c.AdmitPrompt(r, pages, {Dense(0), Dense(4)}).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[0]) && c.IsCached(0, pages[1]) && c.IsCached(1, pages[0]));
  EXPECT_EQ(c.Metadata(0, pages[0])->was_acquired, false);
}

TEST(CacheCoordinator, EV9_nothing_is_evicted_to_pack_more_densely) {
  Cache c(4, 2, {Full(4, 2)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages);
  Request r;
  EXPECT_TRUE(c.Admit(r, {Dense(8)}).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[0]));
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 0);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV10_parent_is_rebound_when_all_its_children_go) {
  Cache c(4, 1, {Full(4, 2), Full(4, 1)});
  const auto pages = Hashes(1, 2);
  CacheOneOfA(c, {pages[0]});
  CacheOneOfA(c, {pages[1]});
  Request r;
  EXPECT_TRUE(c.Admit(r, {Dense(0), Dense(4)}).has_value());
  EXPECT_FALSE(c.IsCached(0, pages[0]) || c.IsCached(0, pages[1]));
  EXPECT_EQ(c.coordinator.device_pool().BoundGroup(1), 1);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV11_pinned_child_holds_its_parent) {
  Cache c(4, 1, {Full(4, 4), Full(4, 1)});
  Request a;
  ASSERT_TRUE(c.Admit(a, {Dense(4), Dense(0)}).has_value());
  Request b;
  EXPECT_FALSE(c.Admit(b, {Dense(0), Dense(4)}).has_value());
  EXPECT_EQ(c.coordinator.device_pool().NumFreeSlots(0), 3);
  c.coordinator.Free(a.tables);
}

TEST(CacheCoordinator, EV12_freed_slots_are_used_densest_parent_first) {
  Cache c(4, 2, {Full(4, 2)});
  const auto old_pages = Hashes(1, 2);
  const auto new_pages = Hashes(2, 1);
  c.CachePages(old_pages);
  c.CachePages(new_pages);
  Request r;
  const auto result = c.Admit(r, {Dense(12)});
  ASSERT_TRUE(result.has_value());
  EXPECT_FALSE(c.IsCached(0, old_pages[0]) || c.IsCached(0, old_pages[1]));
  EXPECT_TRUE(c.IsCached(0, new_pages[0]));
  EXPECT_EQ(result->new_block_ids[0], (std::vector<int32_t>{4, 1, 2}));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV13_own_expired_tail_funds_the_admission) {
  Cache c(4, 3, {State(4)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages, BoundaryKind::kEndpoint);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(8)}).has_value());
  EXPECT_TRUE(c.Admit(r, {Dense(4)}, Frontier(8)).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[0]));
  EXPECT_EQ(Held(r.tables[0]), (std::vector<int32_t>{0, 1, 1}));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV14_publication_precedes_reclamation) {
  Cache c(4, 2, {Window(5, 4)});
  const auto pages = Hashes(1, 2);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(8)}).has_value());
  const int32_t first = Ids(c.coordinator, 0, r.tables)[0];
  EXPECT_TRUE(c.Admit(r, {Dense(4)}, Completed(pages, 0, BoundaryKind::kChunk, 8)).has_value());
  EXPECT_TRUE(c.IsCached(0, pages[1]));
  EXPECT_FALSE(c.IsCached(0, pages[0]));
  EXPECT_EQ(Ids(c.coordinator, 0, r.tables)[0], 0);
  EXPECT_EQ(Ids(c.coordinator, 0, r.tables)[2], first);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV15_own_cached_expired_block_is_reused_unless_shared) {
  for (const bool shared : {false, true}) {
    Cache c(4, 2, {Window(5, 4)});
    const auto pages = Hashes(1, 2);
    Request r;
    ASSERT_TRUE(c.Admit(r, {Dense(8)}).has_value());
    c.coordinator.CacheFullBlocks(r.tables, pages, r.epoch, 0, BoundaryKind::kChunk);
    const std::vector<int32_t> before = Ids(c.coordinator, 0, r.tables);
    CacheBlockRef other_owner = shared ? r.tables[0].blocks[0] : CacheBlockRef();
    EXPECT_EQ(c.Admit(r, {Dense(4)}, Frontier(8)).has_value(), !shared);
    const std::vector<int32_t> expected = shared ? before : std::vector<int32_t>{0, before[1], before[0]};
    EXPECT_EQ(Ids(c.coordinator, 0, r.tables), expected);
    EXPECT_EQ(c.IsCached(0, pages[0]), shared);
    other_owner.reset();
    c.coordinator.Free(r.tables);
  }
}

TEST(CacheCoordinator, EV16_refused_admission_leaves_the_hit_as_it_was) {
  Cache c(4, 2, {Full(4)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages);
  Request other;
  ASSERT_TRUE(c.Admit(other, {Dense(4)}).has_value());
  const auto before = c.Metadata(0, pages[0]);
  for (int attempt = 0; attempt < 2; ++attempt) {
    Request r;
    EXPECT_FALSE(c.AdmitPrompt(r, pages, {Dense(4)}).has_value());
    EXPECT_TRUE(c.Metadata(0, pages[0]) == before);
    EXPECT_TRUE(r.tables[0].blocks.empty());
  }
  c.coordinator.Free(other.tables);
}

TEST(CacheCoordinator, EV17_request_keeps_its_first_epoch) {
  Cache c(4, 8, {Full(4)});
  const auto pages = Hashes(1, 2);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(4)}).has_value());
  Request too_big;
  EXPECT_FALSE(c.Admit(too_big, {Dense(400)}).has_value());
  Request newer;
  ASSERT_TRUE(c.Admit(newer, {Dense(4)}).has_value());
  EXPECT_EQ(newer.epoch, r.epoch + 1);
  EXPECT_TRUE(c.Admit(r, {Dense(4)}, Completed(std::span(pages).first(1), 0, BoundaryKind::kChunk, 4)).has_value());
  c.coordinator.CacheCompletedBlocks(r.tables, Completed(pages, 1, BoundaryKind::kEndpoint, 8), r.epoch);
  EXPECT_EQ(c.Metadata(0, pages[0])->last_access_epoch, r.epoch);
  EXPECT_EQ(c.Metadata(0, pages[1])->last_access_epoch, r.epoch);
  EXPECT_FATAL(c.coordinator.Admit(c.coordinator.ProbePrefix({}), r.tables, Demands{Dense(0)}, {}, newer.epoch + 1));
  EXPECT_FATAL(c.coordinator.Admit(c.coordinator.ProbePrefix({}), r.tables, Demands{Dense(0)}, {}, uint64_t{0}));
  c.coordinator.Free(r.tables);
  c.coordinator.Free(newer.tables);
}

TEST(CacheCoordinator, EV18_groups_share_the_parents) {
  Cache c(4, 5, {Full(4), Window(10, 4)});
  Request r;
  EXPECT_FALSE(c.Admit(r, {Dense(12), Dense(12)}).has_value());
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 5);
  EXPECT_TRUE(r.tables[0].blocks.empty() && r.tables[1].blocks.empty());
}

TEST(CacheCoordinator, EV19_holes_beside_cached_children_are_used) {
  Cache c(4, 2, {Full(4, 2), Full(4, 1)});
  const auto pages = Hashes(1, 1);
  CacheOneOfA(c, pages);
  EXPECT_EQ(c.coordinator.ProbePrefix(pages).device_prefix_tokens(), 0);
  Request r;
  EXPECT_TRUE(c.AdmitPrompt(r, pages, {Dense(4), Dense(4)}).has_value());
  EXPECT_EQ(Ids(c.coordinator, 0, r.tables), std::vector<int32_t>{2});
  EXPECT_EQ(Ids(c.coordinator, 1, r.tables), std::vector<int32_t>{2});
  EXPECT_TRUE(c.IsCached(0, pages[0]));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, EV20_only_fresh_blocks_are_reported) {
  Cache c(4, 4, {Full(4, 4), State(4)});
  Request r;
  const auto first = c.Admit(r, {Dense(5), Dense(1)});
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->new_block_ids, (std::vector<std::vector<int32_t>>{{1, 2}, {2}}));
  const auto second = c.Admit(r, {Dense(1), Dense(1)});
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->new_block_ids, (std::vector<std::vector<int32_t>>{{}, {}}));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, ST12_snapshots_are_published_only_at_materialised_boundaries) {
  Cache c(4, 16, {State(2)});
  const auto pages = Hashes(1, 3);
  const std::vector<int32_t> boundaries = {4, 8, 16};
  const RequestProgress progress = Completed(pages, 0, BoundaryKind::kEndpoint, 13, boundaries);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(13)}).has_value());
  EXPECT_FALSE(c.Admit(r, {Dense(1000)}, progress).has_value());
  EXPECT_EQ(c.coordinator.group(0).index().NumEntries(c.coordinator.device_pool()), 0);
  EXPECT_TRUE(c.Admit(r, {Dense(0)}, progress).has_value());
  EXPECT_EQ(c.coordinator.group(0).index().NumEntries(c.coordinator.device_pool()), 2);
  EXPECT_TRUE(c.IsCached(0, pages[0], 1) && c.IsCached(0, pages[1], 1));
  EXPECT_FALSE(c.IsCached(0, pages[0], 0) || c.IsCached(0, pages[2], 1));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, ST13_snapshot_of_a_mere_chunk_is_not_published) {
  Cache c(4, 16, {State(4)});
  const auto pages = Hashes(1, 1);
  const std::vector<int32_t> boundaries = {4};
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(5)}).has_value());
  c.coordinator.CacheCompletedBlocks(r.tables, Completed(pages, 0, BoundaryKind::kChunk, 4, boundaries), r.epoch);
  EXPECT_FALSE(c.IsCached(0, pages[0]));
  RequestProgress progress = Completed(pages, 0, BoundaryKind::kChunk, 4, boundaries);
  progress.completed_pages->state_boundary_kind = BoundaryKind::kEndpoint;
  c.coordinator.CacheCompletedBlocks(r.tables, progress, r.epoch);
  EXPECT_TRUE(c.Metadata(0, pages[0])->boundary_kind == BoundaryKind::kEndpoint);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, I25_a_replayable_group_publishes_nothing_and_counts_for_nothing) {
  Cache c(4, 16, {Full(4), Replayable(6, 2)});
  const auto pages = Hashes(1, 2);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(8), Dense(8)}).has_value());
  c.coordinator.CacheCompletedBlocks(r.tables, Completed(pages, 0, BoundaryKind::kEndpoint, 8), r.epoch);
  c.coordinator.CacheFullBlocks(r.tables, pages, r.epoch, 0, BoundaryKind::kChunk);
  EXPECT_EQ(c.coordinator.group(0).index().NumEntries(c.coordinator.device_pool()), 2);
  EXPECT_EQ(c.coordinator.group(1).index().NumEntries(c.coordinator.device_pool()), 0);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[1]) == BoundaryResidency::kComplete);
  EXPECT_EQ(c.coordinator.ProbePrefix(pages).device_prefix_tokens(), 8);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, replayable_tables_begin_a_window_below_the_hit) {
  // The window of 6 rules for both; a remote landing, already sparse, is left alone.
  Cache c(4, 24, {Full(4), Replayable(6, 2), Replayable(2, 4)});
  const auto pages = Hashes(1, 3);
  c.CachePages(pages);
  Request r;
  ASSERT_TRUE(c.AdmitPrompt(r, pages, {Dense(3), Dense(3, 2), Dense(3)}).has_value());
  EXPECT_EQ(r.tables[0].NumSlots(), 4);
  EXPECT_EQ(Held(r.tables[1]), (std::vector<int32_t>{0, 0, 0, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(r.tables[1].available_tokens, 3);
  EXPECT_EQ(Held(r.tables[2]), (std::vector<int32_t>{0, 1, 1, 1}));
  c.coordinator.Free(r.tables);

  Request remote;
  ASSERT_TRUE(c.AdmitPrompt(remote, pages, {Dense(3), Sparse(15, 5), Dense(3)}).has_value());
  EXPECT_EQ(Held(remote.tables[1]), (std::vector<int32_t>{0, 0, 0, 0, 0, 1, 1, 1}));
  c.coordinator.Free(remote.tables);
}

TEST(CacheCoordinator, a_short_hit_is_replayed_from_the_start) {
  Cache c(4, 24, {Full(4), Replayable(6, 2)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages);
  Request r;
  ASSERT_TRUE(c.AdmitPrompt(r, pages, {Dense(2), Dense(2)}).has_value());
  EXPECT_EQ(Held(r.tables[1]), (std::vector<int32_t>{1, 1, 1}));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, a_cache_in_which_nobody_shares_matches_nothing) {
  Cache c(4, 8, {Replayable(6, 2)});
  EXPECT_EQ(c.coordinator.ProbePrefix(Hashes(1, 2)).device_prefix_tokens(), 0);
}

TEST(CacheCoordinator, hit_shares_blocks_between_requests) {
  Cache c(4, 9, {Full(4), Window(5, 4)});
  const auto pages = Hashes(1, 3);
  c.CachePages(pages);
  Request a;
  Request b;
  const auto first = c.AdmitPrompt(a, pages, {Dense(1), Dense(0)});
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->device_prefix_tokens, 12);
  EXPECT_EQ(Held(a.tables[1]), (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(a.tables[1].reclaimed_prefix_blocks, 2);
  EXPECT_EQ(c.coordinator.NumActiveLcmBlocks(), 5);
  ASSERT_TRUE(c.AdmitPrompt(b, pages, {Dense(1), Dense(0)}).has_value());
  const std::vector<int32_t> ids_a = Ids(c.coordinator, 0, a.tables);
  const std::vector<int32_t> ids_b = Ids(c.coordinator, 0, b.tables);
  EXPECT_TRUE(std::equal(ids_a.begin(), ids_a.begin() + 3, ids_b.begin()));
  EXPECT_FALSE(ids_a[3] == ids_b[3]);
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 1);
  EXPECT_EQ(c.coordinator.NumActiveLcmBlocks(), 6);
  EXPECT_EQ(c.coordinator.NumAvailableLcmBlocks(), 3);  // the empty one, and two window blocks that nobody hit
  c.coordinator.Free(a.tables);
  c.coordinator.Free(b.tables);
}

TEST(CacheCoordinator, duplicate_computation_is_folded_into_the_canonical_block) {
  Cache c(4, 4, {Full(4)});
  const auto pages = Hashes(1, 1);
  Request a;
  Request b;
  ASSERT_TRUE(c.Admit(a, {Dense(4)}).has_value() && c.Admit(b, {Dense(4)}).has_value());
  c.coordinator.CacheCompletedBlocks(a.tables, Completed(pages, 0, BoundaryKind::kChunk, 4), a.epoch);
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 2);
  c.coordinator.CacheCompletedBlocks(b.tables, Completed(pages, 0, BoundaryKind::kChunk, 4), b.epoch);
  EXPECT_EQ(Ids(c.coordinator, 0, a.tables), Ids(c.coordinator, 0, b.tables));
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 3);
  EXPECT_EQ(c.mutations.size(), std::size_t{1});
  c.coordinator.Free(a.tables);
  c.coordinator.Free(b.tables);
}

TEST(CacheCoordinator, clearing_is_refused_while_a_cached_block_is_in_use) {
  Cache c(4, 8, {Full(4), Window(5, 4)});
  const auto pages = Hashes(1, 2);
  c.CachePages(pages);
  Request r;
  ASSERT_TRUE(c.AdmitPrompt(r, pages, {Dense(4), Dense(4)}).has_value());
  EXPECT_FALSE(c.coordinator.CacheIsClearable());
  EXPECT_FALSE(c.coordinator.ClearDeviceCache());
  EXPECT_TRUE(c.IsCached(0, pages[1]) && c.IsCached(1, pages[0]));
  c.coordinator.Free(r.tables);
  c.mutations.clear();
  EXPECT_TRUE(c.coordinator.CacheIsClearable());
  EXPECT_EQ(c.coordinator.NumAvailableLcmBlocks(), 8);
  EXPECT_TRUE(c.coordinator.ClearDeviceCache());
  EXPECT_EQ(c.coordinator.NumEmptyLcmBlocks(), 8);
  EXPECT_EQ(c.mutations.size(), std::size_t{4});
  for (const auto& [key, mutation] : c.mutations) EXPECT_TRUE(mutation == DeviceMutation::kRemoved);
  EXPECT_EQ(c.coordinator.ProbePrefix(pages).device_prefix_tokens(), 0);
}

TEST(CacheCoordinator, residency_folds_groups_and_offsets) {
  Cache c(4, 8, {Window(9, 4), Window(9, 2, 2)});
  const auto pages = Hashes(1, 2);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[0]) == BoundaryResidency::kNone);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(4), Dense(4)}).has_value());
  c.PublishIn(1, r, std::span(pages).first(1), 0, BoundaryKind::kChunk);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[0]) == BoundaryResidency::kPartial);
  c.coordinator.CacheFullBlocks(r.tables, std::span(pages).first(1), r.epoch, 0, BoundaryKind::kChunk);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[0]) == BoundaryResidency::kComplete);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[1]) == BoundaryResidency::kNone);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, residency_is_that_of_the_closed_groups_where_there_are_any) {
  Cache c(4, 8, {Full(2, 2), Window(9, 4)});
  const auto pages = Hashes(1, 2);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(4), Dense(4)}).has_value());
  c.PublishIn(1, r, std::span(pages).first(1), 0, BoundaryKind::kChunk);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[0]) == BoundaryResidency::kNone);
  c.PublishIn(0, r, std::span(pages).first(1), 0, BoundaryKind::kChunk);
  EXPECT_TRUE(c.coordinator.DeviceBoundaryResidency(pages[0]) == BoundaryResidency::kComplete);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, newly_releasable_parents_are_those_nobody_else_holds) {
  Cache c(4, 4, {Full(4, 2)});
  const auto pages = Hashes(1, 1);
  Request a;
  Request b;
  ASSERT_TRUE(c.Admit(a, {Dense(12)}).has_value());  // parents 1 (both) and 2
  ASSERT_TRUE(c.Admit(b, {Dense(4)}).has_value());   // the other half of parent 2
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(a.tables), 1);
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(b.tables), 0);
  // A cached block that only the table and the index hold does not keep its parent.
  c.coordinator.CacheFullBlocks(a.tables, pages, a.epoch, 0, BoundaryKind::kChunk);
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(a.tables), 1);
  CacheBlockRef ticket = a.tables[0].blocks[0];
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(a.tables), 0);
  ticket.reset();
  c.coordinator.Free(b.tables);
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(a.tables), 2);
  c.coordinator.Free(a.tables);
  EXPECT_EQ(c.coordinator.NumAvailableLcmBlocks(), 4);
}

TEST(CacheCoordinator, evictable_neighbour_does_not_keep_a_parent) {
  Cache c(4, 4, {Full(4, 2)});
  const auto pages = Hashes(1, 1);
  c.CachePages(pages);  // parent 1, slot 0, unpinned
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(4)}).has_value());  // parent 1, slot 1
  EXPECT_EQ(c.coordinator.NumNewlyReleasableLcmBlocks(r.tables), 1);
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, progress_must_be_plausible) {
  Cache c(4, 4, {Full(4)});
  const auto pages = Hashes(1, 2);
  Request r;
  ASSERT_TRUE(c.Admit(r, {Dense(8)}).has_value());
  EXPECT_FATAL(c.Admit(r, {Dense(0)}, Completed(pages, 0, BoundaryKind::kChunk, 7)));
  EXPECT_FATAL(c.Admit(r, {Dense(0)}, Completed(pages, 2, BoundaryKind::kChunk, 8)));
  RequestProgress no_frontier = Completed(pages, 0, BoundaryKind::kChunk, 8);
  no_frontier.num_computed_tokens.reset();
  EXPECT_FATAL(c.Admit(r, {Dense(0)}, no_frontier));
  EXPECT_FATAL(c.Admit(r, {Dense(0), Dense(0)}));
  EXPECT_FATAL(c.coordinator.CacheFullBlocks(r.tables, pages, r.epoch, 1, BoundaryKind::kChunk));
  c.coordinator.Free(r.tables);
}

TEST(CacheCoordinator, configuration_must_be_consistent) {
  EXPECT_FATAL(CacheCoordinator(4, 1, std::vector<CacheGroupSpec>{}));
  EXPECT_FATAL(CacheCoordinator(0, 1, std::vector{Full(4)}));
  EXPECT_FATAL(CacheCoordinator(4, 1, std::vector{Full(3)}));
  EXPECT_FATAL(CacheCoordinator(4, 1, std::vector{Full(4, 3, 2)}));
  EXPECT_FATAL(CacheCoordinator(4, 1, std::vector{Full(4)}).group(1));
}

}  // namespace
}  // namespace tokenspeed
