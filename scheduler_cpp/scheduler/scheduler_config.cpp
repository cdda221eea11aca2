#include "scheduler/scheduler_config.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace tokenspeed {
namespace {

// A pool keeps a record per parent from the start. No device has this many; a slip of the pen may.
constexpr int32_t kMaxLcmBlocks = 1 << 26;
// Each request-pool slot has a row in every group's table grid.
constexpr int32_t kMaxBatchSize = 1 << 16;

[[noreturn]] void Refuse(const std::string& complaint) { throw std::invalid_argument(complaint); }

void RequireAtLeast(const char* field, int64_t value, int64_t least) {
  if (value < least) {
    Refuse(std::string(field) + " must be >= " + std::to_string(least) + ", got " + std::to_string(value));
  }
}

// Ids of a group's blocks, the null id included.
void RequireIds(const char* field, int32_t num_pages, const CacheGroupConfig& group) {
  const int64_t ids = (int64_t{num_pages} - 1) * group.cache_blocks_per_lcm_block + 1;
  if (ids > std::numeric_limits<int32_t>::max()) {
    Refuse("cache group '" + group.group_id + "': " + field + " x cache_blocks_per_lcm_block needs " +
           std::to_string(ids) + " ids, more than 32 bits hold");
  }
}

void RequireAtMost(const char* field, int64_t value, int64_t most) {
  if (value > most) {
    Refuse(std::string(field) + " must be <= " + std::to_string(most) + ", got " + std::to_string(value));
  }
}

void ValidateSteps(const SchedulerConfig& config) {
  RequireAtLeast("prefix_granularity", config.prefix_granularity, 1);
  RequireAtLeast("max_scheduled_tokens", config.max_scheduled_tokens, 1);
  RequireAtLeast("max_batch_size", config.max_batch_size, 0);
  RequireAtLeast("decode_input_tokens", config.decode_input_tokens, 0);
  if (config.overlap_schedule_depth < 0 || config.overlap_schedule_depth > 1) {
    Refuse("overlap_schedule_depth must be 0 or 1, got " + std::to_string(config.overlap_schedule_depth));
  }
  if (config.overlap_schedule_depth == 1 && config.decode_input_tokens == 0) {
    Refuse("overlap_schedule_depth 1 needs decode_input_tokens > 0");
  }
}

void ValidateTransferPolicy(const CacheGroupConfig& group) {
  const CacheTransferPolicy wanted =
      group.IsState() ? CacheTransferPolicy::kLatestSnapshot : CacheTransferPolicy::kFullSuffix;
  if (group.transfer_policy != wanted) {
    Refuse("cache group '" + group.group_id + "': transfer_policy must be " +
           (group.IsState() ? "LatestSnapshot" : "FullSuffix") + " on roles P and D");
  }
}

void ValidateGroups(const SchedulerConfig& config) {
  if (config.cache_groups.empty()) {
    Refuse("cache_groups must name at least one group");
  }
  std::unordered_set<std::string> seen;
  for (const CacheGroupConfig& group : config.cache_groups) {
    group.Validate();
    if (config.prefix_granularity % group.block_granularity != 0) {
      Refuse("cache group '" + group.group_id + "': block_granularity " +
             std::to_string(group.block_granularity) + " does not divide prefix_granularity " +
             std::to_string(config.prefix_granularity));
    }
    if (!seen.insert(group.group_id).second) {
      Refuse("cache_groups: group_id '" + group.group_id + "' occurs twice");
    }
    if (config.role != SchedulerConfig::Role::kFused) {
      ValidateTransferPolicy(group);
    }
  }
}

void ValidatePartialPages(const SchedulerConfig& config) {
  if (!config.reuse_partial_pages) {
    return;
  }
  if (config.role != SchedulerConfig::Role::kFused) {
    Refuse("reuse_partial_pages needs role Fused: a peer's transfer starts at a prefix page");
  }
  if (config.disable_prefix_cache) {
    Refuse("reuse_partial_pages needs disable_prefix_cache False");
  }
  for (const CacheGroupConfig& group : config.cache_groups) {
    if (group.IsState()) {
      Refuse("reuse_partial_pages: cache group '" + group.group_id + "' has family State, no snapshot inside a page");
    }
    if (group.replayable) {
      Refuse("reuse_partial_pages: cache group '" + group.group_id + "' is replayable, so none of its rows are kept");
    }
  }
}

}  // namespace

