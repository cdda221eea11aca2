#include "coordinator/admission_planner.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"

namespace tokenspeed {
namespace {

// Whether the needs fit into so many empty parents and free slots per group.
bool Fits(const BlockPool& pool, std::span<const int32_t> blocks_needed, int64_t empty_parents,
          std::span<const int64_t> free_slots) {
  for (std::size_t g = 0; g < blocks_needed.size(); ++g) {
    const int64_t packing = pool.Packing(static_cast<int32_t>(g));
    empty_parents -= (std::max<int64_t>(0, blocks_needed[g] - free_slots[g]) + packing - 1) / packing;
  }
  return empty_parents >= 0;
}

// Free slots per bucket of one group whose blocks must lie in certain buckets.
class ShadowBuckets {
 public:
  ShadowBuckets(const BlockPool& pool, int32_t group, std::span<const int32_t> needed)
      : needed_(needed), per_parent_(pool.Packing(group) / NumBuckets()), free_(needed.size(), 0) {
    for (int32_t parent = 1; parent <= pool.NumLcmBlocks(); ++parent) {
      if (pool.BoundGroup(parent) != group) continue;
      for (int64_t& free : free_) free += per_parent_;
      for (CacheBlockLocation location : pool.OccupiedLocations(parent)) --FreeAt(location);
    }
  }

  // Parents that must be opened for the bucket that lacks most.
  int64_t ParentsNeeded() const {
    int64_t parents = 0;
    for (std::size_t bucket = 0; bucket < free_.size(); ++bucket) {
      parents = std::max(parents, (std::max<int64_t>(0, needed_[bucket] - free_[bucket]) + per_parent_ - 1) / per_parent_);
    }
    return parents;
  }

  void Change(CacheBlockLocation location, int32_t by) { FreeAt(location) += by; }
  // A whole parent joins or leaves those bound to the group.
  void ChangeAll(int32_t parents) {
    for (int64_t& free : free_) free += parents * per_parent_;
  }

 private:
  int32_t NumBuckets() const { return static_cast<int32_t>(needed_.size()); }
  int64_t& FreeAt(CacheBlockLocation location) {
    return free_[static_cast<std::size_t>(location.slot_index % NumBuckets())];
  }

  std::span<const int32_t> needed_;
  int64_t per_parent_;
  std::vector<int64_t> free_;
};

// What would be free if the victims so far were gone. Holds occupancies of touched parents only.
class ShadowPool {
 public:
  ShadowPool(const BlockPool& pool, const AdmissionRequest& request)
      : pool_(pool), blocks_needed_(request.blocks_needed), empty_parents_(pool.NumEmptyLcmBlocks()) {
    for (int32_t group = 0; group < pool.NumGroups(); ++group) free_slots_.push_back(pool.NumFreeSlots(group));
    for (std::size_t group = 0; group < request.needed_in_bucket.size(); ++group) {
      const std::vector<int32_t>& needed = request.needed_in_bucket[group];
      if (needed.empty()) continue;
      const auto id = static_cast<int32_t>(group);
      buckets_.emplace(id, ShadowBuckets(pool, id, needed));
    }
  }

  bool Fits() const {
    int64_t spare = empty_parents_;
    for (const auto& [group, buckets] : buckets_) {
      const int64_t packing = pool_.Packing(group);
      const int64_t missing = std::max<int64_t>(0, blocks_needed_[group] - free_slots_[group]);
      spare -= std::max<int64_t>(0, buckets.ParentsNeeded() - (missing + packing - 1) / packing);
    }
    return tokenspeed::Fits(pool_, blocks_needed_, spare, free_slots_);
  }
  int64_t empty_parents() const { return empty_parents_; }
  const std::vector<int64_t>& free_slots() const { return free_slots_; }

  void Remove(const AdmissionVictim& victim) {
    const bool empties = --Occupied(victim.location.lcm_block_id) == 0;
    ChangeBuckets(victim, 1, empties ? -1 : 0);
    if (empties) {
      free_slots_[victim.group] -= pool_.Packing(victim.group) - 1;
      ++empty_parents_;
    } else {
      ++free_slots_[victim.group];
    }
  }

