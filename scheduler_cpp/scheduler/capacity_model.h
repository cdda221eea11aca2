// How much storage a workload needs, in opaque counts: the one place where token limits become block
// and parent demands before any pool exists.

#ifndef TOKENSPEED_SCHEDULER_CAPACITY_MODEL_H_
#define TOKENSPEED_SCHEDULER_CAPACITY_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/scheduler_config.h"

namespace tokenspeed {

class CapacityModel {
 public:
  // Throws std::invalid_argument when the capacity inputs are bad. Page counts are not looked at.
  explicit CapacityModel(SchedulerConfig config);

  [[nodiscard]] std::size_t NumGroups() const { return config_.cache_groups.size(); }

  // Most blocks of each group that a request of at most `token_limit` tokens holds at any time.
  [[nodiscard]] std::vector<int64_t> SingleRequestGroupPages(int64_t token_limit) const;

  // Blocks of each group that let max_batch_size requests of at most `max_context_len` tokens, together
  // at most `max_total_tokens`, run side by side.
  [[nodiscard]] std::vector<int64_t> ConcurrentGroupPages(int64_t max_total_tokens,
                                                               int64_t max_context_len) const;

  // Parents that hold these block counts; one count per group.
  [[nodiscard]] int64_t LcmBlocksNeededFor(std::span<const int64_t> group_pages) const;

  // Longest request, in tokens, that fits `usable_lcm_blocks` parents on its own.
  [[nodiscard]] int32_t MaxSingleRequestTokens(int64_t usable_lcm_blocks) const;

 private:
  [[nodiscard]] int64_t SinglePages(const CacheGroupConfig& group, int64_t token_limit) const;
  [[nodiscard]] int64_t StatePrefillPeak(const CacheGroupConfig& group, int64_t prompt) const;
  // When `prompt` tokens are prefilled here in chunks of at most `chunk`.
  [[nodiscard]] int64_t SlidingPrefillPeak(const CacheGroupConfig& group, int64_t prompt, int64_t chunk) const;
  // Role D: what a request takes while it decodes behind a landing, or recovers here in the smallest chunks.
  [[nodiscard]] int64_t SlidingLandingPages(const CacheGroupConfig& group, int64_t seen_tokens, int64_t prompt) const;
  // Tokens of a request of at most `token_limit` that are prefilled before its first decode step.
  [[nodiscard]] int64_t LongestPrompt(int64_t token_limit) const;
  [[nodiscard]] int64_t WindowPages(const CacheGroupConfig& group, int64_t seen_tokens) const;
  [[nodiscard]] int64_t ConcurrentPages(const CacheGroupConfig& group, int64_t max_total_tokens,
                                             int64_t max_context_len) const;

  SchedulerConfig config_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_CAPACITY_MODEL_H_
