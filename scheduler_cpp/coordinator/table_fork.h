// TableFork: how one group's table takes over what another table holds of the same leading tokens.
//
// Blocks that only hold rows below the position from which the fork computes are shared; nobody writes them again. The
// block that contains the position is written by both, so the fork has one of its own, and the rows that it reads there
// are copied. So are the full blocks before it of a prefix page that the common tokens do not complete: each
// continuation completes it with other tokens and publishes it under another key, and a block can have one key only.
//
// Thread safety: values and pure functions. Costs: O(blocks that are read).

#ifndef TOKENSPEED_COORDINATOR_TABLE_FORK_H_
#define TOKENSPEED_COORDINATOR_TABLE_FORK_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "coordinator/cache_group.h"
#include "core/block_table.h"

namespace tokenspeed {

// The whole contents of one block are to be written to another. Ids as in block tables.
struct BlockCopy {
  int32_t source = 0;
  int32_t destination = 0;

  friend bool operator==(const BlockCopy&, const BlockCopy&) = default;
};

struct TableFork {
  int32_t first_slot = 0;  // slots below are holes
  int32_t end_shared = 0;  // [first_slot, end_shared) is shared
  int32_t end_copied = 0;  // [end_shared, end_copied) is copied; from here on the fork's blocks are fresh

  // References to the shared blocks, one handle per slot below end_shared.
  std::vector<CacheBlockRef> SharedBlocks(const BlockTable& parent) const;
};

// How to compute on from `position`, a token count below which the parent's rows are written, towards a continuation of
// the first `common_tokens` (>= position) tokens. Nothing when the parent has let go of a block that is read, or when
// the group keeps snapshots, of which there is none at `position`.
std::optional<TableFork> ForkAt(const CacheGroup& group, const BlockTable& parent, int32_t position,
                                int32_t common_tokens);

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_TABLE_FORK_H_
