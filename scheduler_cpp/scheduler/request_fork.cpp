// The admission of a fork: a request that starts where another one's prompt ends.

#include <algorithm>
#include <memory>
#include <utility>

#include "scheduler/request_admission.h"

namespace tokenspeed {

std::optional<AdmissionOutcome> RequestAdmission::Fork(Request& request, const Request& parent, int64_t budget,
                                                       FreshBlocks& fresh, BlockCopies& copies) {
  // As behind a hit, at least the last prompt token is computed.
  const int32_t tail = std::max(config_.prefix_replay_tokens, 1);
  const int32_t begin = request.prefill_size() - tail;
  if (begin <= 0) return std::nullopt;
  const std::span<const BlockTable> held = parent.resources().tables();
  const auto forks = coordinator_.PlanFork(held, begin, request.prefill_size());
  if (!forks.has_value()) return std::nullopt;
  const auto chunk = static_cast<int32_t>(
      chunk_rules_.ChunkTokens(begin, /*resumes_hit=*/false, tail, budget, /*promotion_boundary=*/0));
  if (!slots_.HasFree() || chunk == 0) return AdmissionOutcome::kNotNow;

  const PrefillReserve reserve = FirstChunkReserve(request, begin, chunk);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  const auto forked = coordinator_.Fork(*forks, held, begin, Demands(begin, chunk, reserve), tables);
  if (!forked.has_value()) return AdmissionOutcome::kNoCapacity;

  AppendPerGroup(fresh, forked->new_block_ids);
  AppendPerGroup(copies.pairs, forked->copies);
  request.ShareHashes(parent, config_.prefix_granularity);
  auto resources = std::make_unique<RequestResources>(coordinator_, resident_tables_, slots_.Take(), std::move(tables));
  // No page counts as hashed, although the parent may have published some: what the fork publishes at its next
  // admission then stamps them with its own, later epoch, as a hit would have done, and covers those that are not
  // published yet.
  resources->progress.access_epoch = forked->access_epoch;
  resources->covered_tokens = int64_t{begin} + chunk;
  const PrefillWindow window{.begin = begin, .size = chunk};
  book_.Move(request, [&](Request& moved) {
    moved.StartPrefill(std::move(resources), window, reserve.completes ? config_.decode_input_tokens : 0);
  });
  return AdmissionOutcome::kScheduled;
}

}  // namespace tokenspeed
