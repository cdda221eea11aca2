#include "core/block_pool.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>

#include "core/check.h"

namespace tokenspeed {
namespace {

constexpr int32_t kBitsPerWord = 64;

}  // namespace

BlockPool::BlockPool(int32_t num_lcm_blocks, std::vector<int32_t> cache_blocks_per_lcm_block)
    : num_parents_(num_lcm_blocks), num_empty_(num_lcm_blocks) {
  TOKENSPEED_CHECK(num_lcm_blocks >= 0, "a pool needs a non-negative number of parents");
  for (int32_t packing : cache_blocks_per_lcm_block) {
    TOKENSPEED_CHECK(packing > 0, "a group needs a positive number of blocks per parent");
    CheckedInt32(int64_t{num_lcm_blocks} * packing);
    groups_.push_back(Group{.packing = packing, .buckets = 0, .free_slots = 0, .partial = {}});
  }
  const std::size_t count = static_cast<std::size_t>(num_lcm_blocks) + 1;
  parents_.reset(static_cast<Parent*>(std::calloc(count, sizeof(Parent))));
  if (parents_ == nullptr) throw std::bad_alloc();
}

BlockPool::~BlockPool() {
  TOKENSPEED_FATAL(NumEmptyLcmBlocks() == NumLcmBlocks(), "a pool is destroyed while references to its blocks live");
  for (int32_t id = 1; id < first_unopened_; ++id) {
    delete[] parents_[id].records;
    delete[] parents_[id].free_words;
  }
}

int32_t BlockPool::PopEmpty() {
  TOKENSPEED_CHECK(num_empty_ > 0, "the capacity of a group was miscounted");
  --num_empty_;
  if (first_unopened_ <= num_parents_) return first_unopened_++;
  const int32_t id = first_returned_;
  first_returned_ = parents_[id].next_empty;
  if (first_returned_ == 0) last_returned_ = 0;
  return id;
}

void BlockPool::PushEmpty(int32_t lcm_block_id) {
  parents_[lcm_block_id].next_empty = 0;
  if (last_returned_ == 0) {
    first_returned_ = lcm_block_id;
  } else {
    parents_[last_returned_].next_empty = lcm_block_id;
  }
  last_returned_ = lcm_block_id;
  ++num_empty_;
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
  std::vector<CacheBlockRef> blocks;
  if (num_blocks <= 0 || Capacity(group) < num_blocks) return blocks;
  blocks.resize(static_cast<std::size_t>(num_blocks));
  std::vector<int64_t> running(loads.begin(), loads.end());
  AcquireInto(group, blocks, running);
  return blocks;
}

void BlockPool::AcquireInto(int32_t group, std::span<CacheBlockRef> places, std::span<int64_t> loads) {
  Group& g = GroupAt(group);
  TOKENSPEED_CHECK(Capacity(group) >= static_cast<int64_t>(places.size()), "the capacity of a group was miscounted");
  if (g.buckets == 0) FixBuckets(g, 1);
  const bool balanced = !loads.empty() && g.buckets > 1;
  TOKENSPEED_CHECK(!balanced || static_cast<int32_t>(loads.size()) == g.buckets, "one load per bucket is needed");
  TOKENSPEED_CHECK(std::all_of(loads.begin(), loads.end(), [](int64_t load) { return load >= 0; }),
                   "a load is negative");
  for (CacheBlockRef& place : places) place = balanced ? TakeBalanced(group, loads) : TakeOrdinary(group);
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
    return OccupyPartial(id, LowestFree(g, ParentAt(id), bucket));
  }
  return num_empty_ == 0 ? CacheBlockRef() : OpenFront(group, bucket);
}

CacheBlockRef BlockPool::TakeOrdinary(int32_t group) {
  const Group& g = GroupAt(group);
  std::pair<int32_t, int32_t> best(1, 0);  // worse than any real (-occupied, parent)
  for (const PartialParents& partial : g.partial) {
    if (!partial.empty()) best = std::min(best, *partial.begin());
  }
  if (best.first > 0) return OpenFront(group, 0);
  const Parent& parent = ParentAt(best.second);
  int32_t lowest = g.packing;
  for (int32_t bucket = 0; bucket < g.buckets; ++bucket) lowest = std::min(lowest, LowestFree(g, parent, bucket));
  return OccupyPartial(best.second, lowest);
}

