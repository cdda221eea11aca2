#include "scheduler/cache_group_config.h"

#include <stdexcept>

#include "scheduler/identifier.h"

namespace tokenspeed {
namespace {

[[noreturn]] void Refuse(const CacheGroupConfig& group, const std::string& complaint) {
  throw std::invalid_argument("cache group '" + group.group_id + "': " + complaint);
}

void ValidatePacking(const CacheGroupConfig& group) {
  if (group.cache_blocks_per_lcm_block <= 0) {
    Refuse(group, "cache_blocks_per_lcm_block must be > 0, got " +
                      std::to_string(group.cache_blocks_per_lcm_block));
  }
  if (group.shard_count <= 0) {
    Refuse(group, "shard_count must be > 0, got " + std::to_string(group.shard_count));
  }
  if (group.cache_blocks_per_lcm_block % group.shard_count != 0) {
    Refuse(group, "shard_count " + std::to_string(group.shard_count) +
                      " does not divide cache_blocks_per_lcm_block " +
                      std::to_string(group.cache_blocks_per_lcm_block));
  }
}

void ValidateRetention(const CacheGroupConfig& group) {
  if (group.IsState() && group.IsSliding()) {
    Refuse(group, "family State cannot have retention SlidingWindow");
  }
  if (group.IsSliding() && group.sliding_window_tokens.value_or(0) <= 0) {
    Refuse(group, "retention SlidingWindow needs sliding_window_tokens > 0");
  }
  if (group.replayable && !group.IsSliding()) {
    Refuse(group, "replayable needs family History and retention SlidingWindow");
  }
}

}  // namespace

int64_t CacheGroupConfig::LookbackBlocks() const {
  if (IsPrefixClosed()) {
    return 0;
  }
  if (IsState()) {
    return 1;
  }
  const int64_t window = sliding_window_tokens.value_or(0);
  return (window - 1 + block_granularity - 1) / block_granularity;
}

void CacheGroupConfig::Validate() const {
  ValidateId("cache group: group_id", group_id);
  if (block_granularity <= 0) {
    Refuse(*this, "block_granularity must be > 0, got " + std::to_string(block_granularity));
  }
  ValidatePacking(*this);
  ValidateRetention(*this);
}

}  // namespace tokenspeed
