#include "prefix/prefix_cache_index.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace tokenspeed {
bool PrefixCacheIndex::Register(const BlockPool& pool, CacheBlockRef& block, const CacheKey& key, uint64_t epoch,
                                int32_t logical_index, BoundaryKind kind) {
  TOKENSPEED_CHECK(block.IsOwnedBy(pool) && block->group() == group_id_, "a foreign block is published");
  TOKENSPEED_CHECK(key.group_id == group_id_, "a block is published under the key of another group");
  TOKENSPEED_CHECK(epoch > 0, "a block is published without an access epoch");
  PoolEntries& entries = MutableEntriesOf(pool);
  const CacheBlockLocation location = block->Location();

  Entry* known = EntryAt(entries, location);
  TOKENSPEED_CHECK(known == nullptr || known->key == key, "a block is published under a second key");
  if (known == nullptr) {
    const auto canonical = entries.by_key.find(key);
    if (canonical != entries.by_key.end()) known = &canonical->second;
  }
  if (known != nullptr) {
    Touch(entries, *known, epoch);
    known->metadata.boundary_kind = std::max(known->metadata.boundary_kind, kind);
    block = known->block;
    return false;
  }

  const PrefixEntryMetadata metadata{
      .last_access_epoch = epoch, .logical_block_index = logical_index, .boundary_kind = kind, .was_acquired = false};
  Entry& entry = entries.by_key.emplace(key, Entry{key, block, metadata}).first->second;
  entries.by_location.emplace(location, &entry);
  entries.order.emplace(EvictionRank{epoch, location}, &entry);
  return true;
}

void PrefixCacheIndex::RegisterFullBlocks(const BlockPool& pool, std::span<CacheBlockRef> blocks,
                                          std::span<const CacheKey> keys, uint64_t epoch, int32_t first_logical_index,
                                          BoundaryKind kind, std::vector<CacheKey>& new_keys) {
  TOKENSPEED_CHECK(blocks.size() == keys.size(), "each block needs its key");
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i]) continue;
    if (Register(pool, blocks[i], keys[i], epoch, first_logical_index + static_cast<int32_t>(i), kind)) {
      new_keys.push_back(keys[i]);
    }
  }
}

bool PrefixCacheIndex::Contains(const BlockPool& pool, const CacheKey& key) const {
  const PoolEntries* entries = EntriesOf(pool);
  return entries != nullptr && entries->by_key.contains(key);
}

bool PrefixCacheIndex::Contains(const BlockPool& pool, CacheBlockLocation location) const {
  const PoolEntries* entries = EntriesOf(pool);
  return entries != nullptr && EntryAt(*entries, location) != nullptr;
}

CacheBlockRef PrefixCacheIndex::Find(const BlockPool& pool, const CacheKey& key) const {
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return {};
  const auto found = entries->by_key.find(key);
  return found == entries->by_key.end() ? CacheBlockRef() : found->second.block;
}

std::vector<CacheBlockRef> PrefixCacheIndex::AcquireMatched(const BlockPool& pool, std::span<const CacheKey> keys,
                                                            std::span<const uint8_t> mask, uint64_t epoch) {
  TOKENSPEED_CHECK(mask.size() <= keys.size(), "a mask is longer than its keys");
  std::vector<CacheBlockRef> blocks(mask.size());
  PoolEntries& entries = MutableEntriesOf(pool);
  for (std::size_t slot = 0; slot < mask.size(); ++slot) {
    if (mask[slot] == 0) continue;
    const auto found = entries.by_key.find(keys[slot]);
    TOKENSPEED_CHECK(found != entries.by_key.end(), "a probe is used after its blocks were evicted");
    Entry& entry = found->second;
    Touch(entries, entry, epoch);
    entry.metadata.was_acquired = true;
    blocks[slot] = entry.block;
  }
  return blocks;
}

std::vector<CacheBlockLocation> PrefixCacheIndex::MatchedLocations(const BlockPool& pool,
                                                                   std::span<const CacheKey> keys,
                                                                   std::span<const uint8_t> mask) const {
  TOKENSPEED_CHECK(mask.size() <= keys.size(), "a mask is longer than its keys");
  std::vector<CacheBlockLocation> locations;
  const PoolEntries* entries = EntriesOf(pool);
  for (std::size_t slot = 0; slot < mask.size(); ++slot) {
    if (mask[slot] == 0) continue;
    TOKENSPEED_CHECK(entries != nullptr && entries->by_key.contains(keys[slot]),
                     "a probe is used after its blocks were evicted");
    locations.push_back(entries->by_key.find(keys[slot])->second.block->Location());
  }
  return locations;
}

