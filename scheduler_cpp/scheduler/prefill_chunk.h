// How long the next piece of a prompt is. Pure arithmetic on tokens; nothing here looks at storage.

#ifndef TOKENSPEED_SCHEDULER_PREFILL_CHUNK_H_
#define TOKENSPEED_SCHEDULER_PREFILL_CHUNK_H_

#include <cstdint>

#include "scheduler/scheduler_config.h"

namespace tokenspeed {

// Longest chunk of `unscheduled` tokens that starts at `first` and fits `budget`, ending on a multiple of
// `prefix_granularity` unless it completes the prompt. A `promotion_boundary` beyond `first` is an upper end.
// 0 when no such chunk exists.
int64_t AlignPrefillChunk(int64_t first, int64_t unscheduled, int64_t budget,
                               int64_t prefix_granularity, int64_t promotion_boundary);

// Shortens `chunk` so that what remains is either nothing or at least one whole replay window.
int64_t ChunkKeepingFinalWindow(int64_t chunk, int64_t unscheduled, int64_t replay_window);

// First token count at which a chunk from `before` to `after` tokens leaves a snapshot: the last boundary inside it, or
// its end when it crosses none. The end always gets one as well, and nothing in between does.
int64_t FirstSnapshotTokens(int64_t before, int64_t after, int64_t prefix_granularity);

struct PrefillChunkRules {
  int64_t prefix_granularity = 1;
  int64_t replay_window = 0;
  bool has_state_group = false;

  static PrefillChunkRules For(const SchedulerConfig& config);

  // Tokens fed again below a hit of `prefix` tokens.
  [[nodiscard]] int64_t ReplayTokens(int64_t prefix) const;

  // New tokens of the next chunk; 0 when the budget allows no progress. `promotion_boundary` 0 means none.
  [[nodiscard]] int64_t ChunkTokens(int64_t first, bool resumes_hit, int64_t unscheduled,
                                         int64_t budget, int64_t promotion_boundary) const;

  // Budget that a prefill needs to be sure to move.
  [[nodiscard]] int64_t MinChunkTokens() const;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_PREFILL_CHUNK_H_
