#include "core/block_pool.h"

#include <algorithm>
#include <bit>
#include <string>

#include "core/check.h"

namespace tokenspeed {
namespace {

constexpr int32_t kBitsPerWord = 64;

}  // namespace

BlockPool::BlockPool(int32_t num_lcm_blocks, std::vector<int32_t> cache_blocks_per_lcm_block) {
  TOKENSPEED_CHECK(num_lcm_blocks >= 0, "a pool needs a non-negative number of parents");
  for (int32_t packing : cache_blocks_per_lcm_block) {
    TOKENSPEED_CHECK(packing > 0, "a group needs a positive number of blocks per parent");
    CheckedInt32(int64_t{num_lcm_blocks} * packing);
    groups_.push_back(Group{.packing = packing, .buckets = 0, .free_slots = 0, .partial = {}});
  }
  parents_.resize(static_cast<std::size_t>(num_lcm_blocks) + 1);
  for (int32_t id = 1; id <= num_lcm_blocks; ++id) empty_.push_back(id);
}

BlockPool::~BlockPool() {
  TOKENSPEED_FATAL(NumEmptyLcmBlocks() == NumLcmBlocks(), "a pool is destroyed while references to its blocks live");
}

void BlockPool::RegisterGroup(int32_t group, int32_t cache_blocks_per_lcm_block, int32_t shard_count) {
  Group& g = GroupAt(group);
  TOKENSPEED_CHECK(cache_blocks_per_lcm_block == g.packing, "a group is registered with another packing");
  TOKENSPEED_CHECK(shard_count > 0 && g.packing % shard_count == 0, "the shard count must divide the packing");
  TOKENSPEED_CHECK(g.buckets == 0 || g.buckets == shard_count, "the geometry of a group cannot change");
  if (g.buckets == 0) FixBuckets(g, shard_count);
}

void BlockPool::FixBuckets(Group& group, int32_t buckets) {
  group.partial.resize(static_cast<std::size_t>(buckets));
  group.buckets = buckets;
}

std::vector<CacheBlockRef> BlockPool::AcquireBlocks(int32_t group, int32_t num_blocks,
                                                    std::span<const int64_t> loads) {
  Group& g = GroupAt(group);
  std::vector<CacheBlockRef> blocks;
  if (num_blocks <= 0 || Capacity(group) < num_blocks) return blocks;
  if (g.buckets == 0) FixBuckets(g, 1);
  const bool balanced = !loads.empty() && g.buckets > 1;
  TOKENSPEED_CHECK(!balanced || static_cast<int32_t>(loads.size()) == g.buckets, "one load per bucket is needed");
  TOKENSPEED_CHECK(std::all_of(loads.begin(), loads.end(), [](int64_t load) { return load >= 0; }),
                   "a load is negative");
  std::vector<int64_t> running(loads.begin(), loads.end());
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  for (int32_t i = 0; i < num_blocks; ++i) {
    blocks.push_back(balanced ? TakeBalanced(group, running) : TakeOrdinary(group));
  }
  return blocks;
}

CacheBlockRef BlockPool::AcquireBlock(int32_t group) {
  std::vector<CacheBlockRef> blocks = AcquireBlocks(group, 1);
  return blocks.empty() ? CacheBlockRef() : std::move(blocks.front());
}

CacheBlockRef BlockPool::AcquireBlockInBucket(int32_t group, int32_t bucket) {
  Group& g = GroupAt(group);
  if (g.buckets == 0) FixBuckets(g, 1);
  TOKENSPEED_CHECK(bucket >= 0 && bucket < g.buckets, "unknown bucket " + std::to_string(bucket));
  if (!g.partial[bucket].empty()) {
    const int32_t id = g.partial[bucket].begin()->second;
    return OccupyPartial(id, ParentAt(id).lowest_free[bucket]);
  }
  return empty_.empty() ? CacheBlockRef() : OpenFront(group, bucket);
}

CacheBlockRef BlockPool::TakeOrdinary(int32_t group) {
  const Group& g = GroupAt(group);
  std::pair<int32_t, int32_t> best(1, 0);  // worse than any real (-occupied, parent)
  for (const PartialParents& partial : g.partial) {
    if (!partial.empty()) best = std::min(best, *partial.begin());
  }
  if (best.first > 0) return OpenFront(group, 0);
  const std::vector<int32_t>& lowest_free = ParentAt(best.second).lowest_free;
  return OccupyPartial(best.second, *std::min_element(lowest_free.begin(), lowest_free.end()));
}

CacheBlockRef BlockPool::TakeBalanced(int32_t group, std::vector<int64_t>& loads) {
  const Group& g = GroupAt(group);
  int32_t chosen = -1;
  for (int32_t bucket = 0; bucket < g.buckets; ++bucket) {
    if (!g.partial[bucket].empty() && (chosen < 0 || loads[bucket] < loads[chosen])) chosen = bucket;
  }
  if (chosen < 0) {
    const auto lightest = static_cast<int32_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    ++loads[lightest];
    return OpenFront(group, lightest);
  }
  ++loads[chosen];
  const int32_t id = g.partial[chosen].begin()->second;
  return OccupyPartial(id, ParentAt(id).lowest_free[chosen]);
}

CacheBlockRef BlockPool::OpenFront(int32_t group, int32_t slot) {
  Group& g = GroupAt(group);
  TOKENSPEED_CHECK(!empty_.empty(), "the capacity of a group was miscounted");
  const int32_t id = empty_.front();
  Parent& parent = ParentAt(id);
  if (parent.record_count != g.packing) {
    parent.records = std::make_unique<CacheBlock[]>(static_cast<std::size_t>(g.packing));
    parent.record_count = g.packing;
  }
  const int32_t words = WordsPerBucket(g);
  parent.free_bits.assign(static_cast<std::size_t>(words) * g.buckets, 0);
  parent.lowest_free.resize(static_cast<std::size_t>(g.buckets));
  for (int32_t bucket = 0; bucket < g.buckets; ++bucket) {
    parent.lowest_free[bucket] = bucket;
    for (int32_t i = 0; i < g.packing / g.buckets; ++i) {
      parent.free_bits[bucket * words + i / kBitsPerWord] |= uint64_t{1} << (i % kBitsPerWord);
    }
  }
  empty_.pop_front();
  parent.group = group;
  g.free_slots += g.packing;
  return Occupy(id, slot);
}

CacheBlockRef BlockPool::OccupyPartial(int32_t lcm_block_id, int32_t slot) {
  const Parent& parent = ParentAt(lcm_block_id);
  RemoveFromPartial(GroupAt(parent.group), parent, lcm_block_id);
  return Occupy(lcm_block_id, slot);
}

CacheBlockRef BlockPool::Occupy(int32_t lcm_block_id, int32_t slot) {
  Parent& parent = ParentAt(lcm_block_id);
  Group& g = GroupAt(parent.group);
  CacheBlock& record = parent.records[slot];
  record.pool_ = this;
  record.location_ = {lcm_block_id, slot};
  record.group_ = parent.group;
  record.owners_ = 1;
  ++parent.occupied;
  --g.free_slots;
  const int32_t bucket = slot % g.buckets;
  const int32_t bit = slot / g.buckets;
  parent.free_bits[bucket * WordsPerBucket(g) + bit / kBitsPerWord] &= ~(uint64_t{1} << (bit % kBitsPerWord));
  if (parent.lowest_free[bucket] == slot) parent.lowest_free[bucket] = NextFreeSlot(g, parent, slot);
  InsertIntoPartial(g, parent, lcm_block_id);
  return CacheBlockRef(&record);
}

void BlockPool::Release(const CacheBlock& block) noexcept {
  const auto [id, slot] = block.location_;
  Parent& parent = parents_[id];
  Group& g = groups_[parent.group];
  RemoveFromPartial(g, parent, id);
  --parent.occupied;
  ++g.free_slots;
  if (parent.occupied == 0) {
    g.free_slots -= g.packing;
    parent.group = -1;
    empty_.push_back(id);
    return;
  }
  const int32_t bucket = slot % g.buckets;
  const int32_t bit = slot / g.buckets;
  parent.free_bits[bucket * WordsPerBucket(g) + bit / kBitsPerWord] |= uint64_t{1} << (bit % kBitsPerWord);
  parent.lowest_free[bucket] = std::min(parent.lowest_free[bucket], slot);
  InsertIntoPartial(g, parent, id);
}

void BlockPool::RemoveFromPartial(Group& group, const Parent& parent, int32_t lcm_block_id) {
  for (int32_t bucket = 0; bucket < group.buckets; ++bucket) {
    if (parent.lowest_free[bucket] < group.packing) group.partial[bucket].erase({-parent.occupied, lcm_block_id});
  }
}

void BlockPool::InsertIntoPartial(Group& group, const Parent& parent, int32_t lcm_block_id) {
  for (int32_t bucket = 0; bucket < group.buckets; ++bucket) {
    if (parent.lowest_free[bucket] < group.packing) group.partial[bucket].emplace(-parent.occupied, lcm_block_id);
  }
}

int32_t BlockPool::WordsPerBucket(const Group& group) {
  return (group.packing / group.buckets + kBitsPerWord - 1) / kBitsPerWord;
}

int32_t BlockPool::NextFreeSlot(const Group& group, const Parent& parent, int32_t slot) {
  const int32_t words = WordsPerBucket(group);
  const int32_t bucket = slot % group.buckets;
  const int32_t bit = slot / group.buckets;
  uint64_t mask = ~uint64_t{0} << (bit % kBitsPerWord);
  for (int32_t word = bit / kBitsPerWord; word < words; ++word) {
    const uint64_t free = parent.free_bits[bucket * words + word] & mask;
    if (free != 0) return (word * kBitsPerWord + std::countr_zero(free)) * group.buckets + bucket;
    mask = ~uint64_t{0};
  }
  return group.packing;
}

int32_t BlockPool::Packing(int32_t group) const { return GroupAt(group).packing; }

int32_t BlockPool::NumFreeSlots(int32_t group) const { return GroupAt(group).free_slots; }

int64_t BlockPool::Capacity(int32_t group) const {
  const Group& g = GroupAt(group);
  return g.free_slots + static_cast<int64_t>(empty_.size()) * g.packing;
}

int32_t BlockPool::BoundGroup(int32_t lcm_block_id) const { return ParentAt(lcm_block_id).group; }

int32_t BlockPool::OccupiedCount(int32_t lcm_block_id) const { return ParentAt(lcm_block_id).occupied; }

bool BlockPool::IsOccupied(CacheBlockLocation location) const { return UseCount(location) > 0; }

int32_t BlockPool::UseCount(CacheBlockLocation location) const {
  const Parent& parent = ParentAt(location.lcm_block_id);
  TOKENSPEED_CHECK(location.slot_index >= 0, "a slot index is negative");
  if (parent.group < 0) return 0;
  TOKENSPEED_CHECK(location.slot_index < parent.record_count, "a slot lies outside its parent");
  return parent.records[location.slot_index].owners_;
}

std::vector<CacheBlockLocation> BlockPool::OccupiedLocations(int32_t lcm_block_id) const {
  const Parent& parent = ParentAt(lcm_block_id);
  std::vector<CacheBlockLocation> locations;
  if (parent.group < 0) return locations;
  locations.reserve(static_cast<std::size_t>(parent.occupied));
  for (int32_t slot = 0; slot < parent.record_count; ++slot) {
    if (parent.records[slot].owners_ > 0) locations.push_back({lcm_block_id, slot});
  }
  return locations;
}

BlockPool::Group& BlockPool::GroupAt(int32_t group) {
  return const_cast<Group&>(static_cast<const BlockPool*>(this)->GroupAt(group));
}

const BlockPool::Group& BlockPool::GroupAt(int32_t group) const {
  TOKENSPEED_CHECK(group >= 0 && group < NumGroups(), "unknown group " + std::to_string(group));
  return groups_[group];
}

BlockPool::Parent& BlockPool::ParentAt(int32_t lcm_block_id) {
  return const_cast<Parent&>(static_cast<const BlockPool*>(this)->ParentAt(lcm_block_id));
}

const BlockPool::Parent& BlockPool::ParentAt(int32_t lcm_block_id) const {
  TOKENSPEED_CHECK(lcm_block_id > 0 && lcm_block_id <= NumLcmBlocks(), "unknown parent " + std::to_string(lcm_block_id));
  return parents_[lcm_block_id];
}

}  // namespace tokenspeed
