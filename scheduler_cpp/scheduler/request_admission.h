// RequestAdmission: takes one request one step further, if the cache can hold what that needs. It decides how much is
// computed and how much is reserved; the coordinator decides where it is stored.
//
// Invariants:
// - An outcome other than kScheduled leaves the request, the book and the cache as they were.
// - A request that is alone is always admitted, if it is no longer than the capacity model allows. The model counts
//   densely packed blocks; a hit may be scattered over more parents than that, so a request that does not fit alone
//   with its hit starts without. On role D a recovery that is alone is cut into smaller chunks until it fits, because a
//   decode worker's pool is sized for landings; on role P a prompt that is alone does without the decode slot.
// - Nothing is published that the request has not computed, or will not have computed before any later reader runs.
//
// Ownership: borrows everything. Thread safety: none.
// Costs: a decode step within its tail O(groups), without allocation or hashing.

#ifndef TOKENSPEED_SCHEDULER_REQUEST_ADMISSION_H_
#define TOKENSPEED_SCHEDULER_REQUEST_ADMISSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "coordinator/tier_transfers.h"
#include "scheduler/prefill_chunk.h"
#include "scheduler/request_book.h"
#include "scheduler/request_slot_pool.h"
#include "scheduler/residency_ledger.h"
#include "scheduler/scheduler_config.h"

namespace tokenspeed {

enum class AdmissionOutcome : uint8_t {
  kScheduled,
  kNoCapacity,  // the cache cannot hold it now
  kNotNow,      // no token fits the budget, or there is no request slot
};

// Appends the entries of each group to those that the group has already.
template <typename Entry>
void AppendPerGroup(std::vector<std::vector<Entry>>& all, const std::vector<std::vector<Entry>>& more) {
  all.resize(more.size());
  for (std::size_t group = 0; group < more.size(); ++group) {
    all[group].insert(all[group].end(), more[group].begin(), more[group].end());
  }
}

class RequestAdmission {
 public:
  // Ids of freshly acquired blocks, one list per group.
  using FreshBlocks = std::vector<std::vector<int32_t>>;
  // Blocks to be copied before the batch runs.
  struct BlockCopies {
    std::vector<std::vector<BlockCopy>> pairs;  // per group, or empty
    std::vector<CacheBlockRef> held;            // sources that nobody else may hold: as AdmissionResult::copied_blocks
  };

  // `ledger` is null when residency events are off.
  RequestAdmission(const SchedulerConfig& config, CacheCoordinator& coordinator, TierTransfers& transfers,
                   RequestSlotPool& slots, ResidentTables& tables, RequestBook& book, ResidencyLedger* ledger);

  bool HasFreeSlot() const { return slots_.HasFree(); }
  // Budget a prefill needs to be sure to move.
  int64_t MinPrefillTokens() const { return chunk_rules_.MinChunkTokens(); }
  // Tokens that the groups of whole history held of prompts admitted beside a state group, but no snapshot covered.
  int64_t num_checkpoint_lost_tokens() const { return num_checkpoint_lost_tokens_; }
  // Tokens that the group's cached blocks held of what prompts took over: all of a hit in a group of whole history, the
  // end of it in a window, one block in a group of states, none in a replayable group. Forks look nothing up.
  int64_t num_hit_tokens(std::size_t group) const { return num_hit_tokens_[group]; }

  // The first chunk of a waiting request, or the next one of a prefilling request, computed here.
  AdmissionOutcome Prefill(Request& request, int64_t budget, FreshBlocks& fresh, BlockCopies& copies);
  // Role D: the destination of a submitted request's whole prompt, which the peer computes.
  AdmissionOutcome RemotePrefill(Request& request, FreshBlocks& fresh);
  // The next decode step; on role P the hand-off to the peer, which takes no further block.
  AdmissionOutcome Decode(Request& request, FreshBlocks& fresh);
  // In place of a decode step: the next of the request's unfed tokens, at most `budget` of them.
  AdmissionOutcome Feed(Request& request, int64_t budget, FreshBlocks& fresh);
  // The first chunk of a waiting request that takes over the blocks of `parent`, a resident request whose rows for the
  // same prompt are all written by earlier rounds: only the prompt's end is computed again (request_fork.cpp). Nothing
  // is returned, and nothing changed, when the parent no longer holds all that this needs.
  std::optional<AdmissionOutcome> Fork(Request& request, const Request& parent, int64_t budget, FreshBlocks& fresh,
                                       BlockCopies& copies);
  // Has the pages that a refused request could share watched until it is admitted or ends.
  void Watch(Request& request);
  // Publishes the pages that a request which ends normally has completed since its last admission, the one that it has
  // not completed where that is wanted, and starts to copy its whole pages to the host.
  void PublishAtFinish(Request& request);
  // The same for a request that is about to give up its cache, whose blocks may be handed out again at once. None of its
  // results may be out.
  void PublishAtRetraction(Request& request);

