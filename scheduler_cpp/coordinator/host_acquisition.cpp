// How an admission gets hold of what the host tier adds to the device's prefix.

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "coordinator/cache_coordinator.h"
#include "core/check.h"

namespace tokenspeed {

ConvergedPrefix CacheCoordinator::ProbeHost(const PrefixProbe& probe, int32_t num_prefix_pages) const {
  const TierProbe tier{.pool = host_pool_, .floor_tokens = probe.device_prefix_tokens(), .stored = storage()};
  return ConvergePrefix(groups_, tier, probe.keys, num_prefix_pages, prefix_granularity_);
}

std::span<const CacheKey> CacheCoordinator::KeysBehindDevice(const PrefixProbe& probe, std::size_t g) const {
  const int32_t first = probe.device_prefix_tokens() / groups_[g].geometry().block_granularity();
  return std::span(probe.keys[g]).subspan(static_cast<std::size_t>(first));
}

std::vector<std::vector<int32_t>> CacheCoordinator::CopiesInBucket(const PrefixProbe& probe) const {
  if (!probe.ExtendsOnHost()) return {};
  std::vector<std::vector<int32_t>> copies(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const int32_t shards = groups_[g].allocator().shard_count();
    if (shards == 1) continue;
    copies[g].resize(static_cast<std::size_t>(shards), 0);
    for (CacheBlockLocation source :
         groups_[g].index().MatchedLocations(host_pool_, KeysBehindDevice(probe, g), probe.host.masks[g])) {
      ++copies[g][static_cast<std::size_t>(source.slot_index % shards)];
    }
  }
  return copies;
}

HostHit CacheCoordinator::AcquireFromHost(const PrefixProbe& probe, uint64_t epoch) {
  ConvergedPrefix prefix = probe.host;
  while (prefix.num_common_tokens > probe.device_prefix_tokens()) {
    HostHit hit{.num_common_tokens = prefix.num_common_tokens, .blocks = {}, .from_storage = {}};
    const std::optional<int32_t> no_room_at = FillHostHit(probe, prefix, epoch, hit);
    if (!no_room_at) return hit;
    hit = HostHit();  // what was pinned may be evicted by the next attempt
    prefix = ProbeHost(probe, *no_room_at / prefix_granularity_);
  }
  return HostHit{.num_common_tokens = probe.device_prefix_tokens(), .blocks = {}, .from_storage = {}};
}

std::optional<int32_t> CacheCoordinator::FillHostHit(const PrefixProbe& probe, const ConvergedPrefix& prefix,
                                                     uint64_t epoch, HostHit& hit) {
  // Everything that is there is pinned first, or else room for the rest might be made of it.
  std::vector<std::tuple<int32_t, std::size_t, std::size_t>> missing;  // token position, group, slot
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::span<const CacheKey> keys = KeysBehindDevice(probe, g);
    PrefixMask present = prefix.masks[g];
    for (std::size_t slot = 0; slot < present.size(); ++slot) {
      if (present[slot] == 0 || HostHas(keys[slot])) continue;
      present[slot] = 0;
      const auto offset = static_cast<int32_t>(slot) * groups_[g].geometry().block_granularity();
      missing.emplace_back(probe.device_prefix_tokens() + offset, g, slot);
    }
    hit.blocks.push_back(groups_[g].index().AcquireMatched(host_pool_, keys, present, epoch));
    hit.from_storage.emplace_back(present.size(), 0);
  }
  if (missing.empty()) return std::nullopt;
  hit.any_from_storage = true;
  // From the prompt's start on in all groups alike: a group that runs ahead would only take room from the others.
  std::sort(missing.begin(), missing.end());
  std::vector<HostBlockWish> wishes;
  for (const auto& [position, g, slot] : missing) wishes.push_back({.group = static_cast<int32_t>(g), .bucket = 0});
  HostAllocation allocation = AllocateOnHost(wishes);
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const auto& [position, g, slot] = missing[i];
    if (!allocation.blocks[i]) return position;
    hit.blocks[g][slot] = std::move(allocation.blocks[i]);
    hit.from_storage[g][slot] = 1;
  }
  return std::nullopt;
}

void CacheCoordinator::AppendHostExtension(const PrefixProbe& probe, const HostHit& hit, std::size_t g,
                                           BlockTable& table, std::vector<LoadPair>& pairs) const {
  if (hit.blocks.empty() || !groups_[g].SharesPrefixes()) return;
  groups_[g].allocator().AppendCopiesOf(table, hit.blocks[g]);
  const std::span<const CacheKey> keys = KeysBehindDevice(probe, g);
  const std::size_t first = table.blocks.size() - hit.blocks[g].size();
  for (std::size_t slot = 0; slot < hit.blocks[g].size(); ++slot) {
    if (!hit.blocks[g][slot]) continue;
    pairs.push_back({.source = hit.blocks[g][slot],
                     .destination = table.blocks[first + slot],
                     // A failed operation publishes nothing, so with anything of it to be fetched all of it waits.
                     .key = hit.any_from_storage ? std::optional(keys[slot]) : std::nullopt,
                     .from_storage = hit.from_storage[g][slot] != 0});
  }
}

}  // namespace tokenspeed
