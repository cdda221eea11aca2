#include "scheduler/request_admission.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace tokenspeed {

RequestAdmission::RequestAdmission(const SchedulerConfig& config, CacheCoordinator& coordinator,
                                   TierTransfers& transfers, RequestSlotPool& slots, ResidentTables& tables,
                                   RequestBook& book, ResidencyLedger* ledger)
    : config_(config),
      chunk_rules_(PrefillChunkRules::For(config)),
      coordinator_(coordinator),
      transfers_(transfers),
      slots_(slots),
      resident_tables_(tables),
      book_(book),
      ledger_(ledger),
      num_hit_tokens_(config.cache_groups.size(), 0) {}

void RequestAdmission::DescribePages(Request& request, int32_t first_page, int32_t num_pages) {
  if (ledger_ == nullptr) return;
  const auto width = static_cast<std::size_t>(config_.prefix_granularity);
  const auto hashes = request.PrefixHashes(config_.prefix_granularity, num_pages);
  const auto event_hashes = request.EventHashes(config_.prefix_granularity, num_pages);
  const std::span<const int32_t> tokens = request.tokens();
  const std::string cache_salt = request.CacheSalt();
  for (auto page = static_cast<std::size_t>(first_page); page < hashes.size(); ++page) {
    ledger_->Describe(hashes[page], event_hashes, page, tokens.subspan(page * width, width), cache_salt);
  }
}

int32_t RequestAdmission::NumProbedTokens(const Request& request) const {
  // At least the last prompt token is computed, for without it there is nothing to sample from.
  const int32_t recomputed = std::max(config_.prefix_replay_tokens, 1);
  return std::max(request.prefill_size() - recomputed, 0);
}

PrefixProbe RequestAdmission::ProbeFor(Request& request, int32_t max_host_tokens) {
  const bool is_new = request.state() != RequestState::kRetracted;
  if ((config_.disable_prefix_cache && is_new) || request.MustFeedWholePrompt()) return coordinator_.NeutralProbe();
  const int32_t reusable = NumProbedTokens(request);
  const auto hashes = request.PrefixHashes(config_.prefix_granularity, reusable / config_.prefix_granularity);
  PrefixProbe probe = coordinator_.ProbePrefix(hashes, max_host_tokens);
  if (config_.reuse_partial_pages) {
    const auto begin = static_cast<std::size_t>(probe.prefix_tokens());
    coordinator_.ProbePartialPage(probe, request.HashBefore(config_.prefix_granularity, probe.prefix_tokens()),
                                  request.PrefillTokens().first(static_cast<std::size_t>(reusable)).subspan(begin));
  }
  return probe;
}

bool RequestAdmission::IsAlone(const Request& request) const {
  const std::size_t own = request.IsResident() ? 1 : 0;
  return book_.resident().size() == own;
}

int32_t RequestAdmission::FirstDecodeTokens() const {
  // A prefill worker decodes nothing; its hand-off only needs the tables as they are.
  return config_.DecodesHere() ? config_.decode_input_tokens : 0;
}

std::vector<TokenDemand> RequestAdmission::Demands(int32_t before, int32_t num_tokens,
                                                   const PrefillReserve& reserve) const {
  const int32_t after = before + num_tokens;
  const auto snapshot = static_cast<int32_t>(FirstSnapshotTokens(before, after, config_.prefix_granularity));
  std::vector<TokenDemand> demands;
  demands.reserve(config_.cache_groups.size());
  for (std::size_t index = 0; index < config_.cache_groups.size(); ++index) {
    const CacheGroupConfig& group = config_.cache_groups[index];
    TokenDemand demand{.extent = DenseGrowth{num_tokens},
                       .reserve_tokens = static_cast<int32_t>(reserve.TokensFor(group))};
    if (group.IsState()) {
      demand.extent =
          coordinator_.group(static_cast<int32_t>(index)).geometry().SnapshotSuffix(snapshot, after);
    }
    demands.push_back(demand);
  }
  return demands;
}

void RequestAdmission::RecordSnapshot(CacheProgress& progress, int32_t end) const {
  if (!chunk_rules_.has_state_group) return;
  progress.Record(end - end % config_.prefix_granularity, config_.prefix_granularity);
}

