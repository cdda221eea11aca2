// The external store below the host tier: which of its keys are known, and which are worth asking it about.

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

std::vector<CacheKey> Scheduler::ParseStorageKeys(const PrefixKeys& keys) const {
  const std::size_t count = keys.group_ids.size();
  if (keys.content_hashes.size() != count || keys.page_offsets.size() != count) {
    throw std::invalid_argument("group_ids, content_hashes and page_offsets must have the same length, got " +
                                std::to_string(count) + ", " + std::to_string(keys.content_hashes.size()) + " and " +
                                std::to_string(keys.page_offsets.size()));
  }
  std::vector<CacheKey> parsed;
  parsed.reserve(count);
  for (std::size_t index = 0; index < count; ++index) {
    const auto group = static_cast<int32_t>(GroupIndex(keys.group_ids[index]));
    const std::optional<PrefixHash> hash = PrefixHash::FromHex(keys.content_hashes[index]);
    if (!hash.has_value()) {
      throw std::invalid_argument("content_hashes[" + std::to_string(index) +
                                  "] must be 64 lowercase hexadecimal characters, got '" + keys.content_hashes[index] +
                                  "'");
    }
    const int32_t offset = keys.page_offsets[index];
    const int32_t bound = coordinator_.group(group).geometry().BlocksPerPrefixPage();
    if (offset < 0 || offset >= bound) {
      throw std::invalid_argument("page_offsets[" + std::to_string(index) + "] of group '" + keys.group_ids[index] +
                                  "' must be in [0, " + std::to_string(bound) + "), got " + std::to_string(offset));
    }
    parsed.push_back({.content_hash = *hash, .namespace_id = 0, .group_id = group, .page_offset = offset});
  }
  return parsed;
}

void Scheduler::RegisterStorageKeys(const PrefixKeys& keys) {
  coordinator_.RegisterStorageKeys(ParseStorageKeys(keys));
}

void Scheduler::UnregisterStorageKeys(const PrefixKeys& keys) {
  coordinator_.UnregisterStorageKeys(ParseStorageKeys(keys));
}

std::vector<std::string> Scheduler::WaitingPrefixHashes() {
  std::vector<std::string> texts;
  if (!config_.enable_l3_storage) return texts;
  std::unordered_set<std::string> seen;
  const auto append = [&](Request& request) {
    const int32_t pages = (request.prefill_size() - 1) / config_.prefix_granularity;
    for (const PrefixHash& hash : request.PrefixHashes(config_.prefix_granularity, pages)) {
      if (std::string text = hash.ToHex(); seen.insert(text).second) texts.push_back(std::move(text));
    }
  };
  auto free_slots = config_.max_batch_size - static_cast<int64_t>(book_.resident().size());
  if (!book_.readmissions().empty()) {
    append(*book_.readmissions().begin()->second);
    --free_slots;
  }
  const bool obtainable =
      EmptyLcmBlocks() > 0 || coordinator_.device_pool().NumLcmBlocks() > ActiveLcmBlocks();
  if (book_.Count(RequestState::kPrefilling) > 0 || !obtainable) return texts;
  for (const auto& [rank, request] : book_.waiting()) {
    if (free_slots <= 0) break;
    if (request->IsReadmission()) continue;
    // A new prompt that looks nothing up has no use for an answer.
    if (config_.disable_prefix_cache && request->state() != RequestState::kRetracted) continue;
    if (request->MustFeedWholePrompt()) continue;
    append(*request);
    --free_slots;
  }
  return texts;
}

}  // namespace tokenspeed
