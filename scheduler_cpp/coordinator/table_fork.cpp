#include "coordinator/table_fork.h"

#include <algorithm>
#include <utility>

#include "coordinator/cache_coordinator.h"
#include "core/check.h"

namespace tokenspeed {

std::vector<CacheBlockRef> TableFork::SharedBlocks(const BlockTable& parent) const {
  std::vector<CacheBlockRef> blocks(static_cast<std::size_t>(end_shared));
  for (int32_t slot = first_slot; slot < end_shared; ++slot) blocks[slot] = parent.blocks[slot];
  return blocks;
}

std::optional<TableFork> ForkAt(const CacheGroup& group, const BlockTable& parent, int32_t position,
                                int32_t common_tokens) {
  const GroupGeometry& geometry = group.geometry();
  if (!geometry.HoldsRows()) return std::nullopt;
  const int32_t first = geometry.ExpiredBlocks(position);
  const int32_t end = geometry.EndOfReadBlocks(position);
  TOKENSPEED_CHECK(end <= parent.NumSlots(), "a table is forked above its end");
  for (int32_t slot = first; slot < end; ++slot) {
    if (!parent.blocks[slot]) return std::nullopt;
  }
  int32_t end_shared = position / geometry.block_granularity();
  if (group.SharesPrefixes()) end_shared = std::min(end_shared, geometry.BlocksInPrefixPages(common_tokens));
  // Where the window starts behind that, nothing is shared, and the slots before it stay holes.
  end_shared = std::max(end_shared, first);
  return TableFork{.first_slot = first, .end_shared = end_shared, .end_copied = std::max(end, end_shared)};
}

std::optional<std::vector<TableFork>> CacheCoordinator::PlanFork(std::span<const BlockTable> parent,
                                                                 int32_t position, int32_t common_tokens) const {
  CheckShapes(parent);
  std::vector<TableFork> forks;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::optional<TableFork> fork = ForkAt(groups_[g], parent[g], position, common_tokens);
    if (!fork) return std::nullopt;
    forks.push_back(*fork);
  }
  return forks;
}

std::optional<ForkedAdmission> CacheCoordinator::Fork(std::span<const TableFork> forks,
                                                      std::span<const BlockTable> parent, int32_t position,
                                                      std::span<const TokenDemand> demands,
                                                      std::span<BlockTable> tables) {
  CheckShapes(parent);
  CheckShapes(tables);
  TOKENSPEED_CHECK(forks.size() == groups_.size() && demands.size() == groups_.size(),
                   "one fork and one demand per group are needed");
  std::vector<TokenDemand> behind_shared;  // growth from the end of the shared blocks, not from the position
  std::vector<int32_t> needed;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupGeometry& geometry = groups_[g].geometry();
    TOKENSPEED_CHECK(tables[g].blocks.empty(), "a fork is claimed into a table that is in use");
    const int32_t end = position + std::get<DenseGrowth>(demands[g].extent).num_tokens;
    behind_shared.push_back({.extent = DenseGrowth{end - forks[g].end_shared * geometry.block_granularity()},
                             .reserve_tokens = demands[g].reserve_tokens});
    needed.push_back(geometry.BlocksNeeded(tables[g], behind_shared[g]));
  }
  // What is shared needs no protection from eviction: the parent holds it.
  const PrefixProbe no_hit = ProbePrefix({});
  const auto victims = planner_.Plan({.blocks_needed = needed,
                                      .hit_keys = no_hit.keys,
                                      .hit_masks = no_hit.device.masks,
                                      .tables = tables,
                                      .num_computed_tokens = std::nullopt});
  if (!victims) return std::nullopt;

  ForkedAdmission forked{.access_epoch = ++last_epoch_,
                         .new_block_ids = std::vector<std::vector<int32_t>>(groups_.size()),
                         .copies = std::vector<std::vector<BlockCopy>>(groups_.size())};
  for (const AdmissionVictim& victim : *victims) {
    const bool gone = Evict(victim.group, victim.location);
    TOKENSPEED_CHECK(gone, "a planned victim is still held");
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupAllocator& allocator = groups_[g].allocator();
    std::vector<int32_t>& acquired = forked.new_block_ids[g];
    allocator.ClaimHitBlocks(tables[g], forks[g].SharedBlocks(parent[g]));
    const bool fits = allocator.Acquire(tables[g], groups_[g].geometry().Plan(tables[g], behind_shared[g]), acquired);
    TOKENSPEED_CHECK(fits, "a planned admission does not fit");
    const auto first_fresh = acquired.begin() + (forks[g].end_copied - forks[g].end_shared);
    for (int32_t slot = forks[g].end_shared; slot < forks[g].end_copied; ++slot) {
      forked.copies[g].push_back({.source = allocator.BlockId(parent[g].blocks[slot]),
                                  .destination = allocator.BlockId(tables[g].blocks[slot])});
    }
    acquired.erase(acquired.begin(), first_fresh);
  }
  return forked;
}

}  // namespace tokenspeed