void RequestAdmission::CountHits(const PrefixProbe& probe) {
  const auto blocks = [](const ConvergedPrefix& tier, std::size_t g) -> int64_t {
    return g < tier.masks.size() ? std::ranges::count(tier.masks[g], uint8_t{1}) : 0;
  };
  for (std::size_t g = 0; g < num_hit_tokens_.size(); ++g) {
    const GroupGeometry& geometry = coordinator_.group(static_cast<int32_t>(g)).geometry();
    num_hit_tokens_[g] += (blocks(probe.device, g) + blocks(probe.host, g)) * geometry.block_granularity();
    if (probe.partial.num_tokens == 0) continue;
    const int32_t first_read = geometry.FirstReadBlock(probe.prefix_tokens(), probe.resume_tokens());
    num_hit_tokens_[g] += std::max(probe.resume_tokens() - first_read * geometry.block_granularity(), 0);
  }
}

std::optional<CompletedPages> RequestAdmission::CompletePages(Request& request, int32_t frontier,
                                                              CacheProgress& progress) {
  const int32_t pages = frontier / config_.prefix_granularity;
  if (pages <= progress.num_hashed_pages) return std::nullopt;
  BoundaryKind kind = frontier == request.prefill_size() ? BoundaryKind::kEndpoint : BoundaryKind::kChunk;
  if (progress.promotion_boundary_tokens > 0 && frontier >= progress.promotion_boundary_tokens) {
    if (frontier == progress.promotion_boundary_tokens) kind = BoundaryKind::kPromoted;
    progress.promotion_boundary_tokens = 0;
  }
  const int32_t prompt_boundary = request.prefill_size() - request.prefill_size() % config_.prefix_granularity;
  std::optional<BoundaryKind> state_kind;
  // The prompt's last snapshot is worth keeping although a tail of the prompt is still to come.
  if (kind == BoundaryKind::kChunk && progress.HasMaterialized(prompt_boundary)) state_kind = BoundaryKind::kEndpoint;
  DescribePages(request, progress.num_hashed_pages, pages);
  CompletedPages completed{.prefix_hashes = request.PrefixHashes(config_.prefix_granularity, pages),
                           .first_new_prefix_page = progress.num_hashed_pages,
                           .boundary_kind = kind,
                           .state_boundary_kind = state_kind,
                           .materialized_state_boundaries = progress.materialized_state_boundaries(),
                           .stream_completed_to_host = config_.StreamsDeviceCacheToHost() &&
                                                       request.state() != RequestState::kDecoding};
  progress.num_hashed_pages = pages;
  return completed;
}

PrefillReserve RequestAdmission::FirstChunkReserve(const Request& request, int64_t hit, int64_t chunk) const {
  const int64_t later = request.prefill_size() - hit - chunk;
  const int64_t headroom = config_.DecodesHere() ? request.Budget().AdmissionHeadroom() : 0;
  const bool others = (hit > 0 || later > 0) && !book_.resident().empty();
  return PrefillReserve{.decode_width = config_.decode_input_tokens,
                        .completes = later == 0,
                        .prompt_headroom = headroom > 0 ? later + headroom : 0,
                        .growth = config_.DecodesHere() && later == 0,
                        .unrecycled = others ? std::max(hit, later) : 0};
}

std::optional<AdmissionResult> RequestAdmission::AdmitChunk(const PrefixProbe& probe, Request& request,
                                                            std::span<BlockTable> tables, int32_t before,
                                                            int32_t num_tokens, const PrefillReserve& reserve,
                                                            const RequestProgress& made,
                                                            std::optional<uint64_t> access_epoch) {
  auto admitted = coordinator_.Admit(probe, tables, Demands(before, num_tokens, reserve), made, access_epoch);
  // A prefill worker accepts whatever prompt its pool holds, with or without a slot to draft into. Without one the
  // table ends with the prompt, and the forward has nowhere to put a draft.
  const bool slot_is_optional = !config_.DecodesHere() && reserve.completes;
  if (admitted.has_value() || !slot_is_optional || !IsAlone(request)) return admitted;
  PrefillReserve without_slot = reserve;
  without_slot.decode_width = 0;
  return coordinator_.Admit(probe, tables, Demands(before, num_tokens, without_slot), made, access_epoch);
}

