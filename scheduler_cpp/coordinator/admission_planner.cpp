#include "coordinator/admission_planner.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <map>
#include <tuple>
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

// The same with the pool as it is, and with one group's block gone.
bool FitsWithout(const BlockPool& pool, std::span<const int32_t> blocks_needed, const AdmissionVictim* victim) {
  const bool empties = victim != nullptr && pool.OccupiedCount(victim->location.lcm_block_id) == 1;
  int64_t empty_parents = int64_t{pool.NumEmptyLcmBlocks()} + (empties ? 1 : 0);
  for (std::size_t g = 0; g < blocks_needed.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    const int64_t packing = pool.Packing(group);
    int64_t free_slots = pool.NumFreeSlots(group);
    if (victim != nullptr && victim->group == group) free_slots += empties ? 1 - packing : 1;
    empty_parents -= (std::max<int64_t>(0, blocks_needed[g] - free_slots) + packing - 1) / packing;
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

// All candidates, the least valuable first: the request's own expiring blocks, merged with one cursor per index.
class CandidateStream {
 public:
  CandidateStream(std::span<const CacheGroup> groups, const BlockPool& pool, const AdmissionRequest& request,
                  std::span<const AdmissionVictim> own_expired)
      : hit_locations_(groups.size()) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const PrefixCacheIndex& index = groups[g].index();
      Keep(g, index.MatchedLocations(pool, request.hit_keys[g], request.hit_masks[g]));
      if (request.copied_keys.empty()) continue;
      const std::vector<CacheKey>& copied = request.copied_keys[g];
      Keep(g, index.MatchedLocations(pool, copied, PrefixMask(copied.size(), 1)));
    }
    for (const auto& [g, location] : own_expired) {
      if (!hit_locations_[g].contains(location)) {
        own_expired_.push_back({groups[g].index().RankAt(pool, location), g});
      }
    }
    std::sort(own_expired_.begin(), own_expired_.end(), &IsLessValuable);
    cursors_.reserve(groups.size());
    for (const CacheGroup& group : groups) cursors_.push_back(group.index().StartEviction(pool));
  }

  // Blocks that this admission hits or copies; never candidates.
  std::span<const AdmissionVictim> hits() const { return hits_; }

  std::optional<AdmissionVictim> Next() {
    const Ranked* best = next_own_ < own_expired_.size() ? &own_expired_[next_own_] : nullptr;
    Ranked head;
    PrefixCacheIndex::EvictionCursor* from = nullptr;
    for (std::size_t g = 0; g < cursors_.size(); ++g) {
      const EvictionRank* rank = SkipHits(g);
      if (rank == nullptr) continue;
      const Ranked ranked{*rank, static_cast<int32_t>(g)};
      if (best != nullptr && !IsLessValuable(ranked, *best)) continue;
      head = ranked;
      best = &head;
      from = &cursors_[g];
    }
    if (best == nullptr) return std::nullopt;
    if (from == nullptr) {
      ++next_own_;
    } else {
      from->Advance();
    }
    return AdmissionVictim{best->group, best->rank.location};
  }

 private:
  struct Ranked {
    EvictionRank rank;
    int32_t group = 0;
  };

  void Keep(std::size_t g, std::span<const CacheBlockLocation> locations) {
    for (CacheBlockLocation location : locations) {
      if (hit_locations_[g].insert(location).second) hits_.push_back({static_cast<int32_t>(g), location});
    }
  }

  static bool IsLessValuable(const Ranked& a, const Ranked& b) {
    return std::tie(a.rank.epoch, a.rank.tier, a.rank.position, a.group, a.rank.location) <
           std::tie(b.rank.epoch, b.rank.tier, b.rank.position, b.group, b.rank.location);
  }

  const EvictionRank* SkipHits(std::size_t g) {
    const EvictionRank* rank = cursors_[g].rank();
    while (rank != nullptr && !hit_locations_[g].empty() && hit_locations_[g].contains(rank->location)) {
      cursors_[g].Advance();
      rank = cursors_[g].rank();
    }
    return rank;
  }

  std::vector<std::unordered_set<CacheBlockLocation, CacheBlockLocationHash>> hit_locations_;  // per group
  std::vector<AdmissionVictim> hits_;
  std::vector<Ranked> own_expired_;
  std::size_t next_own_ = 0;
  std::vector<PrefixCacheIndex::EvictionCursor> cursors_;
};

// Whether the only blocks that matter are those that the indexes would let go of.
bool IsPlainGrowth(const AdmissionRequest& request) {
  const auto hits_nothing = [](const PrefixMask& mask) { return mask.empty(); };
  return request.needed_in_bucket.empty() && request.copied_keys.empty() &&
         std::ranges::all_of(request.hit_masks, hits_nothing);
}

// The least valuable of all cached blocks that nobody uses.
std::optional<AdmissionVictim> LeastValuable(std::span<const CacheGroup> groups, const BlockPool& pool) {
  const EvictionRank* least = nullptr;
  int32_t from = 0;
  const auto key = [](const EvictionRank& rank) { return std::tie(rank.epoch, rank.tier, rank.position); };
  for (const CacheGroup& group : groups) {
    const EvictionRank* rank = group.index().StartEviction(pool).rank();
    if (rank == nullptr || (least != nullptr && !(key(*rank) < key(*least)))) continue;
    least = rank;
    from = group.group_id();
  }
  return least == nullptr ? std::nullopt : std::optional(AdmissionVictim{from, least->location});
}

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
  std::vector<AdmissionVictim> victims;
  const bool plain = IsPlainGrowth(request);
  if (plain && FitsWithout(pool_, request.blocks_needed, nullptr)) return victims;
  const std::vector<AdmissionVictim> own_expired = OwnExpired(groups_, request);
  if (plain && own_expired.empty()) {
    // A decode step of a full cache: one block has to go, and the search below would find this one.
    const std::optional<AdmissionVictim> least = LeastValuable(groups_, pool_);
    if (least && FitsWithout(pool_, request.blocks_needed, &*least)) {
      victims.push_back(*least);
      return victims;
    }
  }
  ShadowPool shadow(pool_, request);
  if (shadow.Fits()) return victims;

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
