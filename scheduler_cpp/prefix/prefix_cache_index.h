// PrefixCacheIndex: which block holds the contents of which key, in one group.
//
// Invariants:
// - Per pool, a key has at most one canonical block and a location at most one key.
// - An entry owns one reference to its block. It is pinned while anybody else owns one too, and only an unpinned entry
//   can be evicted.
// - last_access_epoch >= 1. The boundary kind of an entry never falls, and was_acquired never resets.
// - Probing (Contains, Find, MetadataFor, MatchedLocations) changes no epoch and no flag.
// - The eviction order of a pool holds exactly the unpinned entries; the pool tells when an entry joins or leaves them.
//
// Entries are kept per pool, so that further storage tiers can share one index. The index neither allocates nor copies
// storage and never touches a BlockTable.
//
// Ownership: borrows the pools it has seen; they must outlive it.
// Thread safety: none.
// Costs: lookups, publishing, evicting, pinning and touching a pinned entry O(1) expected; unpinning O(log unpinned
// entries), O(1) for the newest. Nothing is allocated once the index has been as large as it is.

#ifndef TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_
#define TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <vector>

#include "core/block_pool.h"
#include "prefix/cache_key.h"
#include "prefix/eviction_queue.h"
#include "prefix/key_table.h"

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
  struct PoolEntries;
  struct Entry;

 public:
  struct Candidate {
    CacheBlockLocation location;
    PrefixEntryMetadata metadata;
  };

  // Walks a pool's unpinned entries once, in eviction order. Entries must not change while it lives.
  class EvictionCursor {
   public:
    // Null at the end.
    const EvictionRank* rank() const { return next_ == nullptr ? nullptr : &next_->rank; }
    void Advance() { next_ = next_->next; }

   private:
    friend class PrefixCacheIndex;
    explicit EvictionCursor(const EvictionQueue::Node* next) : next_(next) {}
    const EvictionQueue::Node* next_;
  };

  // `prefix_closed`: every shorter prefix of a cached one is worth more than the longer one.
  PrefixCacheIndex(int32_t group_id, bool prefix_closed) : group_id_(group_id), prefix_closed_(prefix_closed) {}
  PrefixCacheIndex(PrefixCacheIndex&&) = default;
  ~PrefixCacheIndex();

  // Publishes `block` under `key`; true when a new entry was made. When the block already has an entry (its key must be
  // this one) or the key already has a canonical block, that entry takes the epoch and at least the kind, and in the
  // latter case `block` is replaced by the canonical handle.
  bool Register(BlockPool& pool, CacheBlockRef& block, const CacheKey& key, uint64_t epoch, int32_t logical_index,
                BoundaryKind kind);

  // Registers each non-null block under the key beside it; logical indices count up from `first_logical_index`. Keys of
  // new entries are appended to `new_keys`.
  void RegisterFullBlocks(BlockPool& pool, std::span<CacheBlockRef> blocks, std::span<const CacheKey> keys,
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

  // Says that what follows this block has been cached too; nothing happens for a hole or a block that is not cached.
  void NoteContinuation(const CacheBlockRef& block);
  // Whether that has been said of the canonical block of the key, which may be absent.
  bool IsContinued(const BlockPool& pool, const CacheKey& key) const;

  std::optional<PrefixEntryMetadata> MetadataFor(const BlockPool& pool, CacheBlockLocation location) const;

  // Removes the entry of a location and returns its key; nothing happens when there is none or it is pinned.
  std::optional<CacheKey> Evict(BlockPool& pool, CacheBlockLocation location);
  // The same, pinned or not: other owners keep a block that is no longer to be found.
  std::optional<CacheKey> Withdraw(BlockPool& pool, CacheBlockLocation location);

  int32_t NumEntries(const BlockPool& pool) const;
  // Entries with another owner beside the index. O(1), as is the number of entries.
  int32_t NumPinnedEntries(const BlockPool& pool) const;
  // All unpinned entries in eviction order. A scan.
  std::vector<Candidate> EvictableCandidates(const BlockPool& pool) const;
  EvictionCursor StartEviction(const BlockPool& pool) const;
  // Where the block at an occupied location, cached or not, stands in the order, were it unpinned.
  EvictionRank RankAt(const BlockPool& pool, CacheBlockLocation location) const;

 private:
  // As an eviction meets them, what belongs together lies side by side. The node is in the order while unpinned.
  struct Entry final : CachedBlock, EvictionQueue::Node {
    void OnUnpinned() noexcept override;
    void OnPinned() noexcept override;
    EvictionRank Rank() const;

    CacheBlockRef block;  // empty while the entry is not in use
    PoolEntries* home = nullptr;
    PrefixEntryMetadata metadata;
    CacheKey key;
    uint32_t number = 0;  // in the table
    bool is_continued = false;
  };

  struct PoolEntries {
    BlockPool* pool;
    bool prefix_closed;
    KeyTable<Entry> by_key;
    EvictionQueue order;  // the unpinned entries
  };

  const PoolEntries* EntriesOf(const BlockPool& pool) const;
  PoolEntries& MutableEntriesOf(BlockPool& pool);
  const Entry* EntryAt(const BlockPool& pool, CacheBlockLocation location) const;
  Entry* EntryAt(const BlockPool& pool, CacheBlockLocation location) {
    return const_cast<Entry*>(static_cast<const PrefixCacheIndex*>(this)->EntryAt(pool, location));
  }
  template <typename Change>
  static void Update(Entry& entry, Change&& change);

  int32_t group_id_;
  bool prefix_closed_;
  std::list<PoolEntries> pools_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PREFIX_CACHE_INDEX_H_
