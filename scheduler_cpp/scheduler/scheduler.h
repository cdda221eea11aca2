// Scheduler: decides, round by round, which requests run and where their cache lives.
//
// Invariants:
// - Deterministic: the same configuration and calls give the same plans. No clock, no randomness, and no iteration
//   over a hash container decides anything.
// - A refused call leaves everything as it was.
// - A waiting request that could run alone is passed by those behind it in at most max_overtaken_rounds rounds; then
//   nobody behind it is admitted before it is. Rounds in which a fork waits for its parent's prompt do not count.
// - A request appears at most once in a plan, and every row of a plan's batch must come back as one ExtendResult.
// - A request that a peer may be reading from or writing to is neither finished here nor retracted by the scheduler. Who
//   aborts one, or tells it to start again, must have stopped the transfer: its blocks are given away at once.
// - A prefix is looked for on the device, then on the host, then among the keys of an external store; what the executor
//   has not yet acknowledged to be copied is in none of them.
//
// Thread safety: none; calls on one instance must not overlap.
// Costs: a round of n decodes that stay within their tails O(n * groups), plus the export of the block tables.

#ifndef TOKENSPEED_SCHEDULER_SCHEDULER_H_
#define TOKENSPEED_SCHEDULER_SCHEDULER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "coordinator/tier_transfers.h"
#include "scheduler/capacity_model.h"
#include "scheduler/execution_event.h"
#include "scheduler/execution_plan.h"
#include "scheduler/late_results.h"
#include "scheduler/request_admission.h"
#include "scheduler/request_book.h"
#include "scheduler/request_slot_pool.h"
#include "scheduler/request_spec.h"
#include "scheduler/residency_ledger.h"
#include "scheduler/round.h"
#include "scheduler/row_results.h"
#include "scheduler/scheduler_config.h"
#include "scheduler/stall_watch.h"
#include "scheduler/waiting_scan.h"

