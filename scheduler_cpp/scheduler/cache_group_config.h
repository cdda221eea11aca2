// What one cache group looks like to the scheduler: how many tokens a slot of its block table covers,
// how long a slot stays readable and how densely its storage is packed. Nothing here says what is stored.

#ifndef TOKENSPEED_SCHEDULER_CACHE_GROUP_CONFIG_H_
#define TOKENSPEED_SCHEDULER_CACHE_GROUP_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

namespace tokenspeed {

enum class CacheRetention { kFullHistory, kSlidingWindow };
enum class CacheGroupFamily { kHistory, kState };
enum class CacheTransferPolicy { kUnspecified, kFullSuffix, kLatestSnapshot };

struct CacheGroupConfig {
  std::string group_id;
  int32_t block_granularity = 0;  // tokens per block-table slot
  int32_t total_pages = 0;        // ids, the null id included
  CacheRetention retention = CacheRetention::kFullHistory;
  std::optional<int32_t> sliding_window_tokens = std::nullopt;
  CacheGroupFamily family = CacheGroupFamily::kHistory;
  int32_t cache_blocks_per_lcm_block = 1;
  CacheTransferPolicy transfer_policy = CacheTransferPolicy::kUnspecified;
  int32_t shard_count = 1;
  bool replayable = false;

  [[nodiscard]] bool IsState() const { return family == CacheGroupFamily::kState; }
  [[nodiscard]] bool IsSliding() const { return retention == CacheRetention::kSlidingWindow; }
  // A closed group that holds a boundary also holds every shorter one.
  [[nodiscard]] bool IsPrefixClosed() const { return !IsState() && !IsSliding(); }
  // Slots that must be present just below a boundary to resume there; 0 for closed groups.
  [[nodiscard]] int64_t LookbackBlocks() const;

  // Checks everything that can be known of one group alone. Throws std::invalid_argument.
  void Validate() const;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_CACHE_GROUP_CONFIG_H_