  void Restore(const AdmissionVictim& victim) {
    const bool was_empty = Occupied(victim.location.lcm_block_id)++ == 0;
    ChangeBuckets(victim, -1, was_empty ? 1 : 0);
    if (was_empty) {
      free_slots_[victim.group] += pool_.Packing(victim.group) - 1;
      --empty_parents_;
    } else {
      --free_slots_[victim.group];
    }
  }

 private:
  int32_t& Occupied(int32_t lcm_block_id) {
    return occupied_.try_emplace(lcm_block_id, pool_.OccupiedCount(lcm_block_id)).first->second;
  }

  void ChangeBuckets(const AdmissionVictim& victim, int32_t slots, int32_t parents) {
    const auto buckets = buckets_.find(victim.group);
    if (buckets == buckets_.end()) return;
    buckets->second.Change(victim.location, slots);
    buckets->second.ChangeAll(parents);
  }

  const BlockPool& pool_;
  std::span<const int32_t> blocks_needed_;
  int64_t empty_parents_;
  std::vector<int64_t> free_slots_;
  std::map<int32_t, ShadowBuckets> buckets_;  // of the groups with a need in certain buckets
  std::unordered_map<int32_t, int32_t> occupied_;
};

// Value of a block to the cache. The smallest goes first.
struct EvictionRank {
  uint64_t epoch = 0;
  int32_t tier = 0;  // 0 uncached, 1 probationary boundary, 2 established boundary, 3 closed prefix
  int32_t position = 0;
  int32_t group = 0;
  CacheBlockLocation location;

  friend auto operator<=>(const EvictionRank&, const EvictionRank&) = default;
};

EvictionRank RankOf(const CacheGroup& group, CacheBlockLocation location,
                    const std::optional<PrefixEntryMetadata>& metadata) {
  EvictionRank rank{.epoch = 0, .tier = 0, .position = 0, .group = group.group_id(), .location = location};
  if (!metadata) return rank;
  const int32_t index = metadata->logical_block_index;
  rank.epoch = metadata->last_access_epoch;
  if (group.geometry().IsPrefixClosed()) {
    rank.tier = 3;
    if (index >= 0) rank.position = -index;  // a prefix is worth more than what follows it
  } else if (metadata->boundary_kind == BoundaryKind::kChunk && !metadata->was_acquired && index >= 0) {
    rank.tier = 1;
    rank.position = index;  // of unproven resume points the deepest is worth most
  } else {
    rank.tier = 2;
  }
  return rank;
}

// All candidates in rank order: the request's own expiring blocks, merged with one cursor per index.
class CandidateStream {
 public:
  CandidateStream(std::span<const CacheGroup> groups, const BlockPool& pool, const AdmissionRequest& request,
                  std::span<const AdmissionVictim> own_expired)
      : groups_(groups), pool_(pool), excluded_(groups.size()) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const CacheGroup& group = groups[g];
      for (CacheBlockLocation hit : group.index().MatchedLocations(pool, request.hit_keys[g], request.hit_masks[g])) {
        if (excluded_[g].insert(hit).second) hits_.push_back({group.group_id(), hit});
      }
    }
    for (const auto& [g, location] : own_expired) {
      if (!excluded_[g].insert(location).second) continue;
      own_expired_.push_back(RankOf(groups[g], location, groups[g].index().MetadataFor(pool, location)));
    }
    std::sort(own_expired_.begin(), own_expired_.end());
    for (const CacheGroup& group : groups) {
      queues_.push_back({.cursor = group.index().StartEviction(pool), .epoch = {}, .next = 0});
    }
    for (std::size_t g = 0; g < groups.size(); ++g) Refill(g);
  }

  // Blocks that this admission hits; never candidates.
  std::span<const AdmissionVictim> hits() const { return hits_; }

  std::optional<AdmissionVictim> Next() {
    const EvictionRank* best = next_own_ < own_expired_.size() ? &own_expired_[next_own_] : nullptr;
    std::optional<std::size_t> from;
    for (std::size_t g = 0; g < queues_.size(); ++g) {
      const Queue& queue = queues_[g];
      if (queue.next == queue.epoch.size()) continue;
      const EvictionRank& head = queue.epoch[queue.next];
      if (best != nullptr && *best < head) continue;
      best = &head;
      from = g;
    }
    if (best == nullptr) return std::nullopt;
    const AdmissionVictim victim{best->group, best->location};
    if (!from) {
      ++next_own_;
    } else if (++queues_[*from].next == queues_[*from].epoch.size()) {
      Refill(*from);
    }
    return victim;
  }

