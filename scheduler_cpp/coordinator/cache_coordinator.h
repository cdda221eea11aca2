// CacheCoordinator: the scheduler's only entry into the cache.
//
// Invariants:
// - A refused admission changes nothing: tables, indexes, epochs, pool and the caller's probe stay as they were.
// - An access epoch is issued once, in increasing order from 1; an admission that succeeds consumes one, and so does
//   each completed copy between the tiers.
// - Within one admission publication precedes reclamation, and both precede acquisition.
// - Host blocks are published only by PublishOnHost, for copies that are complete. What the device evicts stays on the
//   host, and the other way round.
// - It holds no per-request state: a request's tables live with the request, one per group in group order.
//
// Group ids are dense: a group's id is its position in the specs. Tables and demands always have one element per group.
//
// Ownership: owns the pools and all groups. Tables, admission results and other holders of blocks must be freed or
// destroyed before the coordinator dies.
// Thread safety: none; calls must not overlap. The mutation sink is called synchronously and must not call back.

#ifndef TOKENSPEED_COORDINATOR_CACHE_COORDINATOR_H_
#define TOKENSPEED_COORDINATOR_CACHE_COORDINATOR_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "coordinator/admission.h"
#include "coordinator/admission_planner.h"
#include "coordinator/cache_group.h"
#include "coordinator/cache_group_spec.h"
#include "coordinator/device_mutation.h"
#include "coordinator/host_allocation.h"
#include "coordinator/host_tier.h"
#include "coordinator/prefix_convergence.h"
#include "coordinator/table_fork.h"
#include "core/block_pool.h"
#include "core/block_table.h"
#include "prefix/partial_pages.h"
#include "prefix/prefix_watch.h"

namespace tokenspeed {

class CacheCoordinator {
 public:
  // `num_lcm_blocks` usable parents. The sink may be empty.
  CacheCoordinator(int32_t prefix_granularity, int32_t num_lcm_blocks, std::span<const CacheGroupSpec> specs,
                   DeviceMutationSink sink = nullptr, HostTier host = {});
  CacheCoordinator(const CacheCoordinator&) = delete;
  CacheCoordinator& operator=(const CacheCoordinator&) = delete;

  int32_t prefix_granularity() const { return prefix_granularity_; }
  int32_t NumGroups() const { return static_cast<int32_t>(groups_.size()); }
  const CacheGroup& group(int32_t group_id) const;
  const BlockPool& device_pool() const { return pool_; }
  const BlockPool& host_pool() const { return host_pool_; }
  bool HasHostTier() const { return host_.num_lcm_blocks > 0; }
  // One empty table per group.
  std::vector<BlockTable> MakeTables() const;

  // The probe of a request that looks nothing up: later chunks and decode steps.
  const PrefixProbe& NeutralProbe() const { return neutral_probe_; }
  // Longest prefix of the candidate pages from which every group can resume, on the device and then, at most up to
  // `max_host_tokens`, on the host. Read-only.
  PrefixProbe ProbePrefix(std::span<const PrefixHash> hashes,
                          int32_t max_host_tokens = std::numeric_limits<int32_t>::max()) const;

  // The probe's promotion boundary if prompts are known to part there, so that a chunk should stop; else 0.
  int32_t PromotionWorthStopping(const PrefixProbe& probe) const;

  // The same for a prompt whose state arrives from a peer: groups of state are not matched, their part of the hit is
  // holes. Without a group of another kind nothing is hit.
  PrefixProbe ProbeDecodeDevicePrefix(std::span<const PrefixHash> hashes) const;

  // Grows the tables by the demands, publishing `progress` and reclaiming what has expired on the way; evicts as little
  // as possible. Nothing is returned, and nothing is changed, when it cannot fit. With a hit in the probe the tables
  // must be empty, and a replayable group that grows densely starts its replay window below the hit, with holes before.
  // `access_epoch` is an epoch issued by this request's first admission, absent for that admission. With a partial hit
  // the demands start at the end of the whole pages.
  std::optional<AdmissionResult> Admit(const PrefixProbe& probe, std::span<BlockTable> tables,
                                       std::span<const TokenDemand> demands, const RequestProgress& progress,
                                       std::optional<uint64_t> access_epoch = std::nullopt);

  // The same for a decode step, of which there may be thousands at once: every group grows densely, nothing is looked up,
  // and what is acquired is appended to `new_block_ids`, one list per group. False when it cannot fit.
  bool Grow(std::span<BlockTable> tables, int32_t num_tokens, const RequestProgress& progress, uint64_t access_epoch,
            std::vector<std::vector<int32_t>>& new_block_ids);

