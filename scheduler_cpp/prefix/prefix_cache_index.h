// PrefixCacheIndex: which block holds the contents of which key, in one group.
//
// Invariants:
// - Per pool, a key has at most one canonical block and a location at most one key.
// - An entry owns one reference to its block. It is pinned while anybody else owns one too, and only an unpinned entry
//   can be evicted.
// - last_access_epoch >= 1. The boundary kind of an entry never falls, and was_acquired never resets.
// - Probing (Contains, Find, MetadataFor, MatchedLocations) changes no epoch and no flag.
//
// Entries are kept per pool, so that further storage tiers can share one index. The index neither allocates nor copies
// storage and never touches a BlockTable.
//
// Ownership: borrows the pools it has seen; they must outlive it.
// Thread safety: none.
// Costs: lookups O(1) expected; touching or evicting O(log entries).

#ifndef TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_
#define TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_

#include <compare>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/block_pool.h"
#include "prefix/cache_key.h"

namespace tokenspeed {

// How much a boundary has proved itself as a place to resume. Ordered.
enum class BoundaryKind : uint8_t { kChunk = 0, kEndpoint = 1, kPromoted = 2 };

inline constexpr int32_t kUnknownLogicalIndex = -1;

struct PrefixEntryMetadata {
  uint64_t last_access_epoch = 0;
  int32_t logical_block_index = kUnknownLogicalIndex;
  BoundaryKind boundary_kind = BoundaryKind::kChunk;
  bool was_acquired = false;

  friend bool operator==(const PrefixEntryMetadata&, const PrefixEntryMetadata&) = default;
};

class PrefixCacheIndex {
  struct Entry {
    CacheKey key;
    CacheBlockRef block;
    PrefixEntryMetadata metadata;
  };
  // Eviction order within a pool: oldest epoch first, then by location.
  struct EvictionRank {
    uint64_t epoch;
    CacheBlockLocation location;
    friend auto operator<=>(const EvictionRank&, const EvictionRank&) = default;
  };
  using EvictionOrder = std::map<EvictionRank, Entry*>;

 public:
  struct Candidate {
    CacheBlockLocation location;
    PrefixEntryMetadata metadata;
  };

  // Walks a pool's entries once, in epoch order. Entries must not change while it lives.
  class EvictionCursor {
   private:
    friend class PrefixCacheIndex;
    explicit EvictionCursor(EvictionOrder::const_iterator next) : next_(next) {}
    EvictionOrder::const_iterator next_;
  };

  explicit PrefixCacheIndex(int32_t group_id) : group_id_(group_id) {}
  PrefixCacheIndex(PrefixCacheIndex&&) = default;

  // Publishes `block` under `key`; true when a new entry was made. When the block already has an entry (its key must be
  // this one) or the key already has a canonical block, that entry takes the epoch and at least the kind, and in the
  // latter case `block` is replaced by the canonical handle.
  bool Register(const BlockPool& pool, CacheBlockRef& block, const CacheKey& key, uint64_t epoch, int32_t logical_index,
                BoundaryKind kind);

  // Registers each non-null block under the key beside it; logical indices count up from `first_logical_index`. Keys of
  // new entries are appended to `new_keys`.
  void RegisterFullBlocks(const BlockPool& pool, std::span<CacheBlockRef> blocks, std::span<const CacheKey> keys,
                          uint64_t epoch, int32_t first_logical_index, BoundaryKind kind,
                          std::vector<CacheKey>& new_keys);

  bool Contains(const BlockPool& pool, const CacheKey& key) const;
  bool Contains(const BlockPool& pool, CacheBlockLocation location) const;
  // A reference to the canonical block (a pin), empty when there is none.
  CacheBlockRef Find(const BlockPool& pool, const CacheKey& key) const;

  // One handle per mask slot: the canonical block where the mask is set (it must be present), empty elsewhere. Hits take
  // the epoch and count as acquired.
  std::vector<CacheBlockRef> AcquireMatched(const BlockPool& pool, std::span<const CacheKey> keys,
                                            std::span<const uint8_t> mask, uint64_t epoch);
  // Locations of the set mask slots.
  std::vector<CacheBlockLocation> MatchedLocations(const BlockPool& pool, std::span<const CacheKey> keys,
                                                   std::span<const uint8_t> mask) const;

  std::optional<PrefixEntryMetadata> MetadataFor(const BlockPool& pool, CacheBlockLocation location) const;

  // Removes the entry of a location and returns its key; nothing happens when there is none or it is pinned.
  std::optional<CacheKey> Evict(const BlockPool& pool, CacheBlockLocation location);
  // The same, pinned or not: other owners keep a block that is no longer to be found.
  std::optional<CacheKey> Withdraw(const BlockPool& pool, CacheBlockLocation location);

  int32_t NumEntries(const BlockPool& pool) const;
  // Entries with another owner beside the index. A scan.
  int32_t NumPinnedEntries(const BlockPool& pool) const;
  // All unpinned entries in eviction order. A scan.
  std::vector<Candidate> EvictableCandidates(const BlockPool& pool) const;
  // Whether the parent is occupied and each of its blocks is an unpinned entry here. A scan of the parent.
  bool ParentIsFullyEvictable(const BlockPool& pool, int32_t lcm_block_id) const;

  EvictionCursor StartEviction(const BlockPool& pool) const;
  // Appends the unpinned entries of the next epoch that has any; false when there is none left.
  bool NextEvictionEpoch(const BlockPool& pool, EvictionCursor& cursor, std::vector<Candidate>& candidates) const;

 private:
  struct PoolEntries {
    const BlockPool* pool;
    std::unordered_map<CacheKey, Entry, CacheKeyHash> by_key;  // its nodes own the entries
    std::unordered_map<CacheBlockLocation, Entry*, CacheBlockLocationHash> by_location;
    EvictionOrder order;
  };

  const PoolEntries* EntriesOf(const BlockPool& pool) const;
  PoolEntries& MutableEntriesOf(const BlockPool& pool);
  static Entry* EntryAt(const PoolEntries& entries, CacheBlockLocation location);
  static void Touch(PoolEntries& entries, Entry& entry, uint64_t epoch);

  int32_t group_id_;
  std::list<PoolEntries> pools_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_
