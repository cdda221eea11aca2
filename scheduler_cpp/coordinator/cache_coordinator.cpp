#include "coordinator/cache_coordinator.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "core/check.h"

namespace tokenspeed {
namespace {

std::vector<int32_t> Packings(std::span<const CacheGroupSpec> specs) {
  std::vector<int32_t> packings;
  for (const CacheGroupSpec& spec : specs) packings.push_back(spec.cache_blocks_per_lcm_block);
  return packings;
}

std::vector<CacheGroup> MakeGroups(BlockPool& pool, BlockPool& host_pool, std::span<const CacheGroupSpec> specs,
                                   int32_t prefix_granularity) {
  TOKENSPEED_CHECK(!specs.empty(), "a cache needs a group");
  std::vector<CacheGroup> groups;
  groups.reserve(specs.size());
  const bool has_state = std::ranges::any_of(
      specs, [](const CacheGroupSpec& spec) { return spec.kind == CacheGroupKind::kRecurrentState; });
  for (const CacheGroupSpec& spec : specs) {
    const auto id = static_cast<int32_t>(groups.size());
    const bool notes_continuations = has_state && spec.kind == CacheGroupKind::kFullAttention;
    groups.emplace_back(pool, id, spec, prefix_granularity, notes_continuations);
    host_pool.RegisterGroup(id, spec.cache_blocks_per_lcm_block, spec.shard_count);
  }
  return groups;
}

}  // namespace

int32_t PrefixProbe::promotion_boundary_tokens() const {
  const int32_t closed = std::max(device.prefix_closed_tokens, host.prefix_closed_tokens);
  return closed > prefix_tokens() ? closed : 0;
}

CacheCoordinator::CacheCoordinator(int32_t prefix_granularity, int32_t num_lcm_blocks,
                                   std::span<const CacheGroupSpec> specs, DeviceMutationSink sink,
                                   HostTier host)
    : prefix_granularity_(prefix_granularity),
      sink_(std::move(sink)),
      host_(host),
      pool_(num_lcm_blocks, Packings(specs)),
      host_pool_(host.num_lcm_blocks, Packings(specs)),
      groups_(MakeGroups(pool_, host_pool_, specs, prefix_granularity)),
      planner_(groups_, pool_) {
  int64_t num_host_blocks = 0;
  for (const CacheGroup& group : groups_) {
    replay_window_ = std::max(replay_window_, group.geometry().ReplayWindow());
    has_closed_group_ |= group.kind() == CacheGroupKind::kFullAttention;
    num_host_blocks += int64_t{host_.num_lcm_blocks} * group.allocator().packing();
    TOKENSPEED_CHECK(!host_.has_storage || group.allocator().shard_count() == 1,
                     "an external store does not know of shards");
  }
  TOKENSPEED_CHECK(HasHostTier() || !(host_.streams || host_.has_storage), "a tier below needs a host tier");
  if (host_.has_storage) storage_.emplace(num_host_blocks);
  neutral_probe_ = ProbePrefix({});
}

const CacheGroup& CacheCoordinator::group(int32_t group_id) const {
  TOKENSPEED_CHECK(group_id >= 0 && group_id < NumGroups(), "unknown group " + std::to_string(group_id));
  return groups_[group_id];
}

std::vector<BlockTable> CacheCoordinator::MakeTables() const { return std::vector<BlockTable>(groups_.size()); }

PrefixProbe CacheCoordinator::ProbePrefix(std::span<const PrefixHash> hashes, int32_t max_host_tokens) const {
  PrefixProbe probe = ProbeDevice(hashes, MatchedGroups::kAll);
  const auto num_pages = static_cast<int32_t>(hashes.size());
  if (HasHostTier() && num_pages > 0) {
    probe.host = ProbeHost(probe, std::min(num_pages, max_host_tokens / prefix_granularity_));
  }
  return probe;
}

PrefixProbe CacheCoordinator::ProbeDecodeDevicePrefix(std::span<const PrefixHash> hashes) const {
  return ProbeDevice(hashes, MatchedGroups::kAllButState);
}

// A stop serves those who part from the prompt there, and where somebody has parted, a third may come. A prompt that
// merely takes up where a cached one ended, as each turn of a conversation does, would stop for nobody: the next turn
// resumes from this one's own last snapshot. Should another prompt part from it there after all, then this one's
// continuation tells the next.
int32_t CacheCoordinator::PromotionWorthStopping(const PrefixProbe& probe) const {
  const int32_t boundary = probe.promotion_boundary_tokens();
  // Nothing is noted on the host. Without state only a window that was evicted lacks the boundary, which is rare.
  const bool has_notes = std::ranges::any_of(groups_, &CacheGroup::IsState);
  if (boundary == 0 || boundary > probe.device.prefix_closed_tokens || !has_notes) return boundary;
  const auto goes_on = [&](const CacheGroup& group) {
    if (!group.geometry().IsPrefixClosed()) return false;
    const int32_t end = boundary / group.geometry().block_granularity();
    const CacheKey& last = probe.keys[static_cast<std::size_t>(group.group_id())][static_cast<std::size_t>(end) - 1];
    return group.index().IsContinued(pool_, last);
  };
  return std::ranges::any_of(groups_, goes_on) ? boundary : 0;
}

PrefixProbe CacheCoordinator::ProbeDevice(std::span<const PrefixHash> hashes, MatchedGroups matched) const {
  PrefixProbe probe;
  for (const CacheGroup& group : groups_) probe.keys.push_back(group.ExpandKeys(hashes));
  probe.device = ConvergePrefix(groups_, {.pool = pool_}, probe.keys, static_cast<int32_t>(hashes.size()),
                                prefix_granularity_, matched);
  return probe;
}

std::optional<AdmissionResult> CacheCoordinator::Admit(const PrefixProbe& probe, std::span<BlockTable> tables,
                                                       std::span<const TokenDemand> demands,
                                                       const RequestProgress& progress,
                                                       std::optional<uint64_t> access_epoch) {
  CheckShapes(tables);
  CheckProgress(progress);
  TOKENSPEED_CHECK(demands.size() == groups_.size(), "one demand per group is needed");
  TOKENSPEED_CHECK(!access_epoch || (*access_epoch > 0 && *access_epoch <= last_epoch_),
                   "an access epoch was never issued");
  std::vector<TokenDemand> behind_hit;
  if (replay_window_ > 0 && probe.prefix_tokens() > 0) {
    behind_hit = DemandsBehind(probe.prefix_tokens(), demands);
    demands = behind_hit;
  } else if (probe.partial.num_tokens > 0) {
    behind_hit = DemandsInsidePage(probe, demands);
    demands = behind_hit;
  }
  const std::vector<int32_t> needed = BlocksNeeded(probe, tables, demands);
  const std::vector<std::vector<int32_t>> copies_in_bucket = CopiesInBucket(probe);
  const std::vector<std::vector<CacheKey>> copied_keys = CopiedKeys(probe);
  const std::optional<std::vector<AdmissionVictim>> victims =
      planner_.Plan({.blocks_needed = needed,
                     .needed_in_bucket = copies_in_bucket,
                     .hit_keys = probe.keys,
                     .hit_masks = probe.device.masks,
                     .copied_keys = copied_keys,
                     .tables = tables,
                     .num_computed_tokens = progress.num_computed_tokens});
  if (!victims) return std::nullopt;

  AdmissionResult result;
  result.device_prefix_tokens = probe.device_prefix_tokens();
  result.promotion_boundary_tokens = probe.promotion_boundary_tokens();
  result.access_epoch = access_epoch ? *access_epoch : ++last_epoch_;
  ClaimHits(probe, tables, result.access_epoch);
  const HostHit host = AcquireFromHost(probe, result.access_epoch);
  result.host_prefix_tokens = host.num_common_tokens;
  EvictPlanned(*victims, tables, progress, result.access_epoch);

  result.new_block_ids.resize(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    AppendHostExtension(probe, host, g, tables[g], result.load_pairs);
    const AcquirePlan plan = groups_[g].geometry().Plan(tables[g], demands[g]);
    const bool acquired = groups_[g].allocator().Acquire(tables[g], plan, result.new_block_ids[g]);
    TOKENSPEED_CHECK(acquired, "a planned admission does not fit");
    if (!copied_keys.empty()) CopyPartialPage(copied_keys[g], g, result);
  }
  return result;
}

bool CacheCoordinator::Grow(std::span<BlockTable> tables, int32_t num_tokens, const RequestProgress& progress,
                            uint64_t access_epoch, std::vector<std::vector<int32_t>>& new_block_ids) {
  CheckShapes(tables);
  CheckProgress(progress);
  TOKENSPEED_CHECK(access_epoch > 0 && access_epoch <= last_epoch_, "an access epoch was never issued");
  const TokenDemand demand{.extent = DenseGrowth{num_tokens}};
  growth_.resize(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) growth_[g] = groups_[g].geometry().BlocksNeeded(tables[g], demand);
  const auto victims = planner_.Plan({.blocks_needed = growth_,
                                      .hit_keys = neutral_probe_.keys,
                                      .hit_masks = neutral_probe_.device.masks,
                                      .tables = tables,
                                      .num_computed_tokens = progress.num_computed_tokens});
  if (!victims) return false;
  EvictPlanned(*victims, tables, progress, access_epoch);
  new_block_ids.resize(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const AcquirePlan plan = groups_[g].geometry().Plan(tables[g], demand);
    const bool acquired = groups_[g].allocator().Acquire(tables[g], plan, new_block_ids[g]);
    TOKENSPEED_CHECK(acquired, "a planned admission does not fit");
  }
  return true;
}

std::vector<int32_t> CacheCoordinator::BlocksNeeded(const PrefixProbe& probe, std::span<const BlockTable> tables,
                                                    std::span<const TokenDemand> demands) const {
  std::vector<int32_t> needed;
  needed.reserve(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    TOKENSPEED_CHECK(probe.prefix_tokens() == 0 || tables[g].blocks.empty(),
                     "a prefix hit is claimed into a table that is in use");
    needed.push_back(groups_[g].geometry().BlocksNeeded(tables[g], demands[g]));
    if (!probe.ExtendsOnHost()) continue;
    needed[g] += static_cast<int32_t>(std::count(probe.host.masks[g].begin(), probe.host.masks[g].end(), 1));
  }
  return needed;
}

std::vector<TokenDemand> CacheCoordinator::DemandsBehind(int32_t hit, std::span<const TokenDemand> demands) const {
  std::vector<TokenDemand> behind(demands.begin(), demands.end());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto* dense = std::get_if<DenseGrowth>(&behind[g].extent);
    if (groups_[g].SharesPrefixes() || dense == nullptr) continue;
    // Every replayable group sees every token fed again, however short its own window.
    behind[g].extent = SparseSuffix{
        .extent_tokens = hit + dense->num_tokens,
        .first_block = (hit - std::min(replay_window_, hit)) / groups_[g].geometry().block_granularity()};
  }
  return behind;
}