  // Forks (table_fork.cpp).
  // How another request may compute on from `position` with what these tables hold, if the first `common_tokens` tokens
  // are the same; nothing when it cannot.
  std::optional<std::vector<TableFork>> PlanFork(std::span<const BlockTable> parent, int32_t position,
                                                 int32_t common_tokens) const;
  // Admits a new request that computes on from `position`: its tables, which must be empty, take the parent's blocks
  // over as `forks` (PlanFork's answer, with nothing in between) says, and grow from `position` by the demands, all of
  // them dense. Nothing is returned, and nothing is changed, when that cannot fit. The sources of copies are the
  // parent's and stay valid for as long as it holds them.
  std::optional<ForkedAdmission> Fork(std::span<const TableFork> forks, std::span<const BlockTable> parent,
                                      int32_t position, std::span<const TokenDemand> demands,
                                      std::span<BlockTable> tables);

  // Publishes completed pages without admitting anything (finish, retraction).
  void CacheCompletedBlocks(std::span<BlockTable> tables, const RequestProgress& progress, uint64_t access_epoch);
  // Publishes an exact range in every group: `hashes` are consecutive prefix pages of which the first is number
  // `first_prefix_page` of the tables.
  void CacheFullBlocks(std::span<BlockTable> tables, std::span<const PrefixHash> hashes, uint64_t access_epoch,
                       int32_t first_prefix_page, BoundaryKind kind);

  // Partial pages (partial_page_reuse.cpp), of caches all of whose groups hold rows and share prefixes.
  static constexpr std::size_t kMaxPartialPagesBehindOne = 8;
  // Completes a probe by what can be copied of the page behind its prefix. `prior` names what precedes that page, and
  // `tokens` are the prompt's from there on, as far as they may be reused.
  void ProbePartialPage(PrefixProbe& probe, const PrefixHash& prior, std::span<const int32_t> tokens) const;
  // Publishes what the tables hold of the page that starts at the boundary `begin` and of which only `tokens` (less than
  // the page) are computed. Of too many behind one `prior` the one that was left longest ago goes. Nothing of it is
  // reported to the sink, nor copied to the host.
  void CachePartialPage(std::span<BlockTable> tables, const PrefixHash& prior, int32_t begin,
                        std::span<const int32_t> tokens, uint64_t access_epoch);

  void Free(std::span<BlockTable> tables);

  // A decode step in place: when every tail has room for `num_tokens`, and no group has a block to give up at the
  // frontier, does what an admission would, allocating nothing. Otherwise false, and no change.
  bool ConsumeInPlace(std::span<BlockTable> tables, int32_t num_tokens, int32_t num_computed_tokens);

  // Gauges. Parents are counted once.
  int32_t NumEmptyLcmBlocks() const { return pool_.NumEmptyLcmBlocks(); }
  // Distinct parents referenced by the tables of requests. O(1).
  int32_t NumActiveLcmBlocks() const { return pool_.NumActiveLcmBlocks(); }
  // Empty parents and those that eviction alone could empty. O(1).
  int32_t NumAvailableLcmBlocks() const;
  // Parents that would become empty or fully evictable if these tables were freed. A scan.
  int32_t NumNewlyReleasableLcmBlocks(std::span<const BlockTable> tables) const;
  // Blocks the group could acquire without eviction. O(1).
  int64_t NumAvailableBlocks(int32_t group_id) const { return pool_.Capacity(group_id); }

  // Host gauges: cached blocks, and occupied ones that no eviction can take now. Scans.
  int32_t NumHostCachedBlocks() const;
  int32_t NumHostPinnedBlocks() const;

  // Whether no cached block of any tier is in use.
  bool CacheIsClearable() const;
  // Evicts every entry of the device; false, and no change, when one is in use.
  bool EvictDeviceCache();
  // The same, and forgets the store queue and the external store's keys.
  bool ClearDeviceCache();
  // The same for both tiers.
  bool ClearCache();

  // The store queue: keys of device blocks worth a copy on the host. It pins nothing.
  // Queues every cached block of these consecutive pages, save those of recurrent-state groups.
  void QueueCachedBlocksForStore(std::span<const PrefixHash> hashes);
  // Queues the newest cached snapshot of these pages, for each recurrent-state group.
  void QueueLatestSnapshotBlocksForStore(std::span<const PrefixHash> hashes);
  bool HasPendingStores() const { return !pending_stores_.empty(); }
  std::vector<CacheKey> TakePendingStores() { return std::exchange(pending_stores_, {}); }

  // Single blocks, for the copies between the tiers.
  bool HostHas(const CacheKey& key) const { return group(key.group_id).index().Contains(host_pool_, key); }
  // A pin; empty when the key is not cached on the device.
  CacheBlockRef FindOnDevice(const CacheKey& key) const { return group(key.group_id).index().Find(pool_, key); }
  HostAllocation AllocateOnHost(std::span<const HostBlockWish> wishes) {
    return AllocateHostBlocks(groups_, host_pool_, wishes);
  }
  void PublishOnHost(CacheBlockRef block, const CacheKey& key);
  void PublishOnDevice(CacheBlockRef block, const CacheKey& key);
  // A handle to a device block belongs to a copy from now on, or no longer; it makes no parent active.
  void BeginTransfer(const CacheBlockRef& block) { pool_.BeginTransfer(block); }
  void EndTransfer(const CacheBlockRef& block) { pool_.EndTransfer(block); }
  // Takes back the publication of a device block that was not filled after all, whoever holds it.
  void WithdrawFromDevice(const CacheBlockRef& block);

