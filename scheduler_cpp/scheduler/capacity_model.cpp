#include "scheduler/capacity_model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler/prefill_chunk.h"

namespace tokenspeed {
namespace {

constexpr int64_t CeilDiv(int64_t value, int64_t divisor) {
  // Written without value + divisor - 1, which would overflow for limits near the top of the range.
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// A batch of absurd size must be refused, not wrapped.
int64_t PerRow(int64_t rows, int64_t pages) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
  int64_t product = 0;
  if (__builtin_mul_overflow(rows, pages, &product) || product > kMost) {
    throw std::invalid_argument("max_batch_size " + std::to_string(rows) +
                                " needs more blocks than a 64-bit count can hold");
  }
  return product;
}

void RequireTokenCount(const char* name, int64_t tokens) {
  // A quarter of the range leaves room for the few terms that the formulas add.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
  if (tokens < 0 || tokens > kMost) {
    throw std::invalid_argument(std::string(name) + " must be in [0, " + std::to_string(kMost) + "], got " +
                                std::to_string(tokens));
  }
}

}  // namespace

CapacityModel::CapacityModel(SchedulerConfig config) : config_(std::move(config)) {
  config_.ValidateCapacityInputs();
}

int64_t CapacityModel::StatePrefillPeak(const CacheGroupConfig& group, int64_t prompt) const {
  const int64_t granularity = group.block_granularity;
  const int64_t identity = config_.prefix_granularity;
  const int64_t chunk = config_.max_scheduled_tokens;
  const int64_t decode = config_.decode_input_tokens + config_.OverlapProtectedTokens();
  const int64_t growth = config_.DecodesHere() ? std::max(granularity, decode) : 0;
  // The unaligned rest of the prompt that a last chunk adds past the checkpoint inside it.
  const auto tail = [&](int64_t computed) {
    return std::max<int64_t>(0, std::min({identity - 1, chunk - identity, prompt - computed}));
  };
  const auto outputs = [&](int64_t tokens) { return 1 + CeilDiv(tokens + growth, granularity); };

  const int64_t input = group.LookbackBlocks();
  const int64_t first = (config_.disable_prefix_cache ? 0 : input) + outputs(tail(identity));
  const int64_t later = prompt > chunk ? input + outputs(tail(2 * identity)) : 0;
  return std::max(first, later);
}

int64_t CapacityModel::SlidingPrefillPeak(const CacheGroupConfig& group, int64_t prompt, int64_t chunk) const {
  const int64_t granularity = group.block_granularity;
  const int64_t decode =
      config_.DecodesHere() ? config_.decode_input_tokens + config_.OverlapProtectedTokens() : 0;
  const int64_t whole = CeilDiv(std::min(prompt, chunk) + decode, granularity);
  if (prompt <= chunk) {
    return whole;
  }
  // Chunks that end inside a block make a window and its chunk touch one block more than their lengths suggest.
  const bool chunks_end_on_blocks = chunk % granularity == 0;
  const int64_t window = std::min<int64_t>(group.sliding_window_tokens.value_or(1) - 1, prompt);
  const auto behind_window = [&](int64_t tokens) {
    return chunks_end_on_blocks ? group.LookbackBlocks() + CeilDiv(tokens, granularity)
                                : CeilDiv(window + tokens + granularity - 1, granularity);
  };
  const int64_t middle = behind_window(chunk);
  // The last chunk follows another one, or a prefix hit of one page or more.
  const int64_t before_last = std::min<int64_t>(chunk, config_.prefix_granularity);
  const int64_t last = behind_window(std::min(prompt - before_last, chunk) + decode);
  return std::max({whole, middle, last});
}

int64_t CapacityModel::WindowPages(const CacheGroupConfig& group, int64_t seen_tokens) const {
  const int64_t decode = config_.decode_input_tokens + config_.OverlapProtectedTokens();
  // A window may begin anywhere inside a block, hence the granularity less one.
  return CeilDiv(seen_tokens + decode + group.block_granularity - 1, group.block_granularity);
}

int64_t CapacityModel::SlidingLandingPages(const CacheGroupConfig& group, int64_t seen_tokens, int64_t prompt) const {
  const int64_t smallest_chunk = std::max<int64_t>(PrefillChunkRules::For(config_).MinChunkTokens(), 1);
  return std::max(group.LookbackBlocks() + WindowPages(group, seen_tokens),
                  SlidingPrefillPeak(group, prompt, smallest_chunk));
}

int64_t CapacityModel::LongestPrompt(int64_t token_limit) const {
  // A prefill worker accepts prompts of the whole limit, since they need no room to decode.
  return config_.DecodesHere() ? std::max<int64_t>(token_limit - config_.decode_input_tokens, 0) : token_limit;
}

int64_t CapacityModel::SinglePages(const CacheGroupConfig& group, int64_t token_limit) const {
  const int64_t dense = CeilDiv(token_limit + config_.OverlapProtectedTokens(), group.block_granularity);
  if (group.IsPrefixClosed()) {
    return dense;
  }
  const bool decode_role = config_.role == SchedulerConfig::Role::kDecode;
  const int64_t prompt = LongestPrompt(token_limit);
  if (group.IsState()) {
    if (token_limit == 0) {
      return 0;
    }
    const int64_t peak = StatePrefillPeak(group, prompt);
    return decode_role ? std::max<int64_t>(2, peak) : peak;
  }
  if (decode_role) {
    const int64_t window = group.sliding_window_tokens.value_or(0);
    return std::min(dense, SlidingLandingPages(group, window - 1, prompt));
  }
  return SlidingPrefillPeak(group, prompt, config_.max_scheduled_tokens);
}

std::vector<int64_t> CapacityModel::SingleRequestGroupPages(int64_t token_limit) const {
  RequireTokenCount("token_limit", token_limit);
  std::vector<int64_t> pages;
  pages.reserve(NumGroups());
  for (const CacheGroupConfig& group : config_.cache_groups) {
    pages.push_back(SinglePages(group, token_limit));
  }
  return pages;
}

int64_t CapacityModel::ConcurrentPages(const CacheGroupConfig& group, int64_t max_total_tokens,
                                            int64_t max_context_len) const {
  const int64_t rows = config_.max_batch_size;
  const int64_t granularity = group.block_granularity;
  if (group.IsState()) {
    return PerRow(rows, SinglePages(group, max_context_len));
  }
  const int64_t dense =
      CeilDiv(max_total_tokens, granularity) +
      PerRow(rows, CeilDiv(granularity - 1 + config_.OverlapProtectedTokens(), granularity));
  if (group.IsPrefixClosed()) {
    return dense;
  }
  const int64_t window = group.sliding_window_tokens.value_or(0);
  const int64_t lookback = group.LookbackBlocks();
  const int64_t per_row = WindowPages(group, std::min(window - 1, max_context_len));
  if (config_.role == SchedulerConfig::Role::kDecode) {
    const int64_t landing = SlidingLandingPages(group, std::min(window - 1, max_context_len),
                                                LongestPrompt(max_context_len));
    return std::min(dense, PerRow(rows, landing));
  }
  const int64_t chunk = std::min<int64_t>(config_.max_scheduled_tokens, max_total_tokens);
  return PerRow(rows, per_row) + lookback + CeilDiv(chunk, granularity);
}

std::vector<int64_t> CapacityModel::ConcurrentGroupPages(int64_t max_total_tokens,
                                                              int64_t max_context_len) const {
  RequireTokenCount("max_total_tokens", max_total_tokens);
  RequireTokenCount("max_context_len", max_context_len);
  std::vector<int64_t> pages;
  pages.reserve(NumGroups());
  for (const CacheGroupConfig& group : config_.cache_groups) {
    pages.push_back(ConcurrentPages(group, max_total_tokens, max_context_len));
  }
  return pages;
}

int64_t CapacityModel::LcmBlocksNeededFor(std::span<const int64_t> group_pages) const {
  if (group_pages.size() != NumGroups()) {
    throw std::invalid_argument("group_pages must have one count per cache group: expected " +
                                std::to_string(NumGroups()) + ", got " + std::to_string(group_pages.size()));
  }
  int64_t parents = 0;
  for (std::size_t index = 0; index < group_pages.size(); ++index) {
    if (group_pages[index] < 0) {
      throw std::invalid_argument("group_pages must not be negative, got " + std::to_string(group_pages[index]));
    }
    const int64_t packing = config_.cache_groups[index].cache_blocks_per_lcm_block;
    if (__builtin_add_overflow(parents, CeilDiv(group_pages[index], packing), &parents)) {
      throw std::invalid_argument("group_pages need more parents than a 64-bit count can hold");
    }
  }
  return parents;
}

int32_t CapacityModel::MaxSingleRequestTokens(int64_t usable_lcm_blocks) const {
  if (usable_lcm_blocks < 0) {
    throw std::invalid_argument("usable_lcm_blocks must be >= 0, got " + std::to_string(usable_lcm_blocks));
  }
  int64_t low = 0;
  int64_t high = std::numeric_limits<int32_t>::max();
  // SinglePages(0) may exceed a tiny pool through overlap protection; such a pool runs nothing, answer 0.
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (LcmBlocksNeededFor(SingleRequestGroupPages(middle)) <= usable_lcm_blocks) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return static_cast<int32_t>(low);
}

}  // namespace tokenspeed