AdmissionOutcome RequestAdmission::FirstChunk(Request& request, int64_t budget, FreshBlocks& fresh,
                                              BlockCopies& copies) {
  if (!slots_.HasFree()) return AdmissionOutcome::kNotNow;
  const AdmissionOutcome outcome = FirstChunkWithHit(request, budget, fresh, copies);
  if (outcome != AdmissionOutcome::kNoCapacity || !book_.resident().empty()) return outcome;
  return std::get<AdmissionOutcome>(FirstChunkAfter(coordinator_.NeutralProbe(), request, budget, fresh, copies));
}

AdmissionOutcome RequestAdmission::FirstChunkWithHit(Request& request, int64_t budget, FreshBlocks& fresh,
                                                     BlockCopies& copies) {
  FirstChunkOutcome outcome = std::numeric_limits<int32_t>::max();
  // Each try asks the host for less.
  while (const auto* max_host_tokens = std::get_if<int32_t>(&outcome)) {
    PrefixProbe probe = ProbeFor(request, *max_host_tokens);
    outcome = FirstChunkAfter(probe, request, budget, fresh, copies);
    if (outcome != FirstChunkOutcome(AdmissionOutcome::kNoCapacity) || probe.partial.num_tokens == 0) continue;
    // What it copies cannot be evicted for it, and perhaps it would fit otherwise.
    probe.partial = {};
    outcome = FirstChunkAfter(probe, request, budget, fresh, copies);
  }
  return std::get<AdmissionOutcome>(outcome);
}

RequestAdmission::FirstChunkOutcome RequestAdmission::FirstChunkAfter(const PrefixProbe& probe, Request& request,
                                                                      int64_t budget, FreshBlocks& fresh,
                                                                      BlockCopies& copies) {
  const int32_t hit = probe.prefix_tokens();
  const int32_t begin = probe.resume_tokens();
  const int32_t promotion = coordinator_.PromotionWorthStopping(probe);
  const auto chunk = static_cast<int32_t>(
      chunk_rules_.ChunkTokens(begin, /*resumes_hit=*/true, request.prefill_size() - begin, budget, promotion));
  if (chunk == 0) return AdmissionOutcome::kNotNow;

  const PrefillReserve reserve = FirstChunkReserve(request, begin, chunk);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  auto admitted = AdmitChunk(probe, request, tables, hit, begin - hit + chunk, reserve, RequestProgress{},
                             /*access_epoch=*/std::nullopt);
  if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;
  if (admitted->host_prefix_tokens < hit) {
    coordinator_.Free(tables);
    return admitted->host_prefix_tokens;
  }

  DescribePages(request, 0, (request.prefill_size() - 1) / config_.prefix_granularity);
  AppendPerGroup(fresh, admitted->new_block_ids);
  if (!admitted->copies.empty()) AppendPerGroup(copies.pairs, admitted->copies);
  std::ranges::move(admitted->copied_blocks, std::back_inserter(copies.held));
  if (!admitted->load_pairs.empty()) StartLoad(request, *admitted, tables);
  auto resources = std::make_unique<RequestResources>(coordinator_, resident_tables_, slots_.Take(), std::move(tables));
  CacheProgress& progress = resources->progress;
  progress.num_hashed_pages = hit / config_.prefix_granularity;
  progress.access_epoch = admitted->access_epoch;
  progress.promotion_boundary_tokens = promotion;
  if (chunk_rules_.has_state_group && promotion > 0) num_checkpoint_lost_tokens_ += promotion - hit;
  CountHits(probe);
  RecordSnapshot(progress, begin + chunk);
  resources->covered_tokens = int64_t{begin} + chunk;
  const PrefillWindow window{
      .begin = begin, .size = chunk, .replay = static_cast<int32_t>(chunk_rules_.ReplayTokens(begin))};
  book_.Move(request, [&](Request& moved) {
    moved.StartPrefill(std::move(resources), window, reserve.completes ? FirstDecodeTokens() : 0);
  });
  return AdmissionOutcome::kScheduled;
}

void RequestAdmission::StartLoad(Request& request, AdmissionResult& admitted, std::span<BlockTable> tables) {
  const int32_t first_page = admitted.device_prefix_tokens / config_.prefix_granularity;
  const int32_t end_page = admitted.host_prefix_tokens / config_.prefix_granularity;
  const auto hashes = request.PrefixHashes(config_.prefix_granularity, end_page).subspan(first_page);
  if (!admitted.load_pairs.front().key) {
    coordinator_.CacheFullBlocks(tables, hashes, admitted.access_epoch, first_page, BoundaryKind::kChunk);
  } else if (ledger_ != nullptr) {
    for (const LoadPair& pair : admitted.load_pairs) ledger_->WaitFor(pair.key->content_hash);
  }
  transfers_.StartPrefixLoad(std::move(admitted.load_pairs));
}

