#include "scheduler/request_admission.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace tokenspeed {
namespace {

void AppendFresh(RequestAdmission::FreshBlocks& fresh, const std::vector<std::vector<int32_t>>& acquired) {
  fresh.resize(acquired.size());
  for (std::size_t group = 0; group < acquired.size(); ++group) {
    fresh[group].insert(fresh[group].end(), acquired[group].begin(), acquired[group].end());
  }
}

}  // namespace

RequestAdmission::RequestAdmission(const SchedulerConfig& config, CacheCoordinator& coordinator,
                                   RequestSlotPool& slots, RequestBook& book, ResidencyLedger* ledger)
    : config_(config),
      chunk_rules_(PrefillChunkRules::For(config)),
      coordinator_(coordinator),
      slots_(slots),
      book_(book),
      ledger_(ledger) {}

void RequestAdmission::DescribePages(Request& request, int32_t first_page, int32_t num_pages) {
  if (ledger_ == nullptr) return;
  const auto width = static_cast<std::size_t>(config_.prefix_granularity);
  const auto hashes = request.PrefixHashes(config_.prefix_granularity, num_pages);
  const auto event_hashes = request.EventHashes(config_.prefix_granularity, num_pages);
  const std::span<const int32_t> tokens = request.tokens();
  for (auto page = static_cast<std::size_t>(first_page); page < hashes.size(); ++page) {
    ledger_->Describe(hashes[page], event_hashes, page, tokens.subspan(page * width, width));
  }
}

PrefixProbe RequestAdmission::ProbeFor(Request& request) {
  if (config_.disable_prefix_cache && request.state() != RequestState::kRetracted) {
    return coordinator_.ProbePrefix({});
  }
  // At least the last prompt token is computed, for without it there is nothing to sample from.
  const int32_t recomputed = std::max(config_.prefix_replay_tokens, 1);
  const int32_t pages = std::max(request.prefill_size() - recomputed, 0) / config_.prefix_granularity;
  return coordinator_.ProbePrefix(request.PrefixHashes(config_.prefix_granularity, pages));
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

std::vector<TokenDemand> RequestAdmission::DecodeDemands(int32_t num_tokens) const {
  return std::vector<TokenDemand>(config_.cache_groups.size(), TokenDemand{.extent = DenseGrowth{num_tokens}});
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
                           .materialized_state_boundaries = progress.materialized_state_boundaries()};
  progress.num_hashed_pages = pages;
  return completed;
}

PrefillReserve RequestAdmission::FirstChunkReserve(const Request& request, int64_t hit, int64_t chunk) const {
  const int64_t later = request.prefill_size() - hit - chunk;
  const int64_t headroom = request.Budget().AdmissionHeadroom();
  const bool others = (hit > 0 || later > 0) && !book_.resident().empty();
  return PrefillReserve{.decode_width = config_.decode_input_tokens,
                        .completes = later == 0,
                        .prompt_headroom = headroom > 0 ? later + headroom : 0,
                        .growth = later == 0,
                        .unrecycled = others ? std::max(hit, later) : 0};
}

AdmissionOutcome RequestAdmission::FirstChunk(Request& request, int64_t budget, FreshBlocks& fresh) {
  if (!slots_.HasFree()) return AdmissionOutcome::kNotNow;
  const PrefixProbe probe = ProbeFor(request);
  const AdmissionOutcome outcome = FirstChunkAfter(probe, request, budget, fresh);
  const bool alone_with_hit = book_.resident().empty() && probe.device_prefix_tokens() > 0;
  if (outcome != AdmissionOutcome::kNoCapacity || !alone_with_hit) return outcome;
  return FirstChunkAfter(coordinator_.ProbePrefix({}), request, budget, fresh);
}

AdmissionOutcome RequestAdmission::FirstChunkAfter(const PrefixProbe& probe, Request& request, int64_t budget,
                                                   FreshBlocks& fresh) {
  const int32_t hit = probe.device_prefix_tokens();
  const int32_t promotion = probe.promotion_boundary_tokens();
  const auto chunk = static_cast<int32_t>(
      chunk_rules_.ChunkTokens(hit, /*resumes_hit=*/true, request.prefill_size() - hit, budget, promotion));
  if (chunk == 0) return AdmissionOutcome::kNotNow;

  const PrefillReserve reserve = FirstChunkReserve(request, hit, chunk);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  const auto admitted = coordinator_.Admit(probe, tables, Demands(hit, chunk, reserve), RequestProgress{});
  if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;

  DescribePages(request, 0, (request.prefill_size() - 1) / config_.prefix_granularity);
  AppendFresh(fresh, admitted->new_block_ids);
  auto resources = std::make_unique<RequestResources>(coordinator_, slots_.Take(), std::move(tables));
  CacheProgress& progress = resources->progress;
  progress.num_hashed_pages = hit / config_.prefix_granularity;
  progress.access_epoch = admitted->access_epoch;
  progress.promotion_boundary_tokens = promotion;
  RecordSnapshot(progress, hit + chunk);
  resources->covered_tokens = int64_t{hit} + chunk;
  const PrefillWindow window{
      .begin = hit, .size = chunk, .replay = static_cast<int32_t>(chunk_rules_.ReplayTokens(hit))};
  book_.Move(request, [&](Request& moved) {
    moved.StartPrefill(std::move(resources), window,
                       reserve.completes ? config_.decode_input_tokens : 0);
  });
  return AdmissionOutcome::kScheduled;
}

