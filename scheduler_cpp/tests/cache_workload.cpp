#include "tests/cache_workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>


namespace tokenspeed::testing {

void CacheWorkload::Run() {
  while (!bytes_.empty() && !::testing::Test::HasFailure()) {
    Step();
    // Now and then only the host remembers.
    if (Below(24) == 0) {
      while (!requests_.empty()) Leave(0, true);
      cache_.ClearDeviceCache();
    }
    for (Request& request : requests_) CheckTables(request);
    CheckGauges();
  }
  while (!requests_.empty()) Leave(0, false);
  while (!copies_.empty()) EndCopy(0);
  EXPECT_EQ(cache_.NumAvailableLcmBlocks(), cache_.device_pool().NumLcmBlocks());
  EXPECT_EQ(cache_.NumHostPinnedBlocks(), 0);
  EXPECT_TRUE(cache_.ClearCache());
  EXPECT_EQ(cache_.NumEmptyLcmBlocks(), cache_.device_pool().NumLcmBlocks());
  EXPECT_EQ(cache_.host_pool().NumEmptyLcmBlocks(), cache_.host_pool().NumLcmBlocks());
}

int32_t CacheWorkload::Below(int32_t bound) {
  if (bytes_.empty()) return 0;
  const int32_t value = bytes_.front() % bound;
  bytes_ = bytes_.subspan(1);
  return value;
}

std::vector<CacheGroupSpec> CacheWorkload::ChooseSpecs() {
  const std::vector<std::vector<CacheGroupSpec>> all = {
      {Full(4)},
      {Full(4, 3), Window(6, 2, 2)},
      {Full(2, 4, 2), Window(5, 4), Window(1, 4)},
      {Full(4), State(4, 2), Window(9, 1, 6, 3)},
      {Window(7, 2, 4, 4)},
  };
  return all[static_cast<std::size_t>(Below(static_cast<int32_t>(all.size())))];
}

HostTier CacheWorkload::ChooseHost() {
  const int32_t parents = Below(24);
  return {.num_lcm_blocks = parents, .streams = parents > 0, .has_storage = false};
}

void CacheWorkload::Step() {
  const int32_t choice = Below(12);
  if (choice >= 9) return StepTiers();
  if (requests_.empty() || choice == 0) return Arrive();
  const auto i = static_cast<std::size_t>(Below(static_cast<int32_t>(requests_.size())));
  if (choice <= 5) return Advance(requests_[i]);
  if (choice == 6) return Leave(i, Below(4) > 0);
  if (choice == 7) return requests_[i].computed >= requests_[i].prompt ? Fork(requests_[i]) : Advance(requests_[i]);
  const bool clearable = cache_.CacheIsClearable();
  if (Below(4) == 0) {
    EXPECT_EQ(cache_.ClearCache(), clearable);
  } else {
    EXPECT_TRUE(cache_.ClearDeviceCache() || !clearable);
  }
}

void CacheWorkload::StepTiers() {
  if (copies_.empty() || Below(2) == 0) {
    return StartStores(Below(2) == 0 ? SourceGuard::kPinnedUntilAck : SourceGuard::kStreamOrdered);
  }
  EndCopy(static_cast<std::size_t>(Below(static_cast<int32_t>(copies_.size()))));
}

void CacheWorkload::StartStores(SourceGuard guard) {
  transfers_.StartPendingStores(guard);
  for (TierOperation& operation : transfers_.TakeStartedStores()) {
    Copy copy{.operation = std::move(operation), .is_store = true, .copied = {}};
    for (const BlockTransfer& transfer : copy.operation.transfers) {
      const auto [device, host] = Ends(transfer, true);
      host_contents_.erase(host);
      if (!copy.operation.source_pinned) copy.copied.push_back(contents_.at(device));
    }
    copies_.push_back(std::move(copy));
  }
}

std::pair<CacheWorkload::Place, CacheWorkload::Place> CacheWorkload::Ends(const BlockTransfer& transfer,
                                                                          bool is_store) const {
  const int32_t shards = specs_[static_cast<std::size_t>(transfer.group_id)].shard_count;
  EXPECT_EQ((transfer.source_id - transfer.destination_id) % shards, 0);
  const Place source{transfer.group_id, transfer.source_id};
  const Place destination{transfer.group_id, transfer.destination_id};
  return is_store ? std::pair(source, destination) : std::pair(destination, source);
}

void CacheWorkload::StartLoad(Request& request, std::span<const PrefixHash> candidates) {
  if (admitted_.load_pairs.empty()) return;
  const int32_t first_page = admitted_.device_prefix_tokens / kPrefixGranularity;
  const int32_t end_page = admitted_.host_prefix_tokens / kPrefixGranularity;
  cache_.CacheFullBlocks(request.tables, candidates.subspan(first_page, end_page - first_page), request.epoch,
                         first_page, BoundaryKind::kChunk);
  transfers_.StartPrefixLoad(std::move(admitted_.load_pairs));
  for (TierOperation& operation : transfers_.TakeStartedLoads()) {
    Copy copy{.operation = std::move(operation), .is_store = false, .copied = {}};
    for (const BlockTransfer& transfer : copy.operation.transfers) {
      copy.copied.push_back(host_contents_.at(Ends(transfer, false).second));
    }
    copies_.push_back(std::move(copy));
  }
}

void CacheWorkload::EndCopy(std::size_t i) {
  const Copy copy = std::move(copies_[i]);
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
  for (std::size_t t = 0; t < copy.operation.transfers.size(); ++t) {
    const auto [device, host] = Ends(copy.operation.transfers[t], copy.is_store);
    if (copy.is_store) {
      host_contents_[host] = copy.operation.source_pinned ? contents_.at(device) : copy.copied[t];
      ++epochs_issued_;  // for its publication
    } else {
      EXPECT_EQ(host_contents_.at(host), copy.copied[t]);
      EXPECT_EQ(contents_.at(device), copy.copied[t]);
    }
  }
  for (int times = 0; times < 2; ++times) {
    if (copy.is_store) transfers_.CompleteWriteBack(copy.operation.op_id);
    if (!copy.is_store) transfers_.CompleteLoadBack(copy.operation.op_id, true);
  }
}

void CacheWorkload::Arrive() {
  Request request;
  const int32_t family = Below(3);
  const int32_t shared = Below(24);
  request.prompt = 1 + Below(24);
  ++arrivals_;
  for (int32_t i = 0; i < request.prompt; ++i) request.tokens.push_back(i < shared ? family : 100 + arrivals_);
  request.tables = cache_.MakeTables();
  request.known_slots.assign(specs_.size(), 0);
  request.known_frontiers.assign(specs_.size(), 0);

  std::vector<PrefixHash> candidates;
  ExtendPrefixHashes(request.tokens, kPrefixGranularity, (request.prompt - 1) / kPrefixGranularity, candidates);
  const PrefixProbe probe = cache_.ProbePrefix(candidates);
  const int32_t hit = probe.prefix_tokens();
  if (!Prefill(request, probe, hit, {})) return;
  hits_ += hit > 0 ? 1 : 0;
  loads_ += admitted_.load_pairs.empty() ? 0 : 1;
  StartLoad(request, candidates);
  candidates.resize(static_cast<std::size_t>(hit / kPrefixGranularity));
  request.hashes = candidates;
  requests_.push_back(std::move(request));
}

void CacheWorkload::Advance(Request& request) {
  std::vector<PrefixHash> hashes = request.hashes;
  const RequestProgress progress = Progress(request, hashes);
  const bool admitted = request.computed < request.prompt
                            ? Prefill(request, cache_.ProbePrefix({}), request.computed, progress)
                            : Decode(request, progress);
  if (admitted) request.hashes = hashes;
}

bool CacheWorkload::HoldsAllRead(const Request& parent, int32_t position) const {
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    if (specs_[g].kind == CacheGroupKind::kRecurrentState) return false;
    const bool window = specs_[g].kind == CacheGroupKind::kSlidingWindow;
    for (int32_t row = window ? std::max(0, position - specs_[g].sliding_window_tokens + 1) : 0; row < position; ++row) {
      if (!parent.tables[g].blocks[row / specs_[g].block_granularity]) return false;
    }
  }
  return true;
}

