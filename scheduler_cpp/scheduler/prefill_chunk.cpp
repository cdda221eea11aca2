#include "scheduler/prefill_chunk.h"

#include <algorithm>

namespace tokenspeed {

int64_t AlignPrefillChunk(int64_t first, int64_t unscheduled, int64_t budget,
                               int64_t prefix_granularity, int64_t promotion_boundary) {
  int64_t chunk = std::min(unscheduled, budget);
  if (promotion_boundary > first) {
    chunk = std::min(chunk, promotion_boundary - first);
  }
  if (chunk == unscheduled) {
    return chunk;
  }
  const int64_t past_boundary = first % prefix_granularity;
  if (past_boundary != 0) {
    const int64_t to_boundary = prefix_granularity - past_boundary;
    return to_boundary <= budget ? to_boundary : 0;
  }
  return chunk - chunk % prefix_granularity;
}

int64_t ChunkKeepingFinalWindow(int64_t chunk, int64_t unscheduled, int64_t replay_window) {
  const int64_t rest = unscheduled - chunk;
  if (replay_window == 0 || rest == 0 || rest >= replay_window) {
    return chunk;
  }
  return std::max<int64_t>(0, unscheduled - replay_window);
}

int64_t FirstSnapshotTokens(int64_t before, int64_t after, int64_t prefix_granularity) {
  const int64_t boundary = after - after % prefix_granularity;
  return boundary > before ? boundary : after;
}

PrefillChunkRules PrefillChunkRules::For(const SchedulerConfig& config) {
  return PrefillChunkRules{.prefix_granularity = config.prefix_granularity,
                           .replay_window = config.ReplayWindow(),
                           .has_state_group = config.HasStateGroup()};
}

int64_t PrefillChunkRules::ReplayTokens(int64_t prefix) const { return std::min(replay_window, prefix); }

int64_t PrefillChunkRules::ChunkTokens(int64_t first, bool resumes_hit, int64_t unscheduled,
                                            int64_t budget, int64_t promotion_boundary) const {
  const int64_t usable = budget - (resumes_hit ? ReplayTokens(first) : 0);
  if (usable <= 0) {
    return 0;
  }
  const int64_t plain = std::min(usable, unscheduled);
  int64_t chunk = plain;
  if (has_state_group || promotion_boundary > 0) {
    chunk = AlignPrefillChunk(first, unscheduled, usable, prefix_granularity, promotion_boundary);
    if (chunk == 0 && has_state_group) {
      return 0;
    }
    if (chunk == 0) {
      // Only snapshots need aligned chunks. A budget below a prefix page must not hold a promotion up, perhaps for
      // ever.
      chunk = promotion_boundary > first ? std::min(plain, promotion_boundary - first) : plain;
    }
  }
  const int64_t kept = ChunkKeepingFinalWindow(chunk, unscheduled, replay_window);
  if (kept > 0 || chunk == plain) {
    return kept;
  }
  // Alignment stopped inside the final window. Waiting for a better end would wait for ever.
  return ChunkKeepingFinalWindow(plain, unscheduled, replay_window);
}

int64_t PrefillChunkRules::MinChunkTokens() const {
  const int64_t for_state = has_state_group ? prefix_granularity : 0;
  const int64_t for_replay =
      replay_window > 0 ? replay_window + std::max(replay_window, prefix_granularity) : 0;
  return std::max(for_state, for_replay);
}

}  // namespace tokenspeed
