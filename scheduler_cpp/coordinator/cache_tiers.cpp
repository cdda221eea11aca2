// The cache beside what requests hold: both tiers as a whole, the store queue, and single blocks on their way between
// the tiers.

#include <algorithm>
#include <cstddef>
#include <utility>

#include "coordinator/cache_coordinator.h"
#include "core/check.h"

namespace tokenspeed {

int32_t CacheCoordinator::NumHostCachedBlocks() const {
  int32_t count = 0;
  for (const CacheGroup& group : groups_) count += group.index().NumEntries(host_pool_);
  return count;
}

int32_t CacheCoordinator::NumHostPinnedBlocks() const {
  int32_t count = 0;
  for (int32_t parent = 1; parent <= host_pool_.NumLcmBlocks(); ++parent) count += host_pool_.OccupiedCount(parent);
  for (const CacheGroup& group : groups_) {
    count -= group.index().NumEntries(host_pool_) - group.index().NumPinnedEntries(host_pool_);
  }
  return count;
}

bool CacheCoordinator::TierIsClearable(const BlockPool& pool) const {
  return std::all_of(groups_.begin(), groups_.end(),
                     [&](const CacheGroup& group) { return group.index().NumPinnedEntries(pool) == 0; });
}

bool CacheCoordinator::CacheIsClearable() const { return TierIsClearable(host_pool_) && TierIsClearable(pool_); }

bool CacheCoordinator::EvictDeviceCache() {
  if (!TierIsClearable(pool_)) return false;
  for (const CacheGroup& group : groups_) {
    for (const PrefixCacheIndex::Candidate& candidate : group.index().EvictableCandidates(pool_)) {
      Evict(group.group_id(), candidate.location);
    }
  }
  return true;
}

bool CacheCoordinator::ClearDeviceCache() {
  if (!EvictDeviceCache()) return false;
  pending_stores_.clear();
  if (storage_) storage_->Clear();
  return true;
}

bool CacheCoordinator::ClearCache() {
  if (!CacheIsClearable()) return false;
  ClearDeviceCache();
  for (CacheGroup& group : groups_) {
    for (const PrefixCacheIndex::Candidate& candidate : group.index().EvictableCandidates(host_pool_)) {
      group.index().Evict(host_pool_, candidate.location);
    }
  }
  return true;
}

void CacheCoordinator::QueueCachedBlocksForStore(std::span<const PrefixHash> hashes) {
  for (const CacheGroup& group : groups_) {
    if (group.kind() == CacheGroupKind::kRecurrentState || !group.SharesPrefixes()) continue;
    for (const CacheKey& key : group.ExpandKeys(hashes)) {
      if (group.index().Contains(pool_, key)) pending_stores_.push_back(key);
    }
  }
}

void CacheCoordinator::QueueLatestSnapshotBlocksForStore(std::span<const PrefixHash> hashes) {
  for (const CacheGroup& group : groups_) {
    if (group.kind() != CacheGroupKind::kRecurrentState) continue;
    const std::vector<CacheKey> keys = group.ExpandKeys(hashes);
    const auto newest = std::find_if(keys.rbegin(), keys.rend(),
                                     [&](const CacheKey& key) { return group.index().Contains(pool_, key); });
    if (newest != keys.rend()) pending_stores_.push_back(*newest);
  }
}

void CacheCoordinator::PublishOnHost(CacheBlockRef block, const CacheKey& key) {
  groups_[static_cast<std::size_t>(key.group_id)].index().Register(host_pool_, block, key, ++last_epoch_,
                                                                    kUnknownLogicalIndex, BoundaryKind::kChunk);
  watch_.Note(key.content_hash);
  if (!storage_) return;
  storage_->Remember(key);
  watch_.NoteAll();  // perhaps another key had to go
}

void CacheCoordinator::PublishOnDevice(CacheBlockRef block, const CacheKey& key) {
  const bool is_new = groups_[static_cast<std::size_t>(key.group_id)].index().Register(
      pool_, block, key, ++last_epoch_, kUnknownLogicalIndex, BoundaryKind::kChunk);
  if (is_new) ReportStored({&key, 1});
}

void CacheCoordinator::WithdrawFromDevice(const CacheBlockRef& block) {
  PrefixCacheIndex& index = groups_[static_cast<std::size_t>(block->group())].index();
  const std::optional<CacheKey> removed = index.Withdraw(pool_, block->Location());
  if (removed && sink_) sink_(*removed, DeviceMutation::kRemoved);
}

void CacheCoordinator::RegisterStorageKeys(std::vector<CacheKey> keys) {
  if (!storage_) return;
  // What replay brings back is never looked up.
  std::erase_if(keys, [&](const CacheKey& key) { return !group(key.group_id).SharesPrefixes(); });
  storage_->Register(std::move(keys));
  watch_.NoteAll();
}

void CacheCoordinator::UnregisterStorageKeys(std::span<const CacheKey> keys) {
  if (!storage_) return;
  storage_->Unregister(keys);
  watch_.NoteAll();
}

}  // namespace tokenspeed