 private:
  AdmissionOutcome PrefillOnce(Request& request, int64_t budget, FreshBlocks& fresh, BlockCopies& copies);
  AdmissionOutcome FirstChunk(Request& request, int64_t budget, FreshBlocks& fresh, BlockCopies& copies);
  // An outcome, or the end of the longest prefix that the host can bring back after all.
  using FirstChunkOutcome = std::variant<AdmissionOutcome, int32_t>;
  AdmissionOutcome FirstChunkWithHit(Request& request, int64_t budget, FreshBlocks& fresh, BlockCopies& copies);
  FirstChunkOutcome FirstChunkAfter(const PrefixProbe& probe, Request& request, int64_t budget, FreshBlocks& fresh,
                                    BlockCopies& copies);
  // Publishes at once what the host brings back, or waits for it to arrive from the external store.
  void StartLoad(Request& request, AdmissionResult& admitted, std::span<BlockTable> tables);
  AdmissionOutcome NextChunk(Request& request, int64_t budget, FreshBlocks& fresh);
  AdmissionOutcome RemotePrefillAfter(const PrefixProbe& probe, Request& request, FreshBlocks& fresh);
  PrefixProbe ProbeFor(Request& request, int32_t max_host_tokens);
  // Leading tokens of the prompt that may be reused.
  int32_t NumProbedTokens(const Request& request) const;
  // Publishes the beginning of the page that `frontier` computed tokens leave unfinished (partial_pages.h).
  void PublishPartialPage(Request& request, int32_t frontier);
  // Whether nobody else holds cache.
  bool IsAlone(const Request& request) const;
  // Admits with `reserve`, or, where that is what keeps a lone prompt out, without the decode slot.
  std::optional<AdmissionResult> AdmitChunk(const PrefixProbe& probe, Request& request, std::span<BlockTable> tables,
                                            int32_t before, int32_t num_tokens, const PrefillReserve& reserve,
                                            const RequestProgress& made, std::optional<uint64_t> access_epoch);
  // Makes room for output, publishes the pages that are complete and lets go of what nobody reads; or changes nothing.
  bool Grow(Request& request, int32_t num_tokens, FreshBlocks& fresh);
  void EnterDecode(Request& request);
  // Tokens that the first decode step takes, all of them reserved by the chunk that completes the prompt.
  int32_t FirstDecodeTokens() const;
  // Demands of a chunk of `num_tokens` behind `before` computed tokens.
  std::vector<TokenDemand> Demands(int32_t before, int32_t num_tokens, const PrefillReserve& reserve) const;
  PrefillReserve FirstChunkReserve(const Request& request, int64_t hit, int64_t chunk) const;
  // Moves `progress` on to `frontier` and says which pages that completes. The result refers to `progress`.
  std::optional<CompletedPages> CompletePages(Request& request, int32_t frontier, CacheProgress& progress);
  // Notes the snapshot that a chunk ending at `end` writes at the last boundary inside it.
  void RecordSnapshot(CacheProgress& progress, int32_t end) const;
  // Adds what an admission took over to `num_hit_tokens_`.
  void CountHits(const PrefixProbe& probe);
  void DescribePages(Request& request, int32_t first_page, int32_t num_pages);
  void QueueForStore(Request& request, int32_t num_pages);

  const SchedulerConfig& config_;
  PrefillChunkRules chunk_rules_;
  CacheCoordinator& coordinator_;
  TierTransfers& transfers_;
  RequestSlotPool& slots_;
  ResidentTables& resident_tables_;
  RequestBook& book_;
  ResidencyLedger* ledger_;
  int64_t num_checkpoint_lost_tokens_ = 0;
  std::vector<int64_t> num_hit_tokens_;  // per group
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_ADMISSION_H_
