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
// - A block is evictable while somebody caches it and nobody but that cache owns it; a parent is, while all its occupied
//   slots are.
//
// A bucket is one of the group's `shard_count` cyclic owners: bucket of a slot = slot mod shard_count.
//
// The pool counts storage only. It stores no key and no recency and knows no quantity in tokens.
//
// Ownership: blocks are owned by the CacheBlockRefs handed out; destroying the pool while one lives is fatal.
// Thread safety: none.
// Costs: construction O(groups), whatever the number of parents; 48 bytes of a parent that was never opened, which no
// memory page backs until then. Queries O(1); occupy and release O(buckets * log parents), O(1) for a group of one block
// per parent; opening a parent allocates its slot records once.

#ifndef TOKENSPEED_CORE_BLOCK_POOL_H_
#define TOKENSPEED_CORE_BLOCK_POOL_H_

#include <cstdint>
#include <cstdlib>
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
  // The same into places that hold nothing yet, one block each; the group must have the capacity. Counts the picks in
  // `loads`.
  void AcquireInto(int32_t group, std::span<CacheBlockRef> places, std::span<int64_t> loads = {});

  // One block, or an empty handle when the group has no capacity.
  CacheBlockRef AcquireBlock(int32_t group);

  // One block of this very bucket: in its densest bound parent with a hole there, ties by lowest id; else the FIFO front
  // is opened at the bucket's first slot, although other buckets may have holes. Empty when neither exists.
  CacheBlockRef AcquireBlockInBucket(int32_t group, int32_t bucket);

  int32_t NumGroups() const { return static_cast<int32_t>(groups_.size()); }
  int32_t NumLcmBlocks() const { return num_parents_; }
  int32_t NumEmptyLcmBlocks() const { return num_empty_; }
  // Parents with nothing but evictable blocks.
  int32_t NumEvictableLcmBlocks() const { return num_evictable_parents_; }
  bool IsEvictable(int32_t lcm_block_id) const;
  // Parents with a block that somebody owns beside its cache and the transfers in flight.
  int32_t NumActiveLcmBlocks() const { return num_active_parents_; }
  // What each parent is taken for, the first one first: 0 for an empty one; g + 1 for one of group g that is active, and
  // -(g + 1) for one that only its cache and transfers hold. A scan of the parents that were ever opened.
  std::vector<int32_t> LcmBlockUses() const;
  int32_t Packing(int32_t group) const;
  // Unoccupied slots in parents bound to `group`.
  int32_t NumFreeSlots(int32_t group) const;
  // What `group` could acquire now: its free slots, plus all slots of all empty parents.
  int64_t Capacity(int32_t group) const;

  // The group a parent is bound to, -1 when it is empty.
  int32_t BoundGroup(int32_t lcm_block_id) const;
  int32_t OccupiedCount(int32_t lcm_block_id) const;
  bool IsOccupied(CacheBlockLocation location) const;
  // Null when the slot is free.
  const CacheBlock* BlockAt(CacheBlockLocation location) const;
  // Number of live handles to a location; 0 when the slot is free.
  int32_t UseCount(CacheBlockLocation location) const;
  // How often a handle has let go of a block, ever. While it stands still nothing has become free or unshared.
  uint64_t NumDroppedHandles() const { return dropped_handles_; }
  // Says who caches the block from now on; the cache owns one handle itself. Null ends it. The block must be occupied,
  // and must not be cached by another.
  void SetCached(const CacheBlockRef& block, CachedBlock* cached);
  // Says that a handle is from now on, or no longer, a transfer's: it keeps the block but does not make it active.
  void BeginTransfer(const CacheBlockRef& block) { CountPassive(block->Location().lcm_block_id, 1); }
  void EndTransfer(const CacheBlockRef& block) { CountPassive(block->Location().lcm_block_id, -1); }

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

  // All zero bytes are a parent that was never opened, so that memory fresh from the system needs no initialisation.
  struct Parent {
    int32_t group_plus_one;  // 0 while it is empty
    int32_t occupied;
    int32_t evictable;
    int32_t handles;       // to all its blocks
    int32_t passive;       // of these: the caches' own, and those of transfers
    int32_t next_empty;    // the one behind it in the FIFO
    int32_t record_count;  // slots that `records` holds
    int32_t num_free_words;
    CacheBlock* records;   // owned; kept when the parent empties, so a dying handle never frees itself
    uint64_t* free_words;  // owned; bucket after bucket; bit i of bucket b is slot i * buckets + b

    int32_t group() const { return group_plus_one - 1; }
  };
  struct FreeMemory {
    void operator()(void* memory) const { std::free(memory); }
  };

  Group& GroupAt(int32_t group);
  const Group& GroupAt(int32_t group) const;
  Parent& ParentAt(int32_t lcm_block_id);
  const Parent& ParentAt(int32_t lcm_block_id) const;
  void FixBuckets(Group& group, int32_t buckets);
  int32_t PopEmpty();
  void PushEmpty(int32_t lcm_block_id);
  void CountEvictable(const CacheBlock& block, int32_t change) noexcept;
  void CountHandles(const CacheBlock& block, int32_t change) noexcept;
  void CountPassive(int32_t lcm_block_id, int32_t change) noexcept;

  CacheBlockRef TakeOrdinary(int32_t group);
  CacheBlockRef TakeBalanced(int32_t group, std::span<int64_t> loads);
  CacheBlockRef OpenFront(int32_t group, int32_t slot);
  CacheBlockRef OccupyPartial(int32_t lcm_block_id, int32_t slot);
  CacheBlockRef Occupy(int32_t lcm_block_id, int32_t slot);
  void Release(const CacheBlock& block) noexcept;

  // A parent's occupancy and holes may change only between these two.
  static void RemoveFromPartial(Group& group, const Parent& parent, int32_t lcm_block_id);
  static void InsertIntoPartial(Group& group, const Parent& parent, int32_t lcm_block_id);

  static int32_t WordsPerBucket(const Group& group);
  // Lowest free slot of a bucket; the packing when it is full.
  static int32_t LowestFree(const Group& group, const Parent& parent, int32_t bucket) {
    return NextFreeSlot(group, parent, bucket);
  }
  // Lowest free slot of a bucket at or above `slot` (a slot of that bucket); the packing when there is none.
  static int32_t NextFreeSlot(const Group& group, const Parent& parent, int32_t slot);

  std::vector<Group> groups_;
  int32_t num_parents_;
  std::unique_ptr<Parent[], FreeMemory> parents_;  // index 0 is the null parent, never used
  // The FIFO: first the parents that were never opened, in order, then the list of those that came back.
  int32_t first_unopened_ = 1;
  int32_t first_returned_ = 0;
  int32_t last_returned_ = 0;
  int32_t num_empty_;
  int32_t num_evictable_parents_ = 0;
  int32_t num_active_parents_ = 0;
  uint64_t dropped_handles_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_BLOCK_POOL_H_
