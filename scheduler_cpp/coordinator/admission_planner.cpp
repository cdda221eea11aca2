#include "coordinator/admission_planner.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"

namespace tokenspeed {
namespace {

// What would be free if the victims so far were gone. Holds occupancies of touched parents only.
class ShadowPool {
 public:
  ShadowPool(const BlockPool& pool, std::span<const int32_t> blocks_needed)
      : pool_(pool), empty_parents_(pool.NumEmptyLcmBlocks()) {
    for (std::size_t g = 0; g < blocks_needed.size(); ++g) {
      const auto group = static_cast<int32_t>(g);
      groups_.push_back({.needed = blocks_needed[g], .free = pool.NumFreeSlots(group), .packing = pool.Packing(group)});
    }
  }

  bool Fits() const {
    int64_t parents = 0;
    for (const Group& g : groups_) parents += (std::max<int64_t>(0, g.needed - g.free) + g.packing - 1) / g.packing;
    return parents <= empty_parents_;
  }

  void Remove(const AdmissionVictim& victim) {
    Group& g = groups_[victim.group];
    if (--Occupied(victim.location.lcm_block_id) == 0) {
      g.free -= g.packing - 1;
      ++empty_parents_;
    } else {
      ++g.free;
    }
  }

  void Restore(const AdmissionVictim& victim) {
    Group& g = groups_[victim.group];
    if (Occupied(victim.location.lcm_block_id)++ == 0) {
      g.free += g.packing - 1;
      --empty_parents_;
    } else {
      --g.free;
    }
  }

 private:
  struct Group {
    int64_t needed;
    int64_t free;
    int64_t packing;
  };

  int32_t& Occupied(int32_t lcm_block_id) {
    return occupied_.try_emplace(lcm_block_id, pool_.OccupiedCount(lcm_block_id)).first->second;
  }

  const BlockPool& pool_;
  std::vector<Group> groups_;
  int64_t empty_parents_;
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
  CandidateStream(std::span<const CacheGroup> groups, const BlockPool& pool, const AdmissionRequest& request)
      : groups_(groups), pool_(pool), excluded_(groups.size()) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (CacheBlockLocation location :
           groups[g].index().MatchedLocations(pool, request.hit_keys[g], request.hit_masks[g])) {
        excluded_[g].insert(location);
      }
    }
    if (request.num_computed_tokens) CollectOwnExpired(request.tables, *request.num_computed_tokens);
    for (const CacheGroup& group : groups) {
      queues_.push_back({.cursor = group.index().StartEviction(pool), .epoch = {}, .next = 0});
    }
    for (std::size_t g = 0; g < groups.size(); ++g) Refill(g);
  }

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

  void CollectOwnExpired(std::span<const BlockTable> tables, int32_t num_computed_tokens) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const CacheGroup& group = groups_[g];
      const int32_t expired = group.geometry().ExpiredBlocks(num_computed_tokens);
      for (CacheBlockLocation location : group.ReclaimableBlockLocationsAt(tables[g], expired)) {
        if (!excluded_[g].insert(location).second) continue;
        own_expired_.push_back(RankOf(group, location, group.index().MetadataFor(pool_, location)));
      }
    }
    std::sort(own_expired_.begin(), own_expired_.end());
  }

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

}  // namespace

std::optional<std::vector<AdmissionVictim>> PlanAdmission(std::span<const CacheGroup> groups, const BlockPool& pool,
                                                          const AdmissionRequest& request) {
  TOKENSPEED_CHECK(request.blocks_needed.size() == groups.size() && request.tables.size() == groups.size() &&
                       request.hit_keys.size() == groups.size() && request.hit_masks.size() == groups.size(),
                   "an admission does not cover every group");
  ShadowPool shadow(pool, request.blocks_needed);
  std::vector<AdmissionVictim> victims;
  if (shadow.Fits()) return victims;

  CandidateStream candidates(groups, pool, request);
  while (!shadow.Fits()) {
    const std::optional<AdmissionVictim> victim = candidates.Next();
    if (!victim) return std::nullopt;
    shadow.Remove(*victim);
    victims.push_back(*victim);
  }
  return Minimise(victims, shadow);
}

}  // namespace tokenspeed