void CacheCoordinator::ClaimHits(const PrefixProbe& probe, std::span<BlockTable> tables, uint64_t epoch) {
  if (probe.device_prefix_tokens() == 0) return;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!groups_[g].SharesPrefixes()) continue;
    groups_[g].allocator().ClaimHitBlocks(
        tables[g], groups_[g].index().AcquireMatched(pool_, probe.keys[g], probe.device.masks[g], epoch));
  }
}

void CacheCoordinator::EvictPlanned(std::span<const AdmissionVictim> victims, std::span<BlockTable> tables,
                                    const RequestProgress& progress, uint64_t epoch) {
  // Victims that this request's own table still holds go once its expired slots have been reclaimed.
  std::vector<AdmissionVictim> prospective;
  for (const AdmissionVictim& victim : victims) {
    if (!Evict(victim.group, victim.location)) prospective.push_back(victim);
  }
  PublishAndReclaim(tables, progress, epoch);
  for (const AdmissionVictim& victim : prospective) {
    const bool gone = Evict(victim.group, victim.location) || !pool_.IsOccupied(victim.location);
    TOKENSPEED_CHECK(gone, "a planned victim is still held");
  }
}

void CacheCoordinator::PublishAndReclaim(std::span<BlockTable> tables, const RequestProgress& progress,
                                         uint64_t epoch) {
  // An expiring block is given its key before it goes.
  if (progress.completed_pages) Publish(tables, *progress.completed_pages, epoch);
  if (!progress.num_computed_tokens) return;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].allocator().ReclaimExpired(tables[g], groups_[g].geometry().ExpiredBlocks(*progress.num_computed_tokens));
  }
}