void CacheWorkload::Fork(const Request& parent) {
  const int32_t position = parent.prompt - 1;
  const auto plan = cache_.PlanFork(parent.tables, position, parent.prompt);
  ASSERT_EQ(plan.has_value(), HoldsAllRead(parent, position));
  if (!plan) return;
  Request fork;
  fork.prompt = parent.prompt;
  fork.tokens.assign(parent.tokens.begin(), parent.tokens.begin() + parent.prompt);
  fork.tables = cache_.MakeTables();
  fork.known_slots.assign(specs_.size(), 0);
  fork.known_frontiers.assign(specs_.size(), 0);
  ++arrivals_;
  const Image before = Snapshot(fork);
  const auto forked =
      cache_.Fork(*plan, parent.tables, position, std::vector(specs_.size(), Dense(1, Below(6))), fork.tables);
  if (!forked) {
    ++refusals_;
    EXPECT_TRUE(before == Snapshot(fork));
    return;
  }
  EXPECT_EQ(forked->access_epoch, ++epochs_issued_);
  fork.epoch = forked->access_epoch;
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    for (int32_t id : forked->new_block_ids[g]) contents_.erase({group, id});
    for (const BlockCopy& copy : forked->copies[g]) {
      std::vector<int32_t> rows = contents_[{group, copy.source}];
      rows.resize(std::min(rows.size(), static_cast<std::size_t>(position)));  // the rows above are overwritten
      contents_[{group, copy.destination}] = rows;
    }
  }
  ++forks_;
  CheckReadable(fork, position);
  Write(fork, position, parent.prompt);
  requests_.push_back(std::move(fork));
}