AdmissionOutcome RequestAdmission::NextChunk(Request& request, int64_t budget, FreshBlocks& fresh) {
  RequestResources& resources = request.resources();
  const int32_t first = request.window().end();
  const int32_t unscheduled = request.prefill_size() - first;
  const auto chunk = static_cast<int32_t>(chunk_rules_.ChunkTokens(
      first, /*resumes_hit=*/false, unscheduled, budget, resources.progress.promotion_boundary_tokens));
  if (chunk == 0) return AdmissionOutcome::kNotNow;

  const bool completes = chunk == unscheduled;
  const PrefillReserve reserve{.decode_width = config_.decode_input_tokens,
                               .completes = completes,
                               .growth = config_.DecodesHere() && completes};
  CacheProgress progress = resources.progress;
  const int32_t frontier = request.NumComputedTokens();
  const RequestProgress made{.completed_pages = CompletePages(request, frontier, progress),
                             .num_computed_tokens = frontier};
  const auto admitted = AdmitChunk(coordinator_.NeutralProbe(), request, resources.tables(), first, chunk, reserve, made,
                                   progress.access_epoch);
  if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;

  AppendPerGroup(fresh, admitted->new_block_ids);
  progress.DiscardHashed(config_.prefix_granularity);
  RecordSnapshot(progress, first + chunk);
  resources.progress = std::move(progress);
  resources.covered_tokens += chunk;
  resources.WriteTables(made.completed_pages);
  book_.Move(request, [&](Request& moved) {
    moved.ContinuePrefill(PrefillWindow{.begin = first, .size = chunk}, completes ? FirstDecodeTokens() : 0);
  });
  return AdmissionOutcome::kScheduled;
}

AdmissionOutcome RequestAdmission::Prefill(Request& request, int64_t budget, FreshBlocks& fresh, BlockCopies& copies) {
  AdmissionOutcome outcome = PrefillOnce(request, budget, fresh, copies);
  if (config_.role != SchedulerConfig::Role::kDecode) return outcome;
  const int64_t least = std::max<int64_t>(MinPrefillTokens(), 1);
  budget = std::min(budget, int64_t{request.prefill_size()} + chunk_rules_.replay_window);
  while (outcome == AdmissionOutcome::kNoCapacity && IsAlone(request) && budget > least) {
    budget = std::max(least, budget / 2);
    outcome = PrefillOnce(request, budget, fresh, copies);
  }
  return outcome;
}

AdmissionOutcome RequestAdmission::PrefillOnce(Request& request, int64_t budget, FreshBlocks& fresh,
                                               BlockCopies& copies) {
  return request.IsWaiting() ? FirstChunk(request, budget, fresh, copies) : NextChunk(request, budget, fresh);
}

bool RequestAdmission::Grow(Request& request, int32_t num_tokens, FreshBlocks& fresh) {
  RequestResources& resources = request.resources();
  const int32_t frontier = request.NumComputedTokens();
  const bool completes_page = frontier / config_.prefix_granularity > resources.progress.num_hashed_pages;
  if (completes_page || !coordinator_.ConsumeInPlace(resources.tables(), num_tokens, frontier)) {
    CacheProgress progress = resources.progress;
    const RequestProgress made{.completed_pages = CompletePages(request, frontier, progress),
                               .num_computed_tokens = frontier};
    if (!coordinator_.Grow(resources.tables(), num_tokens, made, progress.access_epoch, fresh)) return false;
    progress.DiscardHashed(config_.prefix_granularity);
    resources.progress = std::move(progress);
    resources.WriteTables(made.completed_pages);
  }
  resources.covered_tokens += num_tokens;
  return true;
}

void RequestAdmission::EnterDecode(Request& request) {
  if (request.state() == RequestState::kDecoding) {
    request.SetNextReserve(config_.decode_input_tokens);
  } else {
    book_.Move(request, [&](Request& moved) { moved.StartDecode(config_.decode_input_tokens); });
  }
}

AdmissionOutcome RequestAdmission::Decode(Request& request, FreshBlocks& fresh) {
  if (!Grow(request, request.next_reserve(), fresh)) return AdmissionOutcome::kNoCapacity;
  EnterDecode(request);
  return AdmissionOutcome::kScheduled;
}

