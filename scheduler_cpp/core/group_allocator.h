// GroupAllocator: places and releases the blocks of one group's tables. One class serves every kind of group.
//
// Invariants:
// - The id written in a block table is resolved here and nowhere else: 1 + (parent - 1) * packing + slot.
// - Id 0 is a hole and is never allocated; distinct locations of a group have distinct ids.
// - A refused acquisition changes neither the pool nor the table.
//
// Ownership: borrows the pool, which must outlive it; owns nothing but its geometry.
// Thread safety: none.

#ifndef TOKENSPEED_CORE_GROUP_ALLOCATOR_H_
#define TOKENSPEED_CORE_GROUP_ALLOCATOR_H_

#include <cstdint>
#include <span>
#include <vector>

#include "core/block_pool.h"
#include "core/block_table.h"

namespace tokenspeed {

inline constexpr int32_t kNullCacheBlockId = 0;

// 1 + (parent - 1) * packing + slot. Broken invariant when the parent is not positive, the slot is outside
// [0, packing), or the id exceeds int32.
int32_t ResolveCacheBlockId(CacheBlockLocation location, int32_t cache_blocks_per_lcm_block);

class GroupAllocator {
 public:
  // Registers the group's geometry in the pool.
  GroupAllocator(BlockPool& pool, int32_t group, int32_t cache_blocks_per_lcm_block, int32_t shard_count);

  int32_t group() const { return group_; }
  int32_t packing() const { return packing_; }
  int32_t shard_count() const { return shard_count_; }

  int32_t BlockId(const CacheBlockRef& block) const { return ResolveCacheBlockId(block->Location(), packing_); }

  // The id of one slot, 0 for a hole.
  int32_t SlotId(const BlockTable& table, int32_t slot) const {
    const CacheBlockRef& block = table.blocks[static_cast<std::size_t>(slot)];
    return block ? BlockId(block) : kNullCacheBlockId;
  }
  // One id per slot, 0 for holes.
  std::vector<int32_t> BlockIds(const BlockTable& table) const;

  // Installs the blocks of a prefix hit in an empty table; leading holes become the frontier.
  void ClaimHitBlocks(BlockTable& table, std::vector<CacheBlockRef> blocks) const;

  // Appends one fresh block for each of `sources`, blocks of another pool that are to be copied there; a hole for a hole.
  // The table has no unused tail. Each destination lies in the bucket of its source. The pool must have room: running
  // short is a broken invariant.
  void AppendCopiesOf(BlockTable& table, std::span<const CacheBlockRef> sources) const;

  // Executes a plan. False, and no change, when the pool lacks blocks. On success the ids of the blocks placed are
  // appended to `new_block_ids` in acquisition order. Under sharding the shards that own fewest of the table's blocks
  // are preferred.
  bool Acquire(BlockTable& table, const AcquirePlan& plan, std::vector<int32_t>& new_block_ids) const;

  // Drops the slots below `num_blocks` (clipped to the table) and moves the frontier there.
  void ReclaimExpired(BlockTable& table, int32_t num_blocks) const;
  // Whether ReclaimExpired(table, num_blocks) would drop any block.
  bool HasReclaimableBlocksAt(const BlockTable& table, int32_t num_blocks) const;

  // Takes `num_tokens` of the tail's unused capacity; 0 <= num_tokens <= available_tokens.
  void ConsumeReservedTokens(BlockTable& table, int32_t num_tokens) const;

  // Consecutive slots handed to the prefix index, which may replace a handle by the canonical one.
  std::span<CacheBlockRef> BlocksToPublish(BlockTable& table, int32_t first_slot, int32_t count) const;

  // Releases every slot, last to first, so that the order in which parents become empty is determined; clears the table.
  void Free(BlockTable& table) const;

 private:
  std::vector<int64_t> ShardLoads(const BlockTable& table) const;

  BlockPool& pool_;
  int32_t group_;
  int32_t packing_;
  int32_t shard_count_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_GROUP_ALLOCATOR_H_