std::optional<PrefixEntryMetadata> PrefixCacheIndex::MetadataFor(const BlockPool& pool,
                                                                 CacheBlockLocation location) const {
  const PoolEntries* entries = EntriesOf(pool);
  const Entry* entry = entries == nullptr ? nullptr : EntryAt(*entries, location);
  return entry == nullptr ? std::nullopt : std::optional(entry->metadata);
}

std::optional<CacheKey> PrefixCacheIndex::Evict(const BlockPool& pool, CacheBlockLocation location) {
  const Entry* entry = EntryAt(MutableEntriesOf(pool), location);
  return entry != nullptr && entry->block.unique() ? Withdraw(pool, location) : std::nullopt;
}

std::optional<CacheKey> PrefixCacheIndex::Withdraw(const BlockPool& pool, CacheBlockLocation location) {
  PoolEntries& entries = MutableEntriesOf(pool);
  const Entry* entry = EntryAt(entries, location);
  if (entry == nullptr) return std::nullopt;
  const CacheKey key = entry->key;
  entries.order.erase(EvictionRank{entry->metadata.last_access_epoch, location});
  entries.by_location.erase(location);
  entries.by_key.erase(key);
  return key;
}

int32_t PrefixCacheIndex::NumEntries(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  return entries == nullptr ? 0 : static_cast<int32_t>(entries->order.size());
}

int32_t PrefixCacheIndex::NumPinnedEntries(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return 0;
  return static_cast<int32_t>(std::count_if(entries->order.begin(), entries->order.end(),
                                            [](const auto& item) { return !item.second->block.unique(); }));
}

std::vector<PrefixCacheIndex::Candidate> PrefixCacheIndex::EvictableCandidates(const BlockPool& pool) const {
  std::vector<Candidate> candidates;
  EvictionCursor cursor = StartEviction(pool);
  while (NextEvictionEpoch(pool, cursor, candidates)) {
  }
  return candidates;
}

bool PrefixCacheIndex::ParentIsFullyEvictable(const BlockPool& pool, int32_t lcm_block_id) const {
  const PoolEntries* entries = EntriesOf(pool);
  const std::vector<CacheBlockLocation> locations = pool.OccupiedLocations(lcm_block_id);
  if (entries == nullptr || locations.empty()) return false;
  return std::all_of(locations.begin(), locations.end(), [&](CacheBlockLocation location) {
    const Entry* entry = EntryAt(*entries, location);
    return entry != nullptr && entry->block.unique();
  });
}

PrefixCacheIndex::EvictionCursor PrefixCacheIndex::StartEviction(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  return EvictionCursor(entries == nullptr ? EvictionOrder::const_iterator() : entries->order.begin());
}

bool PrefixCacheIndex::NextEvictionEpoch(const BlockPool& pool, EvictionCursor& cursor,
                                         std::vector<Candidate>& candidates) const {
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return false;
  bool found = false;
  while (!found && cursor.next_ != entries->order.end()) {
    const uint64_t epoch = cursor.next_->first.epoch;
    for (; cursor.next_ != entries->order.end() && cursor.next_->first.epoch == epoch; ++cursor.next_) {
      const Entry& entry = *cursor.next_->second;
      if (!entry.block.unique()) continue;
      candidates.push_back({cursor.next_->first.location, entry.metadata});
      found = true;
    }
  }
  return found;
}

const PrefixCacheIndex::PoolEntries* PrefixCacheIndex::EntriesOf(const BlockPool& pool) const {
  for (const PoolEntries& entries : pools_) {
    if (entries.pool == &pool) return &entries;
  }
  return nullptr;
}

PrefixCacheIndex::PoolEntries& PrefixCacheIndex::MutableEntriesOf(const BlockPool& pool) {
  for (PoolEntries& entries : pools_) {
    if (entries.pool == &pool) return entries;
  }
  return pools_.emplace_back(PoolEntries{.pool = &pool, .by_key = {}, .by_location = {}, .order = {}});
}

PrefixCacheIndex::Entry* PrefixCacheIndex::EntryAt(const PoolEntries& entries, CacheBlockLocation location) {
  const auto found = entries.by_location.find(location);
  return found == entries.by_location.end() ? nullptr : found->second;
}

void PrefixCacheIndex::Touch(PoolEntries& entries, Entry& entry, uint64_t epoch) {
  if (entry.metadata.last_access_epoch == epoch) return;
  const CacheBlockLocation location = entry.block->Location();
  auto node = entries.order.extract(EvictionRank{entry.metadata.last_access_epoch, location});
  node.key().epoch = epoch;
  entries.order.insert(std::move(node));
  entry.metadata.last_access_epoch = epoch;
}

}  // namespace tokenspeed
