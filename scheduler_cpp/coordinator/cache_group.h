// CacheGroup: one group's geometry, allocator and prefix index, side by side. The only place where tokens and blocks meet.
//
// Invariants: the allocator's geometry is the spec's; every index entry refers to a block of this group.
// Ownership: owns its index; borrows the device pool, which must outlive it.
// Thread safety: none.

#ifndef TOKENSPEED_COORDINATOR_CACHE_GROUP_H_
#define TOKENSPEED_COORDINATOR_CACHE_GROUP_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "coordinator/cache_group_spec.h"
#include "coordinator/group_geometry.h"
#include "core/block_pool.h"
#include "core/group_allocator.h"
#include "prefix/prefix_cache_index.h"

namespace tokenspeed {

// What a request has newly completed since its previous transaction. Views must outlive the call they are passed to.
struct CompletedPages {
  std::span<const PrefixHash> prefix_hashes;  // all prefix pages hashed so far
  int32_t first_new_prefix_page = 0;          // 0 <= first_new_prefix_page < prefix_hashes.size()
  BoundaryKind boundary_kind = BoundaryKind::kChunk;
  // For recurrent-state groups: the kind if it differs, and the boundaries (tokens, increasing) at which a step has
  // really written a snapshot. Nothing else of such a group is published.
  std::optional<BoundaryKind> state_boundary_kind;
  std::span<const int32_t> materialized_state_boundaries;
  // Whether new entries of every group are worth a copy in the host tier now; those of sliding windows always are, for
  // they expire.
  bool stream_completed_to_host = false;
};

class CacheGroup {
 public:
  // `notes_continuations`: whether anybody asks the index for what is known to go on (PrefixCacheIndex::IsContinued).
  CacheGroup(BlockPool& device_pool, int32_t group_id, const CacheGroupSpec& spec, int32_t prefix_granularity,
             bool notes_continuations = false);

  int32_t group_id() const { return allocator_.group(); }
  CacheGroupKind kind() const { return kind_; }
  const GroupGeometry& geometry() const { return geometry_; }
  bool IsState() const { return kind_ == CacheGroupKind::kRecurrentState; }
  // Whether prefixes are matched in this group and published by it; others bring their rows back by replay.
  bool SharesPrefixes() const { return geometry_.ReplayWindow() == 0; }
  const GroupAllocator& allocator() const { return allocator_; }
  const PrefixCacheIndex& index() const { return index_; }
  PrefixCacheIndex& index() { return index_; }

  std::vector<CacheKey> ExpandKeys(std::span<const PrefixHash> hashes) const;

  // Publishes what the group's kind keeps of newly completed pages; keys of new entries are appended to `new_keys`.
  void Publish(BlockTable& table, const CompletedPages& completed, uint64_t epoch, std::vector<CacheKey>& new_keys);
  // Where Publish begins in a table of which `published` leading slots were offered before; it leaves those below alone.
  int32_t FirstSlotToPublish(const CompletedPages& completed, int32_t published) const;
  // Publishes the slots of `hashes`, of which the first page starts at slot `first_slot`.
  void PublishRange(BlockTable& table, std::span<const PrefixHash> hashes, int32_t first_slot, uint64_t epoch,
                    BoundaryKind kind, std::vector<CacheKey>& new_keys);

  // Locations below slot `num_blocks` that would become free or evictable if this table let go of them: cached with
  // exactly two owners (index and table), or uncached with exactly one.
  std::vector<CacheBlockLocation> ReclaimableBlockLocationsAt(const BlockTable& table, int32_t num_blocks) const;

 private:
  // The key of a slot; `hashes` start at slot 0.
  CacheKey KeyOfSlot(std::span<const PrefixHash> hashes, int32_t slot) const;
  // Publishes `count` slots from `first_slot` on; `hashes` start at slot 0.
  void PublishSlots(BlockTable& table, std::span<const PrefixHash> hashes, int32_t first_slot, int32_t count,
                    uint64_t epoch, BoundaryKind kind, std::vector<CacheKey>& new_keys);

  CacheGroupKind kind_;
  BlockPool& device_pool_;
  GroupGeometry geometry_;
  GroupAllocator allocator_;
  PrefixCacheIndex index_;
  bool notes_continuations_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_CACHE_GROUP_H_