AdmissionOutcome RequestAdmission::NextChunk(Request& request, int64_t budget, FreshBlocks& fresh) {
  RequestResources& resources = request.resources();
  const int32_t first = request.window().end();
  const int32_t unscheduled = request.prefill_size() - first;
  const auto chunk = static_cast<int32_t>(chunk_rules_.ChunkTokens(
      first, /*resumes_hit=*/false, unscheduled, budget, resources.progress.promotion_boundary_tokens));
  if (chunk == 0) return AdmissionOutcome::kNotNow;

  const bool completes = chunk == unscheduled;
  const PrefillReserve reserve{
      .decode_width = config_.decode_input_tokens, .completes = completes, .growth = completes};
  CacheProgress progress = resources.progress;
  const int32_t frontier = request.NumComputedTokens();
  const RequestProgress made{.completed_pages = CompletePages(request, frontier, progress),
                             .num_computed_tokens = frontier};
  const auto admitted = coordinator_.Admit(coordinator_.ProbePrefix({}), resources.tables(),
                                           Demands(first, chunk, reserve), made, progress.access_epoch);
  if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;

  AppendFresh(fresh, admitted->new_block_ids);
  progress.DiscardHashed(config_.prefix_granularity);
  RecordSnapshot(progress, first + chunk);
  resources.progress = std::move(progress);
  resources.covered_tokens += chunk;
  resources.RefreshIds();
  book_.Move(request, [&](Request& moved) {
    moved.ContinuePrefill(PrefillWindow{.begin = first, .size = chunk}, completes ? config_.decode_input_tokens : 0);
  });
  return AdmissionOutcome::kScheduled;
}

AdmissionOutcome RequestAdmission::Prefill(Request& request, int64_t budget, FreshBlocks& fresh) {
  return request.IsWaiting() ? FirstChunk(request, budget, fresh) : NextChunk(request, budget, fresh);
}

AdmissionOutcome RequestAdmission::Decode(Request& request, FreshBlocks& fresh) {
  RequestResources& resources = request.resources();
  const int32_t growth = request.next_reserve();
  const int32_t frontier = request.NumComputedTokens();
  CacheProgress progress = resources.progress;
  const RequestProgress made{.completed_pages = CompletePages(request, frontier, progress),
                             .num_computed_tokens = frontier};
  if (!made.completed_pages.has_value() && coordinator_.TailsHaveRoom(resources.tables(), growth) &&
      !coordinator_.HasReclaimableBlocks(resources.tables(), frontier)) {
    coordinator_.ConsumeReservedTokens(resources.tables(), growth);
  } else {
    const auto admitted = coordinator_.Admit(coordinator_.ProbePrefix({}), resources.tables(), DecodeDemands(growth),
                                             made, progress.access_epoch);
    if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;
    AppendFresh(fresh, admitted->new_block_ids);
    progress.DiscardHashed(config_.prefix_granularity);
    resources.progress = std::move(progress);
    resources.RefreshIds();
  }
  resources.covered_tokens += growth;
  book_.Move(request, [&](Request& moved) { moved.StartDecode(config_.decode_input_tokens); });
  return AdmissionOutcome::kScheduled;
}

void RequestAdmission::PublishAtFinish(Request& request) {
  RequestResources& resources = request.resources();
  const int32_t frontier = request.TokenSize() - 1;
  CacheProgress progress = resources.progress;
  auto completed = CompletePages(request, frontier, progress);
  if (!completed.has_value()) return;
  completed->boundary_kind = BoundaryKind::kEndpoint;
  coordinator_.CacheCompletedBlocks(
      resources.tables(), RequestProgress{.completed_pages = completed, .num_computed_tokens = frontier},
      progress.access_epoch);
}

}  // namespace tokenspeed
