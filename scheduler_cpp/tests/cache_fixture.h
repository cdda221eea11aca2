// Short ways to build what cache tests need: specs, prompts' hashes, and readable table contents.

#ifndef TOKENSPEED_TESTS_CACHE_FIXTURE_H_
#define TOKENSPEED_TESTS_CACHE_FIXTURE_H_

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "coordinator/cache_coordinator.h"

namespace tokenspeed::testing {

inline CacheGroupSpec Full(int32_t granularity, int32_t packing = 1, int32_t shards = 1) {
  return {.kind = CacheGroupKind::kFullAttention,
          .block_granularity = granularity,
          .cache_blocks_per_lcm_block = packing,
          .shard_count = shards,
          .sliding_window_tokens = 0};
}

inline CacheGroupSpec Window(int32_t tokens, int32_t granularity, int32_t packing = 1, int32_t shards = 1) {
  CacheGroupSpec spec = Full(granularity, packing, shards);
  spec.kind = CacheGroupKind::kSlidingWindow;
  spec.sliding_window_tokens = tokens;
  return spec;
}

inline CacheGroupSpec Replayable(int32_t tokens, int32_t granularity) {
  CacheGroupSpec spec = Window(tokens, granularity);
  spec.replayable = true;
  return spec;
}

inline CacheGroupSpec State(int32_t granularity, int32_t packing = 1) {
  CacheGroupSpec spec = Full(granularity, packing);
  spec.kind = CacheGroupKind::kRecurrentState;
  return spec;
}

// Hashes of a prompt of its own, different for each `prompt`.
inline std::vector<PrefixHash> Hashes(int32_t prompt, int32_t pages) {
  std::vector<PrefixHash> hashes;
  for (int32_t page = 0; page < pages; ++page) {
    const std::vector<int32_t> tokens = {prompt, page};
    hashes.push_back(HashPrefixPage(tokens, std::nullopt));
  }
  return hashes;
}

inline TokenDemand Dense(int32_t tokens, int32_t reserve = 0) {
  return {.extent = DenseGrowth{tokens}, .reserve_tokens = reserve};
}

inline TokenDemand Sparse(int32_t extent, int32_t first_block, int32_t reserve = 0) {
  return {.extent = SparseSuffix{extent, first_block}, .reserve_tokens = reserve};
}

inline RequestProgress Frontier(int32_t num_computed_tokens) {
  return {.completed_pages = std::nullopt, .num_computed_tokens = num_computed_tokens};
}

inline RequestProgress Completed(std::span<const PrefixHash> hashes, int32_t first_new, BoundaryKind kind,
                                 int32_t num_computed_tokens, std::span<const int32_t> state_boundaries = {}) {
  RequestProgress progress = Frontier(num_computed_tokens);
  progress.completed_pages = CompletedPages{.prefix_hashes = hashes,
                                            .first_new_prefix_page = first_new,
                                            .boundary_kind = kind,
                                            .state_boundary_kind = std::nullopt,
                                            .materialized_state_boundaries = state_boundaries};
  return progress;
}

// Block ids, 0 for holes.
inline std::vector<int32_t> Ids(const CacheCoordinator& cache, int32_t group, std::span<const BlockTable> tables) {
  return cache.group(group).allocator().BlockIds(tables[group]);
}

// 1 where a slot holds a block.
inline std::vector<int32_t> Held(const BlockTable& table) {
  std::vector<int32_t> held;
  for (const CacheBlockRef& block : table.blocks) held.push_back(block ? 1 : 0);
  return held;
}

inline int32_t NumHoles(const BlockTable& table) {
  const std::vector<int32_t> held = Held(table);
  return static_cast<int32_t>(held.size()) - std::accumulate(held.begin(), held.end(), 0);
}

}  // namespace tokenspeed::testing

#endif  // TOKENSPEED_TESTS_CACHE_FIXTURE_H_