RequestProgress CacheWorkload::Progress(const Request& request, std::vector<PrefixHash>& hashes) const {
  const auto first_new = static_cast<int32_t>(hashes.size());
  ExtendPrefixHashes(request.tokens, kPrefixGranularity, request.computed / kPrefixGranularity, hashes);
  if (first_new == static_cast<int32_t>(hashes.size())) return Frontier(request.computed);
  const BoundaryKind kind = request.computed == request.prompt ? BoundaryKind::kEndpoint : BoundaryKind::kChunk;
  RequestProgress progress = Completed(hashes, first_new, kind, request.computed, request.state_boundaries);
  progress.completed_pages->state_boundary_kind = BoundaryKind::kEndpoint;
  progress.completed_pages->stream_completed_to_host = true;
  return progress;
}

bool CacheWorkload::Prefill(Request& request, const PrefixProbe& probe, int32_t before, const RequestProgress& progress) {
  int32_t after = std::min(request.prompt, before + kPrefixGranularity * (1 + Below(3)));
  const int32_t reserve = after == request.prompt ? Below(6) : 0;
  std::vector<TokenDemand> demands(specs_.size(), Dense(after - before, reserve));
  const int32_t aligned = after - after % kPrefixGranularity;
  const int32_t checkpoint = aligned > before ? aligned : after;
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    if (specs_[g].kind != CacheGroupKind::kRecurrentState) continue;
    demands[g] = Sparse(after, (checkpoint - 1) / specs_[g].block_granularity, reserve);
  }
  if (!Admit(request, probe, demands, progress)) return false;
  CheckReadable(request, before);
  if (aligned > before) request.state_boundaries.push_back(aligned);
  if (checkpoint < after) Write(request, before, checkpoint);
  Write(request, std::min(before, checkpoint), after);
  return true;
}

bool CacheWorkload::Decode(Request& request, const RequestProgress& progress) {
  request.tokens.push_back(1000 * (1 + arrivals_) + request.computed);
  const bool in_place = !progress.completed_pages && cache_.ConsumeInPlace(request.tables, 1, request.computed);
  if (!in_place && !Admit(request, cache_.ProbePrefix({}), std::vector(specs_.size(), Dense(1)), progress)) {
    request.tokens.pop_back();
    return false;
  }
  CheckReadable(request, request.computed);
  Write(request, request.computed, request.computed + 1);
  return true;
}

bool CacheWorkload::Admit(Request& request, const PrefixProbe& probe, const std::vector<TokenDemand>& demands, const RequestProgress& progress) {
  const Image before = Snapshot(request);
  const auto epoch = request.epoch == 0 ? std::nullopt : std::optional(request.epoch);
  auto result = cache_.Admit(probe, request.tables, demands, progress, epoch);
  if (!result) {
    ++refusals_;
    EXPECT_TRUE(before == Snapshot(request));
    return false;
  }
  EXPECT_EQ(result->access_epoch, epoch ? *epoch : ++epochs_issued_);
  request.epoch = result->access_epoch;
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    for (int32_t id : result->new_block_ids[g]) contents_.erase({static_cast<int32_t>(g), id});
  }
  EXPECT_EQ(result->host_prefix_tokens, probe.prefix_tokens());
  admitted_ = std::move(*result);
  for (const LoadPair& pair : admitted_.load_pairs) {
    const GroupAllocator& allocator = cache_.group(pair.source->group()).allocator();
    contents_[{allocator.group(), allocator.BlockId(pair.destination)}] =
        host_contents_.at({allocator.group(), allocator.BlockId(pair.source)});
  }
  return true;
}

void CacheWorkload::Write(Request& request, int32_t before, int32_t after) {
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    const int32_t granularity = specs_[g].block_granularity;
    const bool state = specs_[g].kind == CacheGroupKind::kRecurrentState;
    for (int32_t slot = state ? (after - 1) / granularity : before / granularity; slot * granularity < after; ++slot) {
      if (request.tables[g].blocks[slot]) contents_[PlaceOf(request, g, slot)] = Contents(request, slot, granularity, after);
    }
  }
  request.computed = after;
}

CacheWorkload::BlockContents CacheWorkload::Contents(const Request& request, int32_t slot, int32_t granularity, int32_t computed) {
  return {request.tokens.begin(), request.tokens.begin() + std::min((slot + 1) * granularity, computed)};
}

CacheWorkload::Place CacheWorkload::PlaceOf(const Request& request, std::size_t g, int32_t slot) const {
  return {static_cast<int32_t>(g), cache_.group(static_cast<int32_t>(g)).allocator().BlockId(request.tables[g].blocks[slot])};
}

