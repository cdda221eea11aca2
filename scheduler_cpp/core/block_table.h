// BlockTable: the blocks one request holds in one group, by logical slot. AcquirePlan: how a table is to grow.
//
// Invariants of a table:
// - blocks[i] is the block of logical slot i for the table's whole life; an empty handle is a hole.
// - The length never decreases, and slots never move, until GroupAllocator::Free.
// - Every slot below reclaimed_prefix_blocks is a hole, and that frontier never decreases.
//
// Ownership: a table owns one reference to each of its blocks; it is move-only, because copying one would double the
// references of a request without anybody asking for that.
// Thread safety: none.

#ifndef TOKENSPEED_CORE_BLOCK_TABLE_H_
#define TOKENSPEED_CORE_BLOCK_TABLE_H_

#include <cstdint>
#include <vector>

#include "core/cache_block_ref.h"

namespace tokenspeed {

struct BlockTable {
  BlockTable() = default;
  BlockTable(BlockTable&&) = default;
  BlockTable& operator=(BlockTable&&) = default;

  int32_t NumSlots() const { return static_cast<int32_t>(blocks.size()); }

  std::vector<CacheBlockRef> blocks;
  // Unused capacity at the tail; may span several blocks. An opaque number down here: only GroupGeometry computes it.
  int32_t available_tokens = 0;
  int32_t reclaimed_prefix_blocks = 0;
  // Leading slots that have been offered to the prefix index. Like the frontier, only what others have put there.
  int32_t published_blocks = 0;
};

// Produced by GroupGeometry, executed verbatim by GroupAllocator.
struct AcquirePlan {
  static constexpr int32_t kDenseAppend = -1;

  int32_t num_blocks = 0;
  int32_t suffix_start = kDenseAppend;
  int32_t table_blocks_after = 0;
  int32_t available_tokens_after = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_BLOCK_TABLE_H_
