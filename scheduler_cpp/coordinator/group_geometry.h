// GroupGeometry: the only place where a quantity in tokens becomes a number of blocks.
//
// Invariants:
// - Pure: results depend on the spec, the demand and the table's shape (length, unused tail), never on what is stored.
// - A reserve is capacity, never progress: it adds blocks, not tokens of extent.
//
// Thread safety: immutable.

#ifndef TOKENSPEED_COORDINATOR_GROUP_GEOMETRY_H_
#define TOKENSPEED_COORDINATOR_GROUP_GEOMETRY_H_

#include <algorithm>
#include <cstdint>
#include <variant>

#include "coordinator/cache_group_spec.h"
#include "core/block_table.h"
#include "prefix/prefix_matcher.h"

namespace tokenspeed {

// Grow by `num_tokens` (>= 0) relative to the table's current fill.
struct DenseGrowth {
  int32_t num_tokens = 0;
};

// Absolute: afterwards the table covers `extent_tokens` (> 0); slots below `first_block` that are not there yet are
// holes, slots from it on are materialised. The table must have no unused tail and at most `first_block` slots.
struct SparseSuffix {
  int32_t extent_tokens = 0;
  int32_t first_block = 0;
};

// What one group's table must be able to hold after an admission.
struct TokenDemand {
  std::variant<DenseGrowth, SparseSuffix> extent = DenseGrowth{};
  int32_t reserve_tokens = 0;
};

class GroupGeometry {
 public:
  GroupGeometry(const CacheGroupSpec& spec, int32_t prefix_granularity);

  bool IsPrefixClosed() const { return kind_ == CacheGroupKind::kFullAttention; }
  // Whether blocks hold a row per token; otherwise each is one snapshot, of use at one token count alone.
  bool HoldsRows() const { return kind_ != CacheGroupKind::kRecurrentState; }
  // Tokens to feed again below a hit; 0 for a group that is matched instead.
  int32_t ReplayWindow() const { return replayable_ ? window_tokens_ : 0; }
  // Blocks below a boundary that are needed to resume there: 0 for closed groups, else ceil((window - 1) / g).
  int32_t LookbackBlocks() const;
  MatchRule Matching() const { return {IsPrefixClosed(), LookbackBlocks()}; }
  int32_t block_granularity() const { return block_granularity_; }
  int32_t BlocksPerPrefixPage() const { return prefix_granularity_ / block_granularity_; }
  // Blocks of the prefix pages that so many leading tokens complete.
  int32_t BlocksInPrefixPages(int32_t num_tokens) const {
    return num_tokens / prefix_granularity_ * BlocksPerPrefixPage();
  }

  // The extent that materialises the block ending at or containing token `first_snapshot_tokens` (> 0) and everything
  // behind it up to `extent_tokens`: what a state group needs of a chunk, whose other blocks stay holes.
  SparseSuffix SnapshotSuffix(int32_t first_snapshot_tokens, int32_t extent_tokens) const;

  // Blocks that must be acquired to grow `table` by `demand`. A prefix hit claimed before the growth does not change the
  // number, because hit pages are full.
  int32_t BlocksNeeded(const BlockTable& table, const TokenDemand& demand) const;
  // How to grow `table`, with any hit already claimed.
  AcquirePlan Plan(const BlockTable& table, const TokenDemand& demand) const;

  // Leading slots that no later query can read once `num_computed_tokens` tokens are written.
  int32_t ExpiredBlocks(int32_t num_computed_tokens) const;
  // Of the rows below it, a query at `position` reads some in each of the slots
  // [ExpiredBlocks(position), EndOfReadBlocks(position)) and none in any other. Only for groups that hold rows.
  int32_t EndOfReadBlocks(int32_t position) const;
  // Of these slots, the first one in the prefix page that starts at `begin` (<= position).
  int32_t FirstReadBlock(int32_t begin, int32_t position) const {
    return std::max(begin / block_granularity_, ExpiredBlocks(position));
  }

 private:
  // Tokens, counting the query's own, that a query reads; not meaningful for closed groups.
  int64_t RetainedTokens() const;

  CacheGroupKind kind_;
  int32_t block_granularity_;
  int32_t window_tokens_;
  bool replayable_;
  int32_t prefix_granularity_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_GROUP_GEOMETRY_H_