 private:
  struct Queue {
    PrefixCacheIndex::EvictionCursor cursor;
    std::vector<EvictionRank> epoch;  // the cursor's current epoch, sorted
    std::size_t next;
  };

  void Refill(std::size_t g) {
    Queue& queue = queues_[g];
    queue.next = 0;
    queue.epoch.clear();
    std::vector<PrefixCacheIndex::Candidate> candidates;
    while (queue.epoch.empty() && groups_[g].index().NextEvictionEpoch(pool_, queue.cursor, candidates)) {
      for (const PrefixCacheIndex::Candidate& candidate : candidates) {
        if (excluded_[g].contains(candidate.location)) continue;
        queue.epoch.push_back(RankOf(groups_[g], candidate.location, candidate.metadata));
      }
      candidates.clear();
    }
    std::sort(queue.epoch.begin(), queue.epoch.end());
  }

  std::span<const CacheGroup> groups_;
  const BlockPool& pool_;
  // Per group: hit by this admission, or among own_expired_.
  std::vector<std::unordered_set<CacheBlockLocation, CacheBlockLocationHash>> excluded_;
  std::vector<AdmissionVictim> hits_;
  std::vector<EvictionRank> own_expired_;
  std::size_t next_own_ = 0;
  std::vector<Queue> queues_;
};

// Gives back, most valuable first, every victim that turns out not to be needed.
std::vector<AdmissionVictim> Minimise(const std::vector<AdmissionVictim>& victims, ShadowPool& shadow) {
  std::vector<bool> kept(victims.size(), false);
  for (std::size_t i = victims.size(); i-- > 0;) {
    shadow.Restore(victims[i]);
    if (shadow.Fits()) continue;
    shadow.Remove(victims[i]);
    kept[i] = true;
  }
  std::vector<AdmissionVictim> minimal;
  for (std::size_t i = 0; i < victims.size(); ++i) {
    if (kept[i]) minimal.push_back(victims[i]);
  }
  return minimal;
}

// What the request's own tables let go of at its frontier.
std::vector<AdmissionVictim> OwnExpired(std::span<const CacheGroup> groups, const AdmissionRequest& request) {
  std::vector<AdmissionVictim> expired;
  if (!request.num_computed_tokens) return expired;
  for (const CacheGroup& group : groups) {
    const int32_t blocks = group.geometry().ExpiredBlocks(*request.num_computed_tokens);
    for (CacheBlockLocation location : group.ReclaimableBlockLocationsAt(request.tables[group.group_id()], blocks)) {
      expired.push_back({group.group_id(), location});
    }
  }
  return expired;
}

}  // namespace

std::optional<std::vector<AdmissionVictim>> AdmissionPlanner::Plan(const AdmissionRequest& request) {
  TOKENSPEED_CHECK(request.blocks_needed.size() == groups_.size() && request.tables.size() == groups_.size() &&
                       request.hit_keys.size() == groups_.size() && request.hit_masks.size() == groups_.size(),
                   "an admission does not cover every group");
  ShadowPool shadow(pool_, request);
  std::vector<AdmissionVictim> victims;
  if (shadow.Fits()) return victims;

  const std::vector<AdmissionVictim> own_expired = OwnExpired(groups_, request);
  const bool bounded = obtainable_ && obtainable_->dropped_handles == pool_.NumDroppedHandles() && own_expired.empty();
  if (bounded && !Fits(pool_, request.blocks_needed, obtainable_->empty_parents, obtainable_->free_slots)) {
    return std::nullopt;
  }

  CandidateStream candidates(groups_, pool_, request, own_expired);
  while (!shadow.Fits()) {
    const std::optional<AdmissionVictim> victim = candidates.Next();
    if (!victim) {
      // Another request may evict what this one hits, so those blocks count as obtainable.
      for (const AdmissionVictim& hit : candidates.hits()) {
        if (pool_.UseCount(hit.location) == 1) shadow.Remove(hit);
      }
      obtainable_ = {pool_.NumDroppedHandles(), shadow.empty_parents(), shadow.free_slots()};
      return std::nullopt;
    }
    shadow.Remove(*victim);
    victims.push_back(*victim);
  }
  return Minimise(victims, shadow);
}

}  // namespace tokenspeed