CacheBlockRef BlockPool::TakeBalanced(int32_t group, std::span<int64_t> loads) {
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
  return OccupyPartial(id, LowestFree(g, ParentAt(id), chosen));
}

CacheBlockRef BlockPool::OpenFront(int32_t group, int32_t slot) {
  Group& g = GroupAt(group);
  const int32_t id = PopEmpty();
  Parent& parent = parents_[id];
  if (parent.record_count != g.packing) {
    delete[] parent.records;
    parent.records = new CacheBlock[static_cast<std::size_t>(g.packing)];
    parent.record_count = g.packing;
  }
  const int32_t words = WordsPerBucket(g);
  if (parent.num_free_words != words * g.buckets) {
    delete[] parent.free_words;
    parent.free_words = new uint64_t[static_cast<std::size_t>(words) * g.buckets];
    parent.num_free_words = words * g.buckets;
  }
  const int32_t slots = g.packing / g.buckets;
  for (int32_t word = 0; word < parent.num_free_words; ++word) {
    const int32_t left = slots - word % words * kBitsPerWord;
    parent.free_words[word] = left >= kBitsPerWord ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
  }
  parent.group_plus_one = group + 1;
  g.free_slots += g.packing;
  return Occupy(id, slot);
}

CacheBlockRef BlockPool::OccupyPartial(int32_t lcm_block_id, int32_t slot) {
  const Parent& parent = ParentAt(lcm_block_id);
  RemoveFromPartial(GroupAt(parent.group()), parent, lcm_block_id);
  return Occupy(lcm_block_id, slot);
}

CacheBlockRef BlockPool::Occupy(int32_t lcm_block_id, int32_t slot) {
  Parent& parent = parents_[lcm_block_id];
  Group& g = groups_[parent.group()];
  CacheBlock& record = parent.records[slot];
  record.pool_ = this;
  record.cached_ = nullptr;
  record.location_ = {lcm_block_id, slot};
  record.group_ = parent.group();
  record.owners_ = 1;
  CountHandles(record, 1);
  if (parent.occupied++ == parent.evictable && parent.evictable > 0) --num_evictable_parents_;
  --g.free_slots;
  const int32_t bucket = slot % g.buckets;
  const int32_t bit = slot / g.buckets;
  parent.free_words[bucket * WordsPerBucket(g) + bit / kBitsPerWord] &= ~(uint64_t{1} << (bit % kBitsPerWord));
  InsertIntoPartial(g, parent, lcm_block_id);
  return CacheBlockRef(&record);
}

void BlockPool::Release(const CacheBlock& block) noexcept {
  const auto [id, slot] = block.location_;
  Parent& parent = parents_[id];
  Group& g = groups_[parent.group()];
  RemoveFromPartial(g, parent, id);
  if (--parent.occupied == parent.evictable && parent.evictable > 0) ++num_evictable_parents_;
  ++g.free_slots;
  if (parent.occupied == 0) {
    g.free_slots -= g.packing;
    parent.group_plus_one = 0;
    PushEmpty(id);
    return;
  }
  const int32_t bucket = slot % g.buckets;
  const int32_t bit = slot / g.buckets;
  parent.free_words[bucket * WordsPerBucket(g) + bit / kBitsPerWord] |= uint64_t{1} << (bit % kBitsPerWord);
  InsertIntoPartial(g, parent, id);
}

void BlockPool::CountEvictable(const CacheBlock& block, int32_t change) noexcept {
  Parent& parent = parents_[block.location_.lcm_block_id];
  if (parent.evictable == parent.occupied) --num_evictable_parents_;
  parent.evictable += change;
  if (parent.evictable == parent.occupied) ++num_evictable_parents_;
}

void BlockPool::CountHandles(const CacheBlock& block, int32_t change) noexcept {
  Parent& parent = parents_[block.location_.lcm_block_id];
  const bool was_active = parent.handles > parent.passive;
  parent.handles += change;
  num_active_parents_ += (parent.handles > parent.passive) - was_active;
}

