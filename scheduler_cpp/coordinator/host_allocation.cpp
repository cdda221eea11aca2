#include "coordinator/host_allocation.h"

#include <algorithm>
#include <cstddef>
#include <tuple>

namespace tokenspeed {
namespace {

// Value of an entry within its group. The smallest goes first.
auto HostRank(const PrefixCacheIndex::Candidate& candidate) {
  return std::tuple(candidate.metadata.was_acquired, candidate.metadata.last_access_epoch);
}

class Allocator {
 public:
  Allocator(std::span<CacheGroup> groups, BlockPool& pool, std::span<const HostBlockWish> wishes)
      : groups_(groups), pool_(pool), wishes_(wishes) {
    result_.blocks.resize(wishes.size());
  }

  HostAllocation Run() {
    for (std::size_t i = 0; i < wishes_.size(); ++i) Take(i);
    CollectUnresolved();
    if (!unresolved_.empty()) EvictWithinGroups();
    // That may have emptied a parent which serves any group.
    for (std::size_t i : unresolved_) Take(i);
    CollectUnresolved();
    if (!unresolved_.empty()) EvictParents();
    CollectUnresolved();
    result_.num_unallocated = static_cast<int32_t>(unresolved_.size());
    return std::move(result_);
  }

 private:
  bool Take(std::size_t i) {
    if (!result_.blocks[i]) result_.blocks[i] = pool_.AcquireBlockInBucket(wishes_[i].group, wishes_[i].bucket);
    return bool(result_.blocks[i]);
  }

  void CollectUnresolved() {
    unresolved_.clear();
    for (std::size_t i = 0; i < wishes_.size(); ++i) {
      if (!result_.blocks[i]) unresolved_.push_back(i);
    }
  }

  PrefixCacheIndex& IndexOf(int32_t group) { return groups_[static_cast<std::size_t>(group)].index(); }

  // The `count` least valuable entries of the wish's group and bucket.
  std::vector<CacheBlockLocation> LeastValuable(const HostBlockWish& wish, std::size_t count) {
    ++result_.same_group_scans;
    const PrefixCacheIndex& index = IndexOf(wish.group);
    const int32_t shards = groups_[static_cast<std::size_t>(wish.group)].allocator().shard_count();
    std::vector<CacheBlockLocation> untried;  // in order of value, as the walk goes by age
    std::vector<CacheBlockLocation> proven;
    for (auto cursor = index.StartEviction(pool_); cursor.rank() != nullptr && untried.size() < count; cursor.Advance()) {
      const CacheBlockLocation location = cursor.rank()->location;
      if (location.slot_index % shards != wish.bucket) continue;
      (index.MetadataFor(pool_, location)->was_acquired ? proven : untried).push_back(location);
    }
    untried.insert(untried.end(), proven.begin(), proven.end());
    untried.resize(std::min(untried.size(), count));
    return untried;
  }

  void EvictWithinGroups() {
    std::vector<bool> served(wishes_.size(), false);
    for (std::size_t first : unresolved_) {
      if (served[first]) continue;
      std::vector<std::size_t> same;
      for (std::size_t i : unresolved_) {
        if (wishes_[i] == wishes_[first]) same.push_back(i);
      }
      for (CacheBlockLocation location : LeastValuable(wishes_[first], same.size())) {
        IndexOf(wishes_[first].group).Evict(pool_, location);
      }
      for (std::size_t i : same) {
        served[i] = true;
        Take(i);
      }
    }
  }

  struct EvictableParent {
    int32_t id;
    std::tuple<bool, uint64_t> value;  // of its most valuable block
  };

  std::vector<EvictableParent> EvictableParents() {
    ++result_.cross_group_scans;
    std::vector<EvictableParent> parents;
    for (int32_t id = 1; id <= pool_.NumLcmBlocks(); ++id) {
      const int32_t group = pool_.BoundGroup(id);
      if (group < 0 || !pool_.IsEvictable(id)) continue;
      EvictableParent parent{id, {}};
      for (CacheBlockLocation location : pool_.OccupiedLocations(id)) {
        parent.value = std::max(parent.value, HostRank({location, *IndexOf(group).MetadataFor(pool_, location)}));
      }
      parents.push_back(parent);
    }
    std::stable_sort(parents.begin(), parents.end(),
                     [](const EvictableParent& a, const EvictableParent& b) { return a.value < b.value; });
    return parents;
  }

  void EvictParents() {
    const std::vector<EvictableParent> parents = EvictableParents();
    auto next = parents.begin();
    for (std::size_t i : unresolved_) {
      if (Take(i)) continue;  // room beside an earlier wish, in the parent opened for it
      if (next == parents.end()) continue;
      const int32_t group = pool_.BoundGroup(next->id);
      for (CacheBlockLocation location : pool_.OccupiedLocations(next->id)) IndexOf(group).Evict(pool_, location);
      ++next;
      Take(i);
    }
  }

  std::span<CacheGroup> groups_;
  BlockPool& pool_;
  std::span<const HostBlockWish> wishes_;
  HostAllocation result_;
  std::vector<std::size_t> unresolved_;
};

}  // namespace

HostAllocation AllocateHostBlocks(std::span<CacheGroup> groups, BlockPool& host_pool,
                                  std::span<const HostBlockWish> wishes) {
  return Allocator(groups, host_pool, wishes).Run();
}

}  // namespace tokenspeed