AdmissionOutcome RequestAdmission::Feed(Request& request, int64_t budget, FreshBlocks& fresh) {
  const int32_t first = request.NumComputedTokens();
  int64_t count = std::min<int64_t>(request.unfed_tokens(), budget);
  if (chunk_rules_.has_state_group) {
    // Beyond a boundary it would have to leave a snapshot there as well, for which output has no place.
    count = std::min<int64_t>(count, config_.prefix_granularity - first % config_.prefix_granularity);
  }
  // What a caller has reserved beyond a decode step is covered already.
  const int64_t growth = std::max<int64_t>(0, first + count - request.resources().covered_tokens);
  if (!Grow(request, static_cast<int32_t>(growth), fresh)) return AdmissionOutcome::kNoCapacity;
  EnterDecode(request);
  request.Feed(static_cast<int32_t>(count));
  return AdmissionOutcome::kScheduled;
}

void RequestAdmission::Watch(Request& request) {
  if (request.watched_pages.has_value()) return;
  const int32_t pages = (request.prefill_size() - 1) / config_.prefix_granularity;
  request.watched_pages.emplace(coordinator_.watch(), request.PrefixHashes(config_.prefix_granularity, pages));
}

void RequestAdmission::PublishAtFinish(Request& request) {
  RequestResources& resources = request.resources();
  const int32_t frontier = request.NumFedTokens();
  CacheProgress progress = resources.progress;
  auto completed = CompletePages(request, frontier, progress);
  if (completed.has_value()) {
    completed->boundary_kind = BoundaryKind::kEndpoint;
    completed->stream_completed_to_host = false;  // all of the chain is queued below
    coordinator_.CacheCompletedBlocks(
        resources.tables(), RequestProgress{.completed_pages = completed, .num_computed_tokens = frontier},
        progress.access_epoch);
  }
  if (config_.reuse_partial_pages) PublishPartialPage(request, frontier);
  if (!config_.StreamsDeviceCacheToHost()) return;
  QueueForStore(request, progress.num_hashed_pages);
  transfers_.StartPendingStores(SourceGuard::kPinnedUntilAck);
}

void RequestAdmission::PublishPartialPage(Request& request, int32_t frontier) {
  const int32_t num_tokens = frontier % config_.prefix_granularity;
  const int32_t begin = frontier - num_tokens;
  if (num_tokens == 0) return;
  RequestResources& resources = request.resources();
  const auto page = std::span(request.tokens()).subspan(static_cast<std::size_t>(begin));
  coordinator_.CachePartialPage(resources.tables(), request.HashBefore(config_.prefix_granularity, begin), begin,
                                page.first(static_cast<std::size_t>(num_tokens)), resources.progress.access_epoch);
}

void RequestAdmission::PublishAtRetraction(Request& request) {
  RequestResources& resources = request.resources();
  const int32_t frontier = request.NumComputedTokens();
  CacheProgress progress = resources.progress;
  auto completed = CompletePages(request, frontier, progress);
  if (completed.has_value()) {
    const int32_t boundary = frontier - frontier % config_.prefix_granularity;
    // The request comes back for the last snapshot that it wrote, wherever in the prompt that is.
    if (completed->boundary_kind == BoundaryKind::kChunk && progress.HasMaterialized(boundary)) {
      completed->state_boundary_kind = BoundaryKind::kEndpoint;
    }
    coordinator_.CacheCompletedBlocks(
        resources.tables(), RequestProgress{.completed_pages = completed, .num_computed_tokens = frontier},
        progress.access_epoch);
  }
  QueueForStore(request, progress.num_hashed_pages);
  transfers_.StartPendingStores(SourceGuard::kStreamOrdered);
}

void RequestAdmission::QueueForStore(Request& request, int32_t num_pages) {
  const int32_t prompt_pages = request.prefill_size() / config_.prefix_granularity;
  const auto hashes = request.PrefixHashes(config_.prefix_granularity, num_pages);
  coordinator_.QueueCachedBlocksForStore(hashes);
  // Decode steps leave no snapshot worth keeping.
  coordinator_.QueueLatestSnapshotBlocksForStore(
      hashes.first(static_cast<std::size_t>(std::min(num_pages, prompt_pages))));
}

}  // namespace tokenspeed
