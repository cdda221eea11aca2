#include "prefix/prefix_cache_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace tokenspeed {

void PrefixCacheIndex::Entry::OnUnpinned() noexcept {
  parked.key() = Rank();
  // Mostly the newest epoch of all, and of a closed group suffixes first: then it belongs at the very end.
  place = home->order.insert(home->order.end(), std::move(parked));
}

void PrefixCacheIndex::Entry::OnPinned() noexcept { parked = home->order.extract(place); }

EvictionRank PrefixCacheIndex::Entry::Rank() const {
  const int32_t index = metadata.logical_block_index;
  EvictionRank rank{.epoch = metadata.last_access_epoch, .tier = 2, .position = 0, .location = block->Location()};
  if (home->prefix_closed) {
    rank.tier = 3;
    if (index >= 0) rank.position = -index;  // a prefix is worth more than what follows it
  } else if (metadata.boundary_kind == BoundaryKind::kChunk && !metadata.was_acquired && index >= 0) {
    rank.tier = 1;
    rank.position = index;  // of unproven resume points the deepest is worth most
  }
  return rank;
}

PrefixCacheIndex::~PrefixCacheIndex() {
  for (PoolEntries& entries : pools_) {
    for (auto& [key, entry] : entries.by_key) entries.pool->SetCached(entry.block, nullptr);
  }
}

bool PrefixCacheIndex::Register(BlockPool& pool, CacheBlockRef& block, const CacheKey& key, uint64_t epoch,
                                int32_t logical_index, BoundaryKind kind) {
  TOKENSPEED_CHECK(block.IsOwnedBy(pool) && block->group() == group_id_, "a foreign block is published");
  TOKENSPEED_CHECK(key.group_id == group_id_, "a block is published under the key of another group");
  TOKENSPEED_CHECK(epoch > 0, "a block is published without an access epoch");
  PoolEntries& entries = MutableEntriesOf(pool);

  auto* known = static_cast<Entry*>(block->cached());
  TOKENSPEED_CHECK(known == nullptr || *known->key == key, "a block is published under a second key");
  auto made = entries.by_key.end();
  if (known == nullptr) {
    bool fresh = false;
    std::tie(made, fresh) = entries.by_key.try_emplace(key);
    if (!fresh) known = &made->second;
  }
  if (known != nullptr) {
    Update(*known, [&](PrefixEntryMetadata& metadata) {
      metadata.last_access_epoch = epoch;
      metadata.boundary_kind = std::max(metadata.boundary_kind, kind);
    });
    if (block != known->block) block = known->block;
    return false;
  }

  Entry& entry = made->second;
  entry.home = &entries;
  entry.key = &made->first;
  entry.block = block;
  entry.metadata = {
      .last_access_epoch = epoch, .logical_block_index = logical_index, .boundary_kind = kind, .was_acquired = false};
  // The caller's own handle pins it, so its node starts outside the order.
  EvictionOrder nowhere;
  entry.parked = nowhere.extract(nowhere.emplace(EvictionRank(), &entry).first);
  pool.SetCached(entry.block, &entry);
  return true;
}

void PrefixCacheIndex::RegisterFullBlocks(BlockPool& pool, std::span<CacheBlockRef> blocks,
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
  return EntryAt(pool, location) != nullptr;
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
  const auto entries = std::find_if(pools_.begin(), pools_.end(), [&](const auto& of) { return of.pool == &pool; });
  for (std::size_t slot = 0; slot < mask.size(); ++slot) {
    if (mask[slot] == 0) continue;
    TOKENSPEED_CHECK(entries != pools_.end(), "a probe is used after its blocks were evicted");
    const auto found = entries->by_key.find(keys[slot]);
    TOKENSPEED_CHECK(found != entries->by_key.end(), "a probe is used after its blocks were evicted");
    Entry& entry = found->second;
    blocks[slot] = entry.block;  // pins it, so that the change below moves nothing
    Update(entry, [&](PrefixEntryMetadata& metadata) {
      metadata.last_access_epoch = epoch;
      metadata.was_acquired = true;
    });
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
    TOKENSPEED_CHECK(entries != nullptr, "a probe is used after its blocks were evicted");
    const auto found = entries->by_key.find(keys[slot]);
    TOKENSPEED_CHECK(found != entries->by_key.end(), "a probe is used after its blocks were evicted");
    locations.push_back(found->second.block->Location());
  }
  return locations;
}