  // The external store's keys; without a store these do nothing.
  void RegisterStorageKeys(std::vector<CacheKey> keys);
  void UnregisterStorageKeys(std::span<const CacheKey> keys);

  // Sees everything that is cached.
  PrefixWatch& watch() { return watch_; }

  // How many of the boundary's keys, over all offsets, are cached in the closed groups, if there are any, or in all.
  BoundaryResidency DeviceBoundaryResidency(const PrefixHash& hash) const;

 private:
  PrefixProbe ProbeDevice(std::span<const PrefixHash> hashes, MatchedGroups matched) const;
  // The demands as they are behind a hit of `hit` tokens, from which replayable groups feed their window again.
  std::vector<TokenDemand> DemandsBehind(int32_t hit, std::span<const TokenDemand> demands) const;
  // The demands, which start at the end of the probe's whole pages, without what the groups do not read of a page that
  // is copied (partial_page_reuse.cpp).
  std::vector<TokenDemand> DemandsInsidePage(const PrefixProbe& probe, std::span<const TokenDemand> demands) const;
  // Per group, the keys of the blocks to be copied for the probe's partial hit; empty without one.
  std::vector<std::vector<CacheKey>> CopiedKeys(const PrefixProbe& probe) const;
  void WithdrawPartialPage(const PrefixHash& name);
  // How many of these leading tokens of a partial page at `begin` every group can resume behind.
  int32_t TokensCovered(const PrefixHash& name, int32_t begin, int32_t num_tokens) const;
  // Makes the first of the group's new blocks destinations of copies.
  void CopyPartialPage(std::span<const CacheKey> keys, std::size_t g, AdmissionResult& result) const;
  // Per group: blocks that an admission takes from the device pool, those for the host's hits included.
  std::vector<int32_t> BlocksNeeded(const PrefixProbe& probe, std::span<const BlockTable> tables,
                                    std::span<const TokenDemand> demands) const;
  void ClaimHits(const PrefixProbe& probe, std::span<BlockTable> tables, uint64_t epoch);
  void EvictPlanned(std::span<const AdmissionVictim> victims, std::span<BlockTable> tables,
                    const RequestProgress& progress, uint64_t epoch);
  void PublishAndReclaim(std::span<BlockTable> tables, const RequestProgress& progress, uint64_t epoch);
  void Publish(std::span<BlockTable> tables, const CompletedPages& completed, uint64_t epoch);
  bool Evict(int32_t group_id, CacheBlockLocation location);
  void ReportStored(std::span<const CacheKey> keys);

  // Host acquisition (host_acquisition.cpp).
  const StorageKeySet* storage() const { return storage_ ? &*storage_ : nullptr; }
  ConvergedPrefix ProbeHost(const PrefixProbe& probe, int32_t num_prefix_pages) const;
  // Keys of a group's candidate slots from the device's prefix on.
  std::span<const CacheKey> KeysBehindDevice(const PrefixProbe& probe, std::size_t g) const;
  // Per group and bucket, how many copies of the host's hits must go there; empty for a group of one bucket.
  std::vector<std::vector<int32_t>> CopiesInBucket(const PrefixProbe& probe) const;
  // Pins what the host has of the probed prefix and finds room there for what only the store has; shortens the prefix
  // when there is not room enough.
  HostHit AcquireFromHost(const PrefixProbe& probe, uint64_t epoch);
  // One attempt at `prefix`. Nothing, or the first token position for which there is no room.
  std::optional<int32_t> FillHostHit(const PrefixProbe& probe, const ConvergedPrefix& prefix, uint64_t epoch,
                                     HostHit& hit);
  void AppendHostExtension(const PrefixProbe& probe, const HostHit& hit, std::size_t g, BlockTable& table,
                           std::vector<LoadPair>& pairs) const;
  bool TierIsClearable(const BlockPool& pool) const;

  void CheckShapes(std::span<const BlockTable> tables) const;
  void CheckProgress(const RequestProgress& progress) const;

  int32_t prefix_granularity_;
  DeviceMutationSink sink_;
  PrefixWatch watch_;
  HostTier host_;
  BlockPool pool_;  // both before the groups: their indexes own references into them
  BlockPool host_pool_;
  std::vector<CacheGroup> groups_;
  AdmissionPlanner planner_;
  PrefixProbe neutral_probe_;
  int32_t replay_window_ = 0;  // the longest of all groups
  bool has_closed_group_ = false;
  uint64_t last_epoch_ = 0;
  std::vector<CacheKey> pending_stores_;
  std::vector<int32_t> growth_;  // kept for its memory alone, as is new_keys_
  std::vector<CacheKey> new_keys_;
  std::optional<StorageKeySet> storage_;
  PartialPages partial_pages_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_CACHE_COORDINATOR_H_
