#include "core/group_allocator.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace tokenspeed {

int32_t ResolveCacheBlockId(CacheBlockLocation location, int32_t cache_blocks_per_lcm_block) {
  TOKENSPEED_CHECK(location.lcm_block_id > 0, "a parent id must be positive");
  TOKENSPEED_CHECK(location.slot_index >= 0 && location.slot_index < cache_blocks_per_lcm_block,
                   "a slot lies outside its parent");
  return CheckedInt32(1 + (int64_t{location.lcm_block_id} - 1) * cache_blocks_per_lcm_block + location.slot_index);
}

GroupAllocator::GroupAllocator(BlockPool& pool, int32_t group, int32_t cache_blocks_per_lcm_block, int32_t shard_count)
    : pool_(pool), group_(group), packing_(cache_blocks_per_lcm_block), shard_count_(shard_count) {
  pool_.RegisterGroup(group_, packing_, shard_count_);
}

std::vector<int32_t> GroupAllocator::BlockIds(const BlockTable& table) const {
  std::vector<int32_t> ids;
  ids.reserve(table.blocks.size());
  for (int32_t slot = 0; slot < table.NumSlots(); ++slot) ids.push_back(SlotId(table, slot));
  return ids;
}

void GroupAllocator::ClaimHitBlocks(BlockTable& table, std::vector<CacheBlockRef> blocks) const {
  TOKENSPEED_CHECK(table.blocks.empty() && table.available_tokens == 0 && table.reclaimed_prefix_blocks == 0,
                   "a prefix hit is claimed into a table that is in use");
  const auto first_held = std::find_if(blocks.begin(), blocks.end(), [](const CacheBlockRef& b) { return bool(b); });
  table.reclaimed_prefix_blocks = static_cast<int32_t>(first_held - blocks.begin());
  table.blocks = std::move(blocks);
}

void GroupAllocator::AppendCopiesOf(BlockTable& table, std::span<const CacheBlockRef> sources) const {
  TOKENSPEED_CHECK(table.available_tokens == 0, "blocks are appended behind a tail with room in it");
  for (const CacheBlockRef& source : sources) {
    CacheBlockRef block;
    if (source) {
      block = pool_.AcquireBlockInBucket(group_, source->Location().slot_index % shard_count_);
      TOKENSPEED_CHECK(bool(block), "the pool has no room for a planned copy");
    } else if (table.reclaimed_prefix_blocks == table.NumSlots()) {
      ++table.reclaimed_prefix_blocks;  // a leading hole belongs below the frontier
    }
    table.blocks.push_back(std::move(block));
  }
}

bool GroupAllocator::Acquire(BlockTable& table, const AcquirePlan& plan, std::vector<int32_t>& new_block_ids) const {
  const bool dense = plan.suffix_start == AcquirePlan::kDenseAppend;
  TOKENSPEED_CHECK(plan.num_blocks >= 0, "a plan asks for a negative number of blocks");
  TOKENSPEED_CHECK(dense || table.NumSlots() <= plan.suffix_start, "a sparse suffix starts inside the table");
  const int32_t first = dense ? table.NumSlots() : plan.suffix_start;
  TOKENSPEED_CHECK(first + plan.num_blocks == plan.table_blocks_after, "a plan is inconsistent with the table");

  if (pool_.Capacity(group_) < plan.num_blocks) return false;
  std::vector<int64_t> loads = ShardLoads(table);
  if (!dense && table.blocks.empty()) table.reclaimed_prefix_blocks = plan.suffix_start;
  table.blocks.resize(static_cast<std::size_t>(plan.table_blocks_after));
  const auto places = std::span<CacheBlockRef>(table.blocks).subspan(static_cast<std::size_t>(first));
  pool_.AcquireInto(group_, places, loads);
  for (const CacheBlockRef& block : places) new_block_ids.push_back(BlockId(block));
  table.available_tokens = plan.available_tokens_after;
  return true;
}

std::vector<int64_t> GroupAllocator::ShardLoads(const BlockTable& table) const {
  if (shard_count_ == 1) return {};
  std::vector<int64_t> loads(static_cast<std::size_t>(shard_count_), 0);
  for (int32_t slot = table.reclaimed_prefix_blocks; slot < table.NumSlots(); ++slot) {
    if (table.blocks[slot]) ++loads[table.blocks[slot]->Location().slot_index % shard_count_];
  }
  return loads;
}

void GroupAllocator::ReclaimExpired(BlockTable& table, int32_t num_blocks) const {
  const int32_t end = std::min(num_blocks, table.NumSlots());
  for (int32_t slot = table.reclaimed_prefix_blocks; slot < end; ++slot) table.blocks[slot].reset();
  table.reclaimed_prefix_blocks = std::max(table.reclaimed_prefix_blocks, end);
}

bool GroupAllocator::HasReclaimableBlocksAt(const BlockTable& table, int32_t num_blocks) const {
  const int32_t end = std::min(num_blocks, table.NumSlots());
  for (int32_t slot = table.reclaimed_prefix_blocks; slot < end; ++slot) {
    if (table.blocks[slot]) return true;
  }
  return false;
}

void GroupAllocator::ConsumeReservedTokens(BlockTable& table, int32_t num_tokens) const {
  TOKENSPEED_CHECK(num_tokens >= 0 && num_tokens <= table.available_tokens, "more is consumed than was reserved");
  table.available_tokens -= num_tokens;
}

std::span<CacheBlockRef> GroupAllocator::BlocksToPublish(BlockTable& table, int32_t first_slot, int32_t count) const {
  TOKENSPEED_CHECK(first_slot >= 0 && count >= 0 && count <= table.NumSlots() - first_slot,
                   "slots outside the table are published");
  return std::span<CacheBlockRef>(table.blocks).subspan(static_cast<std::size_t>(first_slot),
                                                        static_cast<std::size_t>(count));
}

void GroupAllocator::Free(BlockTable& table) const {
  while (!table.blocks.empty()) table.blocks.pop_back();
  table = BlockTable();
}

}  // namespace tokenspeed