std::optional<PrefixEntryMetadata> PrefixCacheIndex::MetadataFor(const BlockPool& pool,
                                                                 CacheBlockLocation location) const {
  const Entry* entry = EntryAt(pool, location);
  return entry == nullptr ? std::nullopt : std::optional(entry->metadata);
}

std::optional<CacheKey> PrefixCacheIndex::Evict(BlockPool& pool, CacheBlockLocation location) {
  const Entry* entry = EntryAt(pool, location);
  return entry != nullptr && entry->block.unique() ? Withdraw(pool, location) : std::nullopt;
}

std::optional<CacheKey> PrefixCacheIndex::Withdraw(BlockPool& pool, CacheBlockLocation location) {
  Entry* entry = EntryAt(pool, location);
  if (entry == nullptr) return std::nullopt;
  const CacheKey key = *entry->key;
  PoolEntries& entries = *entry->home;
  if (entry->block.unique()) entries.order.erase(entry->place);
  pool.SetCached(entry->block, nullptr);
  entries.by_key.erase(key);
  return key;
}

int32_t PrefixCacheIndex::NumEntries(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  return entries == nullptr ? 0 : static_cast<int32_t>(entries->by_key.size());
}

int32_t PrefixCacheIndex::NumPinnedEntries(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  return entries == nullptr ? 0 : static_cast<int32_t>(entries->by_key.size() - entries->order.size());
}

std::vector<PrefixCacheIndex::Candidate> PrefixCacheIndex::EvictableCandidates(const BlockPool& pool) const {
  std::vector<Candidate> candidates;
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return candidates;
  candidates.reserve(entries->order.size());
  for (const auto& [rank, entry] : entries->order) candidates.push_back({rank.location, entry->metadata});
  return candidates;
}

PrefixCacheIndex::EvictionCursor PrefixCacheIndex::StartEviction(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return EvictionCursor({}, {});
  return EvictionCursor(entries->order.begin(), entries->order.end());
}

EvictionRank PrefixCacheIndex::RankAt(const BlockPool& pool, CacheBlockLocation location) const {
  const Entry* entry = EntryAt(pool, location);
  return entry == nullptr ? EvictionRank{.location = location} : entry->Rank();
}

const PrefixCacheIndex::PoolEntries* PrefixCacheIndex::EntriesOf(const BlockPool& pool) const {
  for (const PoolEntries& entries : pools_) {
    if (entries.pool == &pool) return &entries;
  }
  return nullptr;
}

PrefixCacheIndex::PoolEntries& PrefixCacheIndex::MutableEntriesOf(BlockPool& pool) {
  for (PoolEntries& entries : pools_) {
    if (entries.pool == &pool) return entries;
  }
  return pools_.emplace_back(PoolEntries{.pool = &pool, .prefix_closed = prefix_closed_, .by_key = {}, .order = {}});
}

const PrefixCacheIndex::Entry* PrefixCacheIndex::EntryAt(const BlockPool& pool, CacheBlockLocation location) const {
  const CacheBlock* block = pool.BlockAt(location);
  return block == nullptr || block->group() != group_id_ ? nullptr : static_cast<const Entry*>(block->cached());
}

template <typename Change>
void PrefixCacheIndex::Update(Entry& entry, Change&& change) {
  change(entry.metadata);
  if (!entry.block.unique()) return;
  const EvictionRank rank = entry.Rank();
  if (rank == entry.place->first) return;
  entry.OnPinned();
  entry.OnUnpinned();
}

}  // namespace tokenspeed