void BlockPool::CountPassive(int32_t lcm_block_id, int32_t change) noexcept {
  Parent& parent = parents_[lcm_block_id];
  const bool was_active = parent.handles > parent.passive;
  parent.passive += change;
  num_active_parents_ += (parent.handles > parent.passive) - was_active;
}

void BlockPool::SetCached(const CacheBlockRef& block, CachedBlock* cached) {
  TOKENSPEED_CHECK(block.IsOwnedBy(*this), "a block of another pool is cached");
  CacheBlock& record = *block.block_;
  TOKENSPEED_CHECK((record.cached_ == nullptr) != (cached == nullptr), "a block is cached twice, or not at all");
  if (record.owners_ == 1) CountEvictable(record, cached != nullptr ? 1 : -1);
  CountPassive(record.location_.lcm_block_id, cached != nullptr ? 1 : -1);
  record.cached_ = cached;
}

void BlockPool::RemoveFromPartial(Group& group, const Parent& parent, int32_t lcm_block_id) {
  for (int32_t bucket = 0; bucket < group.buckets; ++bucket) {
    if (LowestFree(group, parent, bucket) < group.packing) group.partial[bucket].erase({-parent.occupied, lcm_block_id});
  }
}

void BlockPool::InsertIntoPartial(Group& group, const Parent& parent, int32_t lcm_block_id) {
  for (int32_t bucket = 0; bucket < group.buckets; ++bucket) {
    if (LowestFree(group, parent, bucket) < group.packing) group.partial[bucket].emplace(-parent.occupied, lcm_block_id);
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
    const uint64_t free = parent.free_words[bucket * words + word] & mask;
    if (free != 0) return (word * kBitsPerWord + std::countr_zero(free)) * group.buckets + bucket;
    mask = ~uint64_t{0};
  }
  return group.packing;
}

std::vector<int32_t> BlockPool::LcmBlockUses() const {
  std::vector<int32_t> uses(static_cast<std::size_t>(num_parents_), 0);
  for (int32_t id = 1; id < first_unopened_; ++id) {
    const Parent& parent = parents_[id];
    uses[id - 1] = parent.handles > parent.passive ? parent.group_plus_one : -parent.group_plus_one;
  }
  return uses;
}

int32_t BlockPool::Packing(int32_t group) const { return GroupAt(group).packing; }

int32_t BlockPool::NumFreeSlots(int32_t group) const { return GroupAt(group).free_slots; }

int64_t BlockPool::Capacity(int32_t group) const {
  const Group& g = GroupAt(group);
  return g.free_slots + int64_t{num_empty_} * g.packing;
}

int32_t BlockPool::BoundGroup(int32_t lcm_block_id) const { return ParentAt(lcm_block_id).group(); }

int32_t BlockPool::OccupiedCount(int32_t lcm_block_id) const { return ParentAt(lcm_block_id).occupied; }

bool BlockPool::IsEvictable(int32_t lcm_block_id) const {
  const Parent& parent = ParentAt(lcm_block_id);
  return parent.occupied > 0 && parent.evictable == parent.occupied;
}

bool BlockPool::IsOccupied(CacheBlockLocation location) const { return UseCount(location) > 0; }

const CacheBlock* BlockPool::BlockAt(CacheBlockLocation location) const {
  const Parent& parent = ParentAt(location.lcm_block_id);
  TOKENSPEED_CHECK(location.slot_index >= 0, "a slot index is negative");
  if (parent.group() < 0) return nullptr;
  TOKENSPEED_CHECK(location.slot_index < parent.record_count, "a slot lies outside its parent");
  const CacheBlock& record = parent.records[location.slot_index];
  return record.owners_ > 0 ? &record : nullptr;
}

int32_t BlockPool::UseCount(CacheBlockLocation location) const {
  const CacheBlock* block = BlockAt(location);
  return block == nullptr ? 0 : block->owners_;
}

std::vector<CacheBlockLocation> BlockPool::OccupiedLocations(int32_t lcm_block_id) const {
  const Parent& parent = ParentAt(lcm_block_id);
  std::vector<CacheBlockLocation> locations;
  if (parent.group() < 0) return locations;
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
