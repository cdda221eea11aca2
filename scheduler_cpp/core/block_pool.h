// BlockPool: which slots of which parents are taken.
//
// Invariants, true between any two calls:
// - Every parent 1..N is either in the FIFO of empty parents or bound to exactly one group, and it is bound iff one of
//   its slots is occupied.
// - NumFreeSlots(g) counts the unoccupied slots of the parents bound to g.
// - For each group and bucket an ordered set holds exactly the bound parents with a free slot in that bucket, densest
//   first, ties by lowest id.
// - Opening a parent takes the front of the FIFO; a parent that becomes empty joins its back.
// - An exact acquisition either returns all blocks or changes nothing.
//
// A bucket is one of the group's `shard_count` cyclic owners: bucket of a slot = slot mod shard_count.
//
// The pool counts storage only. It stores no key, owner or recency and knows no quantity in tokens.
//
// Ownership: blocks are owned by the CacheBlockRefs handed out; destroying the pool while one lives is fatal.
// Thread safety: none.
// Costs: queries O(1); occupy and release O(buckets * log parents); opening a parent allocates its slot records once.

#ifndef TOKENSPEED_CORE_BLOCK_POOL_H_
#define TOKENSPEED_CORE_BLOCK_POOL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/cache_block_ref.h"

namespace tokenspeed {

class BlockPool {
 public:
  // `num_lcm_blocks` usable parents (>= 0); one packing (> 0) per dense group id. num_lcm_blocks * packing fits int32.
  BlockPool(int32_t num_lcm_blocks, std::vector<int32_t> cache_blocks_per_lcm_block);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Fixes the geometry of a group. Must precede the group's first allocation; repeating it with the same geometry does
  // nothing, any other repetition is an error for the pool's whole life. A group that is never registered has one bucket.
  void RegisterGroup(int32_t group, int32_t cache_blocks_per_lcm_block, int32_t shard_count);

  // Exactly `num_blocks` blocks in pick order, or an empty list and no change. `num_blocks` <= 0 gives an empty list.
  //
  // Without loads: the densest bound parent with a hole, ties by lowest id, lowest free slot; else the FIFO front is
  // opened at slot 0. With one non-negative load per bucket, and more than one bucket: among the buckets with a hole in
  // a bound parent the one with the smallest load (ties by lowest bucket), in its densest parent; each pick adds one to
  // its bucket's load. Only when no bucket has a hole is the front opened, at the slot of the smallest load.
  std::vector<CacheBlockRef> AcquireBlocks(int32_t group, int32_t num_blocks, std::span<const int64_t> loads = {});

  // One block, or an empty handle when the group has no capacity.
  CacheBlockRef AcquireBlock(int32_t group);

  // One block of this very bucket: in its densest bound parent with a hole there, ties by lowest id; else the FIFO front
  // is opened at the bucket's first slot, although other buckets may have holes. Empty when neither exists.
  CacheBlockRef AcquireBlockInBucket(int32_t group, int32_t bucket);

  int32_t NumGroups() const { return static_cast<int32_t>(groups_.size()); }
  int32_t NumLcmBlocks() const { return static_cast<int32_t>(parents_.size()) - 1; }
  int32_t NumEmptyLcmBlocks() const { return static_cast<int32_t>(empty_.size()); }
  int32_t Packing(int32_t group) const;
  // Unoccupied slots in parents bound to `group`.
  int32_t NumFreeSlots(int32_t group) const;
  // What `group` could acquire now: its free slots, plus all slots of all empty parents.
  int64_t Capacity(int32_t group) const;

  // The group a parent is bound to, -1 when it is empty.
  int32_t BoundGroup(int32_t lcm_block_id) const;
  int32_t OccupiedCount(int32_t lcm_block_id) const;
  bool IsOccupied(CacheBlockLocation location) const;
  // Number of live handles to a location; 0 when the slot is free.
  int32_t UseCount(CacheBlockLocation location) const;
  // How often a handle has let go of a block, ever. While it stands still nothing has become free or unshared.
  uint64_t NumDroppedHandles() const { return dropped_handles_; }
  // Occupied slots of a parent in increasing slot order.
  std::vector<CacheBlockLocation> OccupiedLocations(int32_t lcm_block_id) const;

 private:
  friend class CacheBlockRef;

  // Ordered so that the best parent to fill comes first: (-occupied, parent id).
  using PartialParents = std::set<std::pair<int32_t, int32_t>>;

  struct Group {
    int32_t packing = 0;
    int32_t buckets = 0;  // 0 until registered or first used
    int32_t free_slots = 0;
    std::vector<PartialParents> partial;  // one per bucket
  };

  struct Parent {
    int32_t group = -1;
    int32_t occupied = 0;
    int32_t record_count = 0;               // slots that `records` holds
    std::unique_ptr<CacheBlock[]> records;  // kept when the parent empties, so a dying handle never frees itself
    std::vector<uint64_t> free_bits;        // bucket after bucket; bit i of bucket b is slot i * buckets + b
    std::vector<int32_t> lowest_free;       // per bucket; the packing when the bucket is full
  };

  Group& GroupAt(int32_t group);
  const Group& GroupAt(int32_t group) const;
  Parent& ParentAt(int32_t lcm_block_id);
  const Parent& ParentAt(int32_t lcm_block_id) const;
  void FixBuckets(Group& group, int32_t buckets);

  CacheBlockRef TakeOrdinary(int32_t group);
  CacheBlockRef TakeBalanced(int32_t group, std::vector<int64_t>& loads);
  CacheBlockRef OpenFront(int32_t group, int32_t slot);
  CacheBlockRef OccupyPartial(int32_t lcm_block_id, int32_t slot);
  CacheBlockRef Occupy(int32_t lcm_block_id, int32_t slot);
  void Release(const CacheBlock& block) noexcept;

  // A parent's occupancy and holes may change only between these two.
  static void RemoveFromPartial(Group& group, const Parent& parent, int32_t lcm_block_id);
  static void InsertIntoPartial(Group& group, const Parent& parent, int32_t lcm_block_id);

  static int32_t WordsPerBucket(const Group& group);
  // Lowest free slot of a bucket at or above `slot` (a slot of that bucket); the packing when there is none.
  static int32_t NextFreeSlot(const Group& group, const Parent& parent, int32_t slot);

  std::vector<Group> groups_;
  std::vector<Parent> parents_;  // index 0 is the null parent, never used
  std::deque<int32_t> empty_;
  uint64_t dropped_handles_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_BLOCK_POOL_H_
