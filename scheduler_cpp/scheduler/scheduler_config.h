// The complete configuration of one scheduler, and the two levels at which it is checked.

#ifndef TOKENSPEED_SCHEDULER_SCHEDULER_CONFIG_H_
#define TOKENSPEED_SCHEDULER_SCHEDULER_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/cache_group_config.h"

namespace tokenspeed {

// Salts and weight versions are names, and every request keeps its own; longer ones are a mistake.
inline constexpr std::size_t kMaxChainKeyBytes = 65536;

// Throws std::invalid_argument naming `field` for a salt or version that is too long.
void ValidateChainKey(const std::string& field, const std::string& value);

struct SchedulerConfig {
  enum class Role { kPrefill, kDecode, kFused };

  int32_t prefix_granularity = 0;    // tokens
  int32_t max_scheduled_tokens = 0;  // token budget of a round, also the longest chunk
  int32_t max_batch_size = 0;        // rows of a batch, and request-pool slots
  int32_t decode_input_tokens = 1;   // tokens one decode step feeds per request
  int32_t overlap_schedule_depth = 0;
  Role role = Role::kFused;
  int32_t num_device_pages = 0;  // parents, the reserved id 0 included
  int32_t num_host_pages = 0;    // parents, the reserved id 0 included
  std::vector<CacheGroupConfig> cache_groups;
  bool disable_l2_cache = false;
  bool enable_l3_storage = false;
  bool enable_kv_cache_events = false;
  bool enable_mixed_prefill_decode = false;
  bool disable_prefix_cache = false;
  int32_t prefix_replay_tokens = 0;
  // Whether a prompt also takes over, by copying, what an ended request has left of the prefix page in which the two part.
  // Needs role Fused and groups that keep rows and are matched.
  bool reuse_partial_pages = false;
  // Rounds in which a waiting request that does not fit may be passed by those behind it, before it holds the line.
  int32_t max_overtaken_rounds = 64;
  // Whether plans carry their rows' block tables. Without, only the resident tables are there to be read, and a plan costs
  // what changed rather than what its rows hold.
  bool dense_block_tables = true;
  // Whether a request is decoded on while the result that completes its declared output has not landed. A caller that ends
  // requests there saves that step without.
  bool plan_past_max_new_tokens = true;
  // Stored boundaries that may wait for a drain of the residency events; more are not reported, but counted.
  int32_t max_kv_events = 16384;
  std::string weight_version = {};  // prefixes are shared only between requests submitted under the same version

  [[nodiscard]] bool HasHostCache() const { return !disable_l2_cache && num_host_pages > 1; }
  // Whether requests are decoded on this worker; a prefill worker hands them on.
  [[nodiscard]] bool DecodesHere() const { return role != Role::kPrefill; }
  // Whether what the device caches is copied to the host as it goes; a decode worker copies retracted requests alone.
  [[nodiscard]] bool StreamsDeviceCacheToHost() const { return HasHostCache() && role != Role::kDecode; }
  [[nodiscard]] bool HasStateGroup() const;
  // Largest window over the replayable groups, tokens; 0 without one.
  [[nodiscard]] int64_t ReplayWindow() const;
  // Tokens a running request may still take for a step that is planned ahead of its landing.
  [[nodiscard]] int64_t OverlapProtectedTokens() const;

  // What sizing a pool depends on; looks at no page count. Throws std::invalid_argument.
  void ValidateCapacityInputs() const;
  // Everything a scheduler needs, capacity inputs included. Throws std::invalid_argument.
  void Validate() const;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_SCHEDULER_CONFIG_H_
