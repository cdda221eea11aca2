#include "prefix/prefix_cache_index.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace tokenspeed {

void PrefixCacheIndex::Entry::OnUnpinned() noexcept {
  rank = Rank();
  home->order.Insert(*this);
}

void PrefixCacheIndex::Entry::OnPinned() noexcept { home->order.Erase(*this); }

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
    entries.by_key.ForEachObject([&](Entry& entry) {
      if (entry.block) entries.pool->SetCached(entry.block, nullptr);
    });
  }
}

bool PrefixCacheIndex::Register(BlockPool& pool, CacheBlockRef& block, const CacheKey& key, uint64_t epoch,
                                int32_t logical_index, BoundaryKind kind) {
  TOKENSPEED_CHECK(block.IsOwnedBy(pool) && block->group() == group_id_, "a foreign block is published");
  TOKENSPEED_CHECK(key.group_id == group_id_, "a block is published under the key of another group");
  TOKENSPEED_CHECK(epoch > 0, "a block is published without an access epoch");
  PoolEntries& entries = MutableEntriesOf(pool);

  auto* known = static_cast<Entry*>(block->cached());
  TOKENSPEED_CHECK(known == nullptr || known->key == key, "a block is published under a second key");
  Entry* made = nullptr;
  if (known == nullptr) {
    const auto [found, fresh] = entries.by_key.FindOrMake(key);
    (fresh ? made : known) = found;
  }
  if (known != nullptr) {
    Update(*known, [&](PrefixEntryMetadata& metadata) {
      metadata.last_access_epoch = epoch;
      metadata.boundary_kind = std::max(metadata.boundary_kind, kind);
    });
    if (block != known->block) block = known->block;
    return false;
  }

  // The caller's own handle pins it, so it starts outside the order.
  made->home = &entries;
  made->block = block;
  made->metadata = {
      .last_access_epoch = epoch, .logical_block_index = logical_index, .boundary_kind = kind, .was_acquired = false};
  made->is_continued = false;
  pool.SetCached(made->block, made);
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
  return entries != nullptr && entries->by_key.Find(key) != nullptr;
}

bool PrefixCacheIndex::Contains(const BlockPool& pool, CacheBlockLocation location) const {
  return EntryAt(pool, location) != nullptr;
}

CacheBlockRef PrefixCacheIndex::Find(const BlockPool& pool, const CacheKey& key) const {
  const PoolEntries* entries = EntriesOf(pool);
  if (entries == nullptr) return {};
  const Entry* found = entries->by_key.Find(key);
  return found == nullptr ? CacheBlockRef() : found->block;
}

std::vector<CacheBlockRef> PrefixCacheIndex::AcquireMatched(const BlockPool& pool, std::span<const CacheKey> keys,
                                                            std::span<const uint8_t> mask, uint64_t epoch) {
  TOKENSPEED_CHECK(mask.size() <= keys.size(), "a mask is longer than its keys");
  std::vector<CacheBlockRef> blocks(mask.size());
  const auto entries = std::find_if(pools_.begin(), pools_.end(), [&](const auto& of) { return of.pool == &pool; });
  for (std::size_t slot = 0; slot < mask.size(); ++slot) {
    if (mask[slot] == 0) continue;
    TOKENSPEED_CHECK(entries != pools_.end(), "a probe is used after its blocks were evicted");
    Entry* found = entries->by_key.Find(keys[slot]);
    TOKENSPEED_CHECK(found != nullptr, "a probe is used after its blocks were evicted");
    Entry& entry = *found;
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
    const Entry* found = entries->by_key.Find(keys[slot]);
    TOKENSPEED_CHECK(found != nullptr, "a probe is used after its blocks were evicted");
    locations.push_back(found->block->Location());
  }
  return locations;
}

void PrefixCacheIndex::NoteContinuation(const CacheBlockRef& block) {
  auto* entry = block ? static_cast<Entry*>(block->cached()) : nullptr;
  if (entry != nullptr) entry->is_continued = true;
}

bool PrefixCacheIndex::IsContinued(const BlockPool& pool, const CacheKey& key) const {
  const PoolEntries* entries = EntriesOf(pool);
  const Entry* entry = entries == nullptr ? nullptr : entries->by_key.Find(key);
  return entry != nullptr && entry->is_continued;
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
  const CacheKey key = entry->key;
  PoolEntries& entries = *entry->home;
  if (entry->block.unique()) entries.order.Erase(*entry);
  pool.SetCached(entry->block, nullptr);
  entry->block.reset();
  entries.by_key.Erase(*entry);
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
  for (const EvictionQueue::Node* node = entries->order.front(); node != nullptr; node = node->next) {
    candidates.push_back({node->rank.location, static_cast<const Entry*>(node)->metadata});
  }
  return candidates;
}

PrefixCacheIndex::EvictionCursor PrefixCacheIndex::StartEviction(const BlockPool& pool) const {
  const PoolEntries* entries = EntriesOf(pool);
  return EvictionCursor(entries == nullptr ? nullptr : entries->order.front());
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
  if (entry.Rank() == entry.rank) return;
  entry.OnPinned();
  entry.OnUnpinned();
}

}  // namespace tokenspeed
