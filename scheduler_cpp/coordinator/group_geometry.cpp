#include "coordinator/group_geometry.h"

#include <algorithm>

#include "core/check.h"

namespace tokenspeed {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

GroupGeometry::GroupGeometry(const CacheGroupSpec& spec, int32_t prefix_granularity)
    : kind_(spec.kind),
      block_granularity_(spec.block_granularity),
      window_tokens_(spec.sliding_window_tokens),
      replayable_(spec.replayable),
      prefix_granularity_(prefix_granularity) {
  TOKENSPEED_CHECK(prefix_granularity_ > 0, "the prefix granularity must be positive");
  TOKENSPEED_CHECK(block_granularity_ > 0 && prefix_granularity_ % block_granularity_ == 0,
                   "a block granularity must divide the prefix granularity");
  TOKENSPEED_CHECK(kind_ != CacheGroupKind::kSlidingWindow || window_tokens_ > 0,
                   "a sliding window needs a positive length");
  TOKENSPEED_CHECK(!replayable_ || kind_ == CacheGroupKind::kSlidingWindow, "only a sliding window is replayable");
}

int64_t GroupGeometry::RetainedTokens() const {
  constexpr int64_t kStateSnapshotWindow = 2;  // the snapshot just below a query is all it reads
  return kind_ == CacheGroupKind::kRecurrentState ? kStateSnapshotWindow : window_tokens_;
}

int32_t GroupGeometry::LookbackBlocks() const {
  if (IsPrefixClosed()) return 0;
  return static_cast<int32_t>(CeilDivide(RetainedTokens() - 1, block_granularity_));
}

SparseSuffix GroupGeometry::SnapshotSuffix(int32_t first_snapshot_tokens, int32_t extent_tokens) const {
  TOKENSPEED_CHECK(first_snapshot_tokens > 0 && first_snapshot_tokens <= extent_tokens,
                   "a snapshot lies outside its extent");
  return {.extent_tokens = extent_tokens, .first_block = (first_snapshot_tokens - 1) / block_granularity_};
}

int32_t GroupGeometry::BlocksNeeded(const BlockTable& table, const TokenDemand& demand) const {
  const int64_t reserve = demand.reserve_tokens;
  TOKENSPEED_CHECK(reserve >= 0, "a reserve is negative");
  if (const auto* dense = std::get_if<DenseGrowth>(&demand.extent)) {
    TOKENSPEED_CHECK(dense->num_tokens >= 0, "a growth is negative");
    const int64_t missing = std::max<int64_t>(0, dense->num_tokens + reserve - table.available_tokens);
    return CheckedInt32(CeilDivide(missing, block_granularity_));
  }
  const auto& sparse = std::get<SparseSuffix>(demand.extent);
  TOKENSPEED_CHECK(sparse.extent_tokens > 0 && sparse.first_block >= 0, "a sparse suffix is empty");
  const int64_t last = (sparse.extent_tokens + reserve - 1) / block_granularity_;
  TOKENSPEED_CHECK(sparse.first_block <= last, "a sparse suffix starts behind its end");
  return CheckedInt32(last - sparse.first_block + 1);
}

AcquirePlan GroupGeometry::Plan(const BlockTable& table, const TokenDemand& demand) const {
  AcquirePlan plan;
  plan.num_blocks = BlocksNeeded(table, demand);
  if (const auto* dense = std::get_if<DenseGrowth>(&demand.extent)) {
    plan.table_blocks_after = CheckedInt32(int64_t{table.NumSlots()} + plan.num_blocks);
    plan.available_tokens_after = CheckedInt32(
        table.available_tokens + int64_t{plan.num_blocks} * block_granularity_ - dense->num_tokens);
    return plan;
  }
  const auto& sparse = std::get<SparseSuffix>(demand.extent);
  TOKENSPEED_CHECK(table.available_tokens == 0, "a sparse suffix follows a tail with room in it");
  TOKENSPEED_CHECK(table.NumSlots() <= sparse.first_block, "a sparse suffix starts inside the table");
  plan.suffix_start = sparse.first_block;
  plan.table_blocks_after = sparse.first_block + plan.num_blocks;
  plan.available_tokens_after =
      CheckedInt32(int64_t{plan.table_blocks_after} * block_granularity_ - sparse.extent_tokens);
  return plan;
}

int32_t GroupGeometry::ExpiredBlocks(int32_t num_computed_tokens) const {
  if (IsPrefixClosed()) return 0;
  // The next query stands at num_computed_tokens and reads back to num_computed_tokens - window + 1.
  const int64_t first_read = int64_t{num_computed_tokens} - RetainedTokens() + 1;
  return static_cast<int32_t>(std::max<int64_t>(0, first_read) / block_granularity_);
}

int32_t GroupGeometry::EndOfReadBlocks(int32_t position) const {
  const bool reads_itself_alone = !IsPrefixClosed() && window_tokens_ == 1;
  return reads_itself_alone ? ExpiredBlocks(position)
                            : static_cast<int32_t>(CeilDivide(position, block_granularity_));
}

}  // namespace tokenspeed
