// CacheGroupSpec: what the cache needs to know about one group. CacheGroupKind: how the group retains its contents.
//
// Invariants (checked by CacheCoordinator, guaranteed to it by the configuration's validation):
// block_granularity > 0 and divides the prefix granularity; cache_blocks_per_lcm_block > 0 and a multiple of
// shard_count > 0; a sliding window has sliding_window_tokens > 0; only a sliding window is replayable.
// Thread safety: values.

#ifndef TOKENSPEED_COORDINATOR_CACHE_GROUP_SPEC_H_
#define TOKENSPEED_COORDINATOR_CACHE_GROUP_SPEC_H_

#include <cstdint>

namespace tokenspeed {

enum class CacheGroupKind : uint8_t {
  kFullAttention,   // every row is kept; closed: a valid boundary makes every shorter one valid
  kSlidingWindow,   // rows older than the window expire
  kRecurrentState,  // each block is one snapshot of everything before it; matched and retained as a window of 2 tokens
};

struct CacheGroupSpec {
  CacheGroupKind kind = CacheGroupKind::kFullAttention;
  int32_t block_granularity = 0;            // tokens per block-table slot
  int32_t cache_blocks_per_lcm_block = 1;   // children per parent
  int32_t shard_count = 1;                  // cyclic owners of the group's blocks
  int32_t sliding_window_tokens = 0;        // only for kSlidingWindow
  // Its rows come back by feeding the tokens of a whole window again, so they are never matched nor published.
  bool replayable = false;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_CACHE_GROUP_SPEC_H_
