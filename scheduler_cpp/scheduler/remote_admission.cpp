#include "scheduler/remote_admission.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "scheduler/request_admission.h"

namespace tokenspeed {

std::vector<TokenDemand> RemoteLandingDemands(const SchedulerConfig& config, int32_t hit, int32_t prompt,
                                              const PrefillReserve& reserve) {
  std::vector<TokenDemand> demands;
  demands.reserve(config.cache_groups.size());
  for (const CacheGroupConfig& group : config.cache_groups) {
    TokenDemand demand{.extent = DenseGrowth{prompt - hit},
                       .reserve_tokens = static_cast<int32_t>(reserve.TokensFor(group))};
    if (group.transfer_policy == CacheTransferPolicy::kLatestSnapshot) {
      demand.extent = SparseSuffix{.extent_tokens = prompt, .first_block = (prompt - 1) / group.block_granularity};
    } else if (group.IsSliding()) {
      const int32_t held = group.replayable ? 0 : hit;
      const int64_t first_read = int64_t{prompt} - group.sliding_window_tokens.value_or(1) + 1;
      const auto first = static_cast<int32_t>(std::max<int64_t>(held, first_read));
      demand.extent = SparseSuffix{.extent_tokens = prompt, .first_block = first / group.block_granularity};
    }
    demands.push_back(demand);
  }
  return demands;
}

AdmissionOutcome RequestAdmission::RemotePrefill(Request& request, FreshBlocks& fresh) {
  if (!slots_.HasFree()) return AdmissionOutcome::kNotNow;
  const int32_t pages = config_.disable_prefix_cache ? 0 : NumProbedTokens(request) / config_.prefix_granularity;
  const PrefixProbe probe =
      coordinator_.ProbeDecodeDevicePrefix(request.PrefixHashes(config_.prefix_granularity, pages));
  const AdmissionOutcome outcome = RemotePrefillAfter(probe, request, fresh);
  const bool alone_with_hit = book_.resident().empty() && probe.device_prefix_tokens() > 0;
  if (outcome != AdmissionOutcome::kNoCapacity || !alone_with_hit) return outcome;
  return RemotePrefillAfter(coordinator_.NeutralProbe(), request, fresh);
}

AdmissionOutcome RequestAdmission::RemotePrefillAfter(const PrefixProbe& probe, Request& request, FreshBlocks& fresh) {
  const int32_t hit = probe.device_prefix_tokens();
  const int32_t prompt = request.prefill_size();
  const PrefillReserve reserve = FirstChunkReserve(request, hit, prompt - hit);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  const auto admitted =
      coordinator_.Admit(probe, tables, RemoteLandingDemands(config_, hit, prompt, reserve), RequestProgress{});
  if (!admitted.has_value()) return AdmissionOutcome::kNoCapacity;

  DescribePages(request, 0, (prompt - 1) / config_.prefix_granularity);
  AppendPerGroup(fresh, admitted->new_block_ids);
  auto resources = std::make_unique<RequestResources>(coordinator_, resident_tables_, slots_.Take(), std::move(tables));
  resources->progress.num_hashed_pages = hit / config_.prefix_granularity;
  resources->progress.access_epoch = admitted->access_epoch;
  // Only the snapshot at the end lands, so no other boundary may ever be shared.
  if (prompt % config_.prefix_granularity == 0) RecordSnapshot(resources->progress, prompt);
  resources->covered_tokens = prompt;
  book_.Move(request, [&](Request& moved) {
    moved.StartRemotePrefill(std::move(resources), PrefillWindow{.begin = hit, .size = prompt - hit},
                             config_.decode_input_tokens);
  });
  return AdmissionOutcome::kScheduled;
}

}  // namespace tokenspeed