void CacheCoordinator::Publish(std::span<BlockTable> tables, const CompletedPages& completed, uint64_t epoch) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    new_keys_.clear();
    groups_[g].Publish(tables[g], completed, epoch, new_keys_);
    ReportStored(new_keys_);
    const bool expires = groups_[g].kind() == CacheGroupKind::kSlidingWindow;
    if (!host_.streams || !(expires || completed.stream_completed_to_host)) continue;
    pending_stores_.insert(pending_stores_.end(), new_keys_.begin(), new_keys_.end());
  }
}

void CacheCoordinator::CacheCompletedBlocks(std::span<BlockTable> tables, const RequestProgress& progress,
                                            uint64_t access_epoch) {
  CheckShapes(tables);
  CheckProgress(progress);
  TOKENSPEED_CHECK(access_epoch > 0 && access_epoch <= last_epoch_, "an access epoch was never issued");
  if (progress.completed_pages) Publish(tables, *progress.completed_pages, access_epoch);
}

void CacheCoordinator::CacheFullBlocks(std::span<BlockTable> tables, std::span<const PrefixHash> hashes,
                                       uint64_t access_epoch, int32_t first_prefix_page, BoundaryKind kind) {
  CheckShapes(tables);
  TOKENSPEED_CHECK(access_epoch > 0 && access_epoch <= last_epoch_, "an access epoch was never issued");
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const int32_t first_slot = first_prefix_page * groups_[g].geometry().BlocksPerPrefixPage();
    std::vector<CacheKey> new_keys;
    groups_[g].PublishRange(tables[g], hashes, first_slot, access_epoch, kind, new_keys);
    ReportStored(new_keys);
  }
}