void CacheWorkload::Leave(std::size_t i, bool publish) {
  Request& request = requests_[i];
  std::vector<PrefixHash> hashes = request.hashes;
  const RequestProgress progress = Progress(request, hashes);
  if (publish) cache_.CacheCompletedBlocks(request.tables, progress, request.epoch);
  cache_.Free(request.tables);
  requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(i));
}

void CacheWorkload::CheckTables(Request& request) {
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    const BlockTable& table = request.tables[g];
    const int32_t granularity = specs_[g].block_granularity;
    EXPECT_TRUE(table.NumSlots() >= request.known_slots[g]);
    EXPECT_TRUE(table.reclaimed_prefix_blocks >= request.known_frontiers[g]);
    request.known_slots[g] = table.NumSlots();
    request.known_frontiers[g] = table.reclaimed_prefix_blocks;
    EXPECT_EQ(table.NumSlots() * granularity - table.available_tokens, request.computed);
    for (int32_t slot = 0; slot < table.reclaimed_prefix_blocks; ++slot) EXPECT_FALSE(bool(table.blocks[slot]));
  }
  CheckReadable(request, request.computed);
}

void CacheWorkload::CheckReadable(const Request& request, int32_t position) {
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    const int32_t granularity = specs_[g].block_granularity;
    int32_t first_read = 0;
    if (specs_[g].kind == CacheGroupKind::kRecurrentState) first_read = position - 1;
    if (specs_[g].kind == CacheGroupKind::kSlidingWindow) first_read = position - specs_[g].sliding_window_tokens + 1;
    if (first_read >= position) continue;  // a window of one token: the query reads its own row alone
    for (int32_t slot = std::max(0, first_read) / granularity; slot * granularity < position; ++slot) {
      ASSERT_TRUE(bool(request.tables[g].blocks[slot]));
      EXPECT_EQ(contents_[PlaceOf(request, g, slot)], Contents(request, slot, granularity, position));
    }
  }
}

void CacheWorkload::CheckGauges() const {
  const BlockPool& pool = cache_.device_pool();
  int32_t available = 0;
  for (int32_t parent = 1; parent <= pool.NumLcmBlocks(); ++parent) {
    const auto locations = pool.OccupiedLocations(parent);
    const int32_t bound = pool.BoundGroup(parent);
    available += std::all_of(locations.begin(), locations.end(), [&](CacheBlockLocation location) {
      return pool.UseCount(location) == 1 && cache_.group(bound).index().Contains(pool, location);
    });
  }
  EXPECT_EQ(cache_.NumAvailableLcmBlocks(), available);
  std::set<int32_t> active;
  for (const Request& request : requests_) {
    for (const BlockTable& table : request.tables) {
      for (const CacheBlockRef& block : table.blocks) {
        if (block) active.insert(block->Location().lcm_block_id);
      }
    }
  }
  EXPECT_EQ(cache_.NumActiveLcmBlocks(), static_cast<int32_t>(active.size()));
  std::vector<int32_t> uses;
  for (int32_t parent = 1; parent <= pool.NumLcmBlocks(); ++parent) {
    const int32_t group_plus_one = pool.BoundGroup(parent) + 1;
    uses.push_back(active.contains(parent) ? group_plus_one : -group_plus_one);
  }
  EXPECT_EQ(pool.LcmBlockUses(), uses);
}

CacheWorkload::Image CacheWorkload::Snapshot(const Request& request) const {
  Image image;
  for (const BlockPool* pool : {&cache_.device_pool(), &cache_.host_pool()}) {
    image.emplace_back(-1, pool->NumEmptyLcmBlocks(), request.computed, 0, request.epoch, 0, false);
    for (int32_t parent = 1; parent <= pool->NumLcmBlocks(); ++parent) {
      for (CacheBlockLocation location : pool->OccupiedLocations(parent)) {
        const int32_t group = pool->BoundGroup(parent);
        const auto metadata = cache_.group(group).index().MetadataFor(*pool, location).value_or(PrefixEntryMetadata());
        image.emplace_back(group, parent, location.slot_index, pool->UseCount(location), metadata.last_access_epoch,
                           static_cast<int32_t>(metadata.boundary_kind), metadata.was_acquired);
      }
    }
  }
  for (const BlockTable& table : request.tables) {
    for (const CacheBlockRef& block : table.blocks) {
      const CacheBlockLocation location = block ? block->Location() : CacheBlockLocation();
      image.emplace_back(-2, location.lcm_block_id, location.slot_index, 0, 0, 0, false);
    }
    image.emplace_back(-3, table.available_tokens, table.reclaimed_prefix_blocks, 0, 0, 0, false);
  }
  return image;
}

}  // namespace tokenspeed::testing