void ValidateChainKey(const std::string& field, const std::string& value) {
  if (value.size() > kMaxChainKeyBytes) {
    Refuse(field + " must have at most " + std::to_string(kMaxChainKeyBytes) + " bytes, got " +
           std::to_string(value.size()));
  }
}

bool SchedulerConfig::HasStateGroup() const {
  return std::any_of(cache_groups.begin(), cache_groups.end(),
                     [](const CacheGroupConfig& group) { return group.IsState(); });
}

int64_t SchedulerConfig::ReplayWindow() const {
  int64_t window = 0;
  for (const CacheGroupConfig& group : cache_groups) {
    if (group.replayable) {
      window = std::max<int64_t>(window, group.sliding_window_tokens.value_or(0));
    }
  }
  return window;
}

int64_t SchedulerConfig::OverlapProtectedTokens() const {
  return DecodesHere() ? int64_t{overlap_schedule_depth} * decode_input_tokens : 0;
}

void SchedulerConfig::ValidateCapacityInputs() const {
  ValidateSteps(*this);
  ValidateGroups(*this);
  if (HasStateGroup() && max_scheduled_tokens < prefix_granularity) {
    Refuse("max_scheduled_tokens " + std::to_string(max_scheduled_tokens) +
           " must be at least prefix_granularity " + std::to_string(prefix_granularity) +
           " when a State group exists");
  }
  const int64_t replay = ReplayWindow();
  if (replay == 0) {
    return;
  }
  if (HasStateGroup()) {
    Refuse("replayable groups cannot stand beside State groups");
  }
  const int64_t least = replay + std::max<int64_t>(replay, prefix_granularity);
  if (max_scheduled_tokens < least) {
    Refuse("max_scheduled_tokens must be at least " + std::to_string(least) +
           " for a replayable window of " + std::to_string(replay) + " tokens, got " +
           std::to_string(max_scheduled_tokens));
  }
}

void SchedulerConfig::Validate() const {
  ValidateCapacityInputs();
  if (num_device_pages <= 1) {
    Refuse("num_device_pages must be > 1: the device cache needs a usable parent beside the reserved id 0, got " +
           std::to_string(num_device_pages));
  }
  RequireAtMost("num_device_pages", num_device_pages, kMaxLcmBlocks);
  RequireAtLeast("max_batch_size", max_batch_size, 1);
  RequireAtMost("max_batch_size", max_batch_size, kMaxBatchSize);
  if (DecodesHere()) {
    RequireAtLeast("decode_input_tokens", decode_input_tokens, 1);
  }
  if (role == Role::kFused) {
    // No decode step would ever fit a round. A decode worker's steps take no budget.
    RequireAtMost("decode_input_tokens", decode_input_tokens, max_scheduled_tokens);
  }
  RequireAtLeast("num_host_pages", num_host_pages, 0);
  RequireAtMost("num_host_pages", num_host_pages, kMaxLcmBlocks);
  for (const CacheGroupConfig& group : cache_groups) {
    RequireIds("num_device_pages", num_device_pages, group);
    RequireIds("num_host_pages", num_host_pages, group);
    if (group.total_pages < 1) {
      Refuse("cache group '" + group.group_id + "': total_pages must be >= 1, got " +
             std::to_string(group.total_pages));
    }
  }
  RequireAtLeast("prefix_replay_tokens", prefix_replay_tokens, 0);
  RequireAtLeast("max_overtaken_rounds", max_overtaken_rounds, 0);
  RequireAtLeast("max_kv_events", max_kv_events, 1);
  ValidateChainKey("weight_version", weight_version);
  ValidatePartialPages(*this);
  if (!enable_l3_storage) {
    return;
  }
  if (!HasHostCache()) {
    Refuse("enable_l3_storage needs a host cache: num_host_pages > 1 and disable_l2_cache False");
  }
  for (const CacheGroupConfig& group : cache_groups) {
    if (group.shard_count > 1) {
      Refuse("cache group '" + group.group_id + "': enable_l3_storage needs shard_count 1, got " +
             std::to_string(group.shard_count));
    }
  }
}

}  // namespace tokenspeed