void CacheCoordinator::Free(std::span<BlockTable> tables) {
  CheckShapes(tables);
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].allocator().Free(tables[g]);
}

bool CacheCoordinator::ConsumeInPlace(std::span<BlockTable> tables, int32_t num_tokens, int32_t num_computed_tokens) {
  CheckShapes(tables);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (tables[g].available_tokens < num_tokens) return false;
    const int32_t expired = groups_[g].geometry().ExpiredBlocks(num_computed_tokens);
    if (expired > 0 && groups_[g].allocator().HasReclaimableBlocksAt(tables[g], expired)) return false;
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].allocator().ConsumeReservedTokens(tables[g], num_tokens);
  return true;
}

int32_t CacheCoordinator::NumAvailableLcmBlocks() const {
  return pool_.NumEmptyLcmBlocks() + pool_.NumEvictableLcmBlocks();
}

int32_t CacheCoordinator::NumNewlyReleasableLcmBlocks(std::span<const BlockTable> tables) const {
  CheckShapes(tables);
  std::map<CacheBlockLocation, int32_t> own_references;  // ordered, so that parents come one after another
  for (const BlockTable& table : tables) {
    for (const CacheBlockRef& block : table.blocks) {
      if (block) ++own_references[block->Location()];
    }
  }
  const auto releasable = [&](int32_t parent) {
    const PrefixCacheIndex& index = groups_[pool_.BoundGroup(parent)].index();
    for (CacheBlockLocation location : pool_.OccupiedLocations(parent)) {
      const auto own = own_references.find(location);
      const int32_t others = pool_.UseCount(location) - (own == own_references.end() ? 0 : own->second);
      if (others != (index.Contains(pool_, location) ? 1 : 0)) return false;
    }
    return true;
  };
  int32_t count = 0;
  int32_t previous = 0;
  for (const auto& [location, references] : own_references) {
    if (location.lcm_block_id != previous && releasable(location.lcm_block_id)) ++count;
    previous = location.lcm_block_id;
  }
  return count;
}

BoundaryResidency CacheCoordinator::DeviceBoundaryResidency(const PrefixHash& hash) const {
  std::size_t cached = 0;
  std::size_t total = 0;
  for (const CacheGroup& group : groups_) {
    // A closed group keeps every page of a chain; a sliding window and a state keep but some.
    const bool counts = has_closed_group_ ? group.kind() == CacheGroupKind::kFullAttention : group.SharesPrefixes();
    if (!counts) continue;
    const std::vector<CacheKey> keys = group.ExpandKeys({&hash, 1});
    total += keys.size();
    cached += static_cast<std::size_t>(std::count_if(
        keys.begin(), keys.end(), [&](const CacheKey& key) { return group.index().Contains(pool_, key); }));
  }
  if (cached == 0) return BoundaryResidency::kNone;
  return cached == total ? BoundaryResidency::kComplete : BoundaryResidency::kPartial;
}

bool CacheCoordinator::Evict(int32_t group_id, CacheBlockLocation location) {
  const std::optional<CacheKey> removed = groups_[group_id].index().Evict(pool_, location);
  if (!removed) return false;
  if (removed->namespace_id == kPartialPages) {
    partial_pages_.ForgetBlock(removed->content_hash);
  } else if (sink_) {
    sink_(*removed, DeviceMutation::kRemoved);
  }
  return true;
}

void CacheCoordinator::ReportStored(std::span<const CacheKey> keys) {
  for (const CacheKey& key : keys) watch_.Note(key.content_hash);
  if (!sink_) return;
  for (const CacheKey& key : keys) sink_(key, DeviceMutation::kStored);
}

void CacheCoordinator::CheckShapes(std::span<const BlockTable> tables) const {
  TOKENSPEED_CHECK(tables.size() == groups_.size(), "one table per group is needed");
}

void CacheCoordinator::CheckProgress(const RequestProgress& progress) const {
  if (progress.num_computed_tokens) {
    TOKENSPEED_CHECK(*progress.num_computed_tokens >= 0, "a computed frontier is negative");
  }
  if (!progress.completed_pages) return;
  const CompletedPages& completed = *progress.completed_pages;
  const auto num_pages = static_cast<int64_t>(completed.prefix_hashes.size());
  TOKENSPEED_CHECK(progress.num_computed_tokens.has_value(), "completed pages come without a computed frontier");
  TOKENSPEED_CHECK(completed.first_new_prefix_page >= 0 && completed.first_new_prefix_page < num_pages,
                   "completed pages contain no new page");
  TOKENSPEED_CHECK(num_pages * prefix_granularity_ <= *progress.num_computed_tokens,
                   "a page is published above the computed frontier");
}

}  // namespace tokenspeed