namespace tokenspeed {

class Scheduler {
 public:
  // Throws std::invalid_argument for a configuration that is wrong or not supported.
  explicit Scheduler(SchedulerConfig config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // All or nothing. Throws std::invalid_argument naming the entry.
  void SubmitRequests(std::vector<RequestSpec> specs);
  // Requests submitted from now on share prefixes only with those submitted under the same version; running requests
  // keep theirs. Throws std::invalid_argument.
  void SetWeightVersion(std::string weight_version);
  ExecutionPlan NextExecutionPlan();
  // All or nothing. Throws std::runtime_error for an event that is illegal in its request's state, and
  // std::invalid_argument for one with a wrong value; the text ends with the number of the event.
  void Advance(const ExecutionEvent& event);
  // The same for the results of planned rows, from arrays: one ExtendResult a row and one Finish a slot, in order. With
  // a round these are all its results that will ever come; those of requests that have ended may be left out. All or
  // nothing; they throw what JudgeRows and JudgeFinishes throw.
  void AdvanceRows(const RowResults& rows);
  void FinishRows(std::span<const int32_t> slots);
  std::vector<ResidencyEvent> DrainResidencyEvents();
  // The block tables of all resident requests by request-pool slot, as of the last plan; one view per group, by name.
  std::vector<std::pair<std::string, BlockTableView>> BlockTableViews() const;
  // Residency events dropped since the start because too many waited for a drain.
  int64_t DroppedResidencyEvents() const { return ledger_.has_value() ? ledger_->num_dropped() : 0; }

  int32_t BootstrappingSize() const { return book_.Count(RequestState::kBootstrapping); }
  int32_t WaitingSize() const;
  int32_t PrefillingSize() const;
  int32_t RemotePrefillingSize() const { return book_.Count(RequestState::kRemotePrefilling); }
  int32_t DecodingSize() const;
  // Requests that a transfer between the workers may touch.
  int32_t PdTransferSize() const { return book_.NumPdPinned(); }
  bool PdTransferPinned(const std::string& request_id) const;
  // Times that a running request had to give up its cache, since the start.
  int64_t NumRetractions() const { return num_retractions_; }
  // Prompt tokens that could not be reused for want of a state snapshot at their end, since the start.
  int64_t NumCheckpointLostTokens() const { return admission_.num_checkpoint_lost_tokens(); }

  int32_t EmptyLcmBlocks() const { return coordinator_.NumEmptyLcmBlocks(); }
  int32_t ActiveLcmBlocks() const { return coordinator_.NumActiveLcmBlocks(); }
  int32_t AvailableLcmBlocks() const { return coordinator_.NumAvailableLcmBlocks(); }
  // As BlockPool::LcmBlockUses, of the device. A scan.
  std::vector<int32_t> LcmBlockUses() const { return coordinator_.device_pool().LcmBlockUses(); }
  // Prompt and landed output; -1 for an unknown id.
  int32_t RequestTokenSize(const std::string& request_id) const;
  int32_t MaxSingleRequestTokens() const { return max_single_request_tokens_; }
  // Throw std::out_of_range for an unknown group.
  int32_t GroupTotalPages(const std::string& group_id) const;
  int64_t GroupAvailablePages(const std::string& group_id) const;
  // Tokens that prompts took over from the group's cached blocks, since the start.
  int64_t GroupHitTokens(const std::string& group_id) const;

  // Host blocks that can be hit, those that no eviction can take, and empty host parents. The first two are scans.
  int32_t HostCachedBlocks() const { return coordinator_.NumHostCachedBlocks(); }
  int32_t HostPinnedBlocks() const { return coordinator_.NumHostPinnedBlocks(); }
  int32_t HostEmptyLcmBlocks() const { return coordinator_.host_pool().NumEmptyLcmBlocks(); }
  // Blocks that were not copied to the host for want of room there, since the start.
  int64_t NumDroppedStores() const { return transfers_.num_dropped_stores(); }

  // Drop every prefix cached on the device, or on both tiers, and the external store's keys; false, and no change, while
  // a request holds one, a copy is under way or a peer is at work.
  bool ClearDeviceCache() { return !AnyTransferInFlight() && coordinator_.ClearDeviceCache(); }
  bool ClearCache() { return !AnyTransferInFlight() && coordinator_.ClearCache(); }
  bool CanClearCache() const { return !AnyTransferInFlight() && coordinator_.CacheIsClearable(); }

  // As a request of this salt, submitted now, would look them up. Throws std::invalid_argument.
  std::vector<std::string> PrefixHashesForTokens(std::span<const int32_t> tokens,
                                                 const std::string& cache_salt = {}) const;

  struct PrefixKeys {
    std::vector<std::string> group_ids;
    std::vector<std::string> content_hashes;
    std::vector<int32_t> page_offsets;
  };
  static constexpr int64_t kMaxPrefixKeys = 1 << 24;
  // All block keys of these prefix pages, group by group. Throws std::invalid_argument for more than kMaxPrefixKeys.
  PrefixKeys ExpandPrefixKeys(std::span<const std::string> content_hashes) const;

  // The external store (scheduler_storage.cpp). What it is said to hold counts as a hit from now on, or does no longer.
  // All or nothing; without an external store nothing comes of them. Throw std::out_of_range for an unknown group and
  // std::invalid_argument for anything else that names no block.
  void RegisterStorageKeys(const PrefixKeys& keys);
  void UnregisterStorageKeys(const PrefixKeys& keys);
  // Pages of the requests that the next round may look up, each once: worth asking the store about, just before it.
  // Nothing without an external store, and nothing but a readmission's while no new prompt could start.
  std::vector<std::string> WaitingPrefixHashes();

 private:
  void ValidateSpecs(std::span<const RequestSpec> specs) const;

  // Forks (scheduler_forks.cpp).
  // Throws std::invalid_argument. `parent` is the entry of the same submission that the fork names, null without one.
  void ValidateFork(const RequestSpec& fork, const RequestSpec* parent) const;
  // The request whose blocks a request that was never admitted would take over; null when there is none any more.
  const Request* LiveParent(const Request& request) const;
  // Whether a waiting request has to wait for its parent's prompt, and so is no candidate in this round.
  bool AwaitsParent(const Request& request) const;
  AdmissionOutcome AdmitFirstChunk(Round& round, Request& request);

  std::size_t GroupIndex(const std::string& group_id) const;
  std::vector<CacheKey> ParseStorageKeys(const PrefixKeys& keys) const;

  // Rounds of roles P and D (scheduler_roles.cpp).
  void SchedulePrefillRole(Round& round);
  void ScheduleHandOffs(Round& round);
  // Frees an unfinished prompt that is blocked although nobody else is there. Role P has no other way out.
  void RestartLonePrompt(Round& round);
  void ScheduleDecodeRole(Round& round);
  // The unfinished recovery, or else the next one.
  void ScheduleRecovery(Round& round);
  void ScheduleRemotePrefill(Round& round);

  // Rounds (scheduler_rounds.cpp).
  void ScheduleFusedRole(Round& round);
  bool HasPrefillWork() const;
  void SchedulePrefills(Round& round);
  // Brings the next readmission back, if one is due. False when no further prefill work may follow in this round; when
  // the cache cannot hold it, nobody as urgent or less may start before it.
  bool ScheduleReadmission(Round& round);
  // False when no further prefill work may follow in this round.
  bool ScheduleResidentPrefills(Round& round);
  void ScheduleWaiting(Round& round);
  WaitingScanInputs InputsOfScan(const Round& round);
  void ScheduleDecodes(Round& round, int64_t kept_for_prefill);
  // Whether a waiting request must let blocked decodes and unfinished prompts go first.
  bool MustYield(const Request& request) const;
  // Whether a waiting request that cannot be admitted now keeps those behind it waiting too.
  bool HoldsTheLine(const Request& request) const;
  // Whether the peer is to compute this waiting request's prompt.
  bool IsRemote(const Request& request) const;
  AdmissionOutcome TryPrefill(Round& round, Request& request);
  // A decode step, or, where output has to be fed, as much of it as leaves `kept_for_prefill` of the budget.
  AdmissionOutcome TryDecode(Round& round, Request& request, int64_t kept_for_prefill);
  // Whether somebody owes an event that lets a resident request go on.
  bool AnythingOut() const;
  // Copies between the tiers, or between the workers.
  bool AnyTransferInFlight() const { return book_.NumPdPinned() > 0 || transfers_.HasAnyInFlight(); }
  // Starts to copy what the round has published, and hands out what there is to copy.
  void AttachCacheOperations(ExecutionPlan& plan);

  // Retraction (scheduler_retraction.cpp).
  struct Victim {
    Request* request = nullptr;
    bool last_resort = false;
  };
  void MakeRoom(Round& round);
  // Whether copies hold device blocks that will come back by themselves. Those started since somebody was found blocked
  // do not count, or else a steady flow of copies would keep them waiting for ever.
  bool MustAwaitTransfers();
  Victim ChooseVictim(const Round& round) const;
  // Whom a retraction may hit: residents of one priority, those whose reserve covers all they generate perhaps spared.
  struct Exposed {
    int32_t priority = 0;
    bool spare_covered = true;

    bool Includes(const Request& request) const;
  };
  // Those of the least urgent priority that anybody exposed has; nothing when everybody is spared.
  std::optional<Exposed> LeastUrgent(bool spare_covered) const;
  Request* ChooseAmongPrefilling(const Exposed& exposed) const;
  Request* ChooseAmongDecoding(const Exposed& exposed) const;
  // Who may have what the waiting request `excluded` has just given up; null when that is nobody in this round.
  Request* FirstReadyExcept(const Request& excluded) const;
  // Serves the grantee with what a retraction freed; true when the round should look for no further victim.
  bool Grant(Round& round, Request& grantee);
  void Retract(Request& request, bool made_way);

  void CompleteLoadBack(const LoadBackDoneEvent& event);
  void Apply(Request& request, const SchedulerEvent& event);
  void Land(Request& request, std::span<const int32_t> tokens, int64_t round,
            std::vector<int32_t> draft_candidates = {});
  void Finish(Request& request);
  // Lets go of everything the request holds; what it has out will be dropped when it comes in.
  void End(Request& request);

  SchedulerConfig config_;
  std::shared_ptr<const std::vector<std::string>> group_ids_;
  int32_t max_single_request_tokens_;
  std::optional<ResidencyLedger> ledger_;
  CacheCoordinator coordinator_;  // before the transfers and the book: both hold blocks
  TierTransfers transfers_;
  RequestSlotPool slots_;
  ResidentTables resident_tables_;
  RequestBook book_;
  LateResults late_results_;
  RequestAdmission admission_;
  WaitingScan waiting_scan_;
  StallWatch stall_watch_;
  int64_t round_number_ = 0;
  int64_t num_retractions_ = 0;
  std::optional<uint32_t> awaited_before_;  // while somebody is blocked: operations from this one on are not waited for
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_SCHEDULER_H_
