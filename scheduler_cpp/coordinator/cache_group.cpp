#include "coordinator/cache_group.h"

#include <algorithm>

#include "core/check.h"

namespace tokenspeed {

CacheGroup::CacheGroup(BlockPool& device_pool, int32_t group_id, const CacheGroupSpec& spec,
                       int32_t prefix_granularity, bool notes_continuations)
    : kind_(spec.kind),
      device_pool_(device_pool),
      geometry_(spec, prefix_granularity),
      allocator_(device_pool, group_id, spec.cache_blocks_per_lcm_block, spec.shard_count),
      index_(group_id, geometry_.IsPrefixClosed()),
      notes_continuations_(notes_continuations) {}

std::vector<CacheKey> CacheGroup::ExpandKeys(std::span<const PrefixHash> hashes) const {
  return ExpandCacheKeys(hashes, group_id(), geometry_.BlocksPerPrefixPage());
}

void CacheGroup::Publish(BlockTable& table, const CompletedPages& completed, uint64_t epoch,
                         std::vector<CacheKey>& new_keys) {
  if (!SharesPrefixes()) return;
  const std::span<const PrefixHash> hashes = completed.prefix_hashes;
  const int32_t per_page = geometry_.BlocksPerPrefixPage();
  const int32_t first = completed.first_new_prefix_page * per_page;
  const int32_t end = static_cast<int32_t>(hashes.size()) * per_page;
  switch (kind_) {
    case CacheGroupKind::kFullAttention:
      PublishSlots(table, hashes, first, end - first, epoch, completed.boundary_kind, new_keys);
      return;
    case CacheGroupKind::kSlidingWindow: {
      const int32_t begin = FirstSlotToPublish(completed, table.published_blocks);
      PublishSlots(table, hashes, begin, std::max(end - begin, 0), epoch, completed.boundary_kind, new_keys);
      table.published_blocks = std::max(table.published_blocks, end);
      return;
    }
    case CacheGroupKind::kRecurrentState: {
      const BoundaryKind kind = completed.state_boundary_kind.value_or(completed.boundary_kind);
      if (kind == BoundaryKind::kChunk) return;
      for (int32_t boundary : completed.materialized_state_boundaries) {
        const int32_t below = boundary / geometry_.block_granularity();
        if (below > first && below <= end) PublishSlots(table, hashes, below - 1, 1, epoch, kind, new_keys);
      }
      return;
    }
  }
}

int32_t CacheGroup::FirstSlotToPublish(const CompletedPages& completed, int32_t published) const {
  const int32_t per_page = geometry_.BlocksPerPrefixPage();
  if (kind_ != CacheGroupKind::kSlidingWindow) return completed.first_new_prefix_page * per_page;
  // A window's blocks may be offered from below the first new page on: those of a hit are, when it has just been made.
  const int32_t end = static_cast<int32_t>(completed.prefix_hashes.size()) * per_page;
  const int32_t begin = end - std::min(geometry_.LookbackBlocks(), end);
  // Publishing a slot a second time could only raise its kind, which a chunk's does not.
  return completed.boundary_kind == BoundaryKind::kChunk ? std::max(begin, published) : begin;
}

void CacheGroup::PublishRange(BlockTable& table, std::span<const PrefixHash> hashes, int32_t first_slot,
                              uint64_t epoch, BoundaryKind kind, std::vector<CacheKey>& new_keys) {
  if (!SharesPrefixes()) return;
  const std::vector<CacheKey> keys = ExpandKeys(hashes);
  const std::span<CacheBlockRef> blocks =
      allocator_.BlocksToPublish(table, first_slot, static_cast<int32_t>(keys.size()));
  index_.RegisterFullBlocks(device_pool_, blocks, keys, epoch, first_slot, kind, new_keys);
}

void CacheGroup::PublishSlots(BlockTable& table, std::span<const PrefixHash> hashes, int32_t first_slot, int32_t count,
                              uint64_t epoch, BoundaryKind kind, std::vector<CacheKey>& new_keys) {
  if (count == 0) return;
  // One key at a time: a decode step publishes one page, and must not allocate for it.
  int32_t slot = first_slot;
  for (CacheBlockRef& block : allocator_.BlocksToPublish(table, first_slot, count)) {
    if (block) {
      const CacheKey key = KeyOfSlot(hashes, slot);
      if (index_.Register(device_pool_, block, key, epoch, slot, kind)) new_keys.push_back(key);
      if (notes_continuations_ && slot > 0) index_.NoteContinuation(table.blocks[static_cast<std::size_t>(slot) - 1]);
    }
    ++slot;
  }
}

CacheKey CacheGroup::KeyOfSlot(std::span<const PrefixHash> hashes, int32_t slot) const {
  const int32_t per_page = geometry_.BlocksPerPrefixPage();
  return {.content_hash = hashes[static_cast<std::size_t>(slot / per_page)],
          .namespace_id = kWholePages,
          .group_id = group_id(),
          .page_offset = slot % per_page};
}

std::vector<CacheBlockLocation> CacheGroup::ReclaimableBlockLocationsAt(const BlockTable& table,
                                                                        int32_t num_blocks) const {
  constexpr int32_t kOwnersWhenCached = 2;  // the index and this table
  constexpr int32_t kOwnersWhenUncached = 1;
  std::vector<CacheBlockLocation> locations;
  const int32_t end = std::min(num_blocks, table.NumSlots());
  for (int32_t slot = table.reclaimed_prefix_blocks; slot < end; ++slot) {
    const CacheBlockRef& block = table.blocks[slot];
    if (!block) continue;
    const bool cached = index_.Contains(device_pool_, block->Location());
    if (block.use_count() == (cached ? kOwnersWhenCached : kOwnersWhenUncached)) locations.push_back(block->Location());
  }
  return locations;
}

}  // namespace tokenspeed
