// Scheduler: decides, round by round, which requests run and where their cache lives.
//
// Invariants:
// - Deterministic: the same configuration and calls give the same plans. No clock, no randomness, and no iteration
//   over a hash container decides anything.
// - A refused call leaves everything as it was.
// - A waiting request that could run alone is passed by those behind it in at most max_overtaken_rounds rounds; then
//   nobody behind it is admitted before it is.
// - A request appears at most once in a plan, and every row of a plan must come back as one ExtendResult.
//
// Built so far: role Fused, device tier, every kind of group. Anything else is refused at
// construction.
//
// Thread safety: none; calls on one instance must not overlap.
// Costs: a round of n decodes that stay within their tails O(n * groups), plus the export of the block tables.

#ifndef TOKENSPEED_SCHEDULER_SCHEDULER_H_
#define TOKENSPEED_SCHEDULER_SCHEDULER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/cache_coordinator.h"
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
  // Residency events dropped since the start because too many waited for a drain.
  int64_t DroppedResidencyEvents() const { return ledger_.has_value() ? ledger_->num_dropped() : 0; }

  int32_t WaitingSize() const;
  int32_t PrefillingSize() const;
  int32_t DecodingSize() const;
  // Times that a running request had to give up its cache, since the start.
  int64_t NumRetractions() const { return num_retractions_; }

  int32_t EmptyLcmBlocks() const { return coordinator_.NumEmptyLcmBlocks(); }
  int32_t ActiveLcmBlocks() const;
  int32_t AvailableLcmBlocks() const { return coordinator_.NumAvailableLcmBlocks(); }
  // Prompt and landed output; -1 for an unknown id.
  int32_t RequestTokenSize(const std::string& request_id) const;
  int32_t MaxSingleRequestTokens() const { return max_single_request_tokens_; }
  // Throw std::out_of_range for an unknown group.
  int32_t GroupTotalPages(const std::string& group_id) const;
  int64_t GroupAvailablePages(const std::string& group_id) const;

  // Drops every cached prefix; false, and no change, while a request holds one.
  bool ClearCache() { return coordinator_.ClearDeviceCache(); }
  bool CanClearCache() const { return coordinator_.CacheIsClearable(); }

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

 private:
  void ValidateSpecs(std::span<const RequestSpec> specs) const;
  std::size_t GroupIndex(const std::string& group_id) const;

  // Rounds (scheduler_rounds.cpp).
  bool HasPrefillWork() const;
  void SchedulePrefills(Round& round);
  // False when no further prefill work may follow in this round.
  bool ScheduleResidentPrefills(Round& round);
  void ScheduleWaiting(Round& round);
  void ScheduleDecodes(Round& round, int64_t kept_for_prefill);
  // Whether a waiting request must let blocked decodes and unfinished prompts go first.
  bool MustYield(const Request& request) const;
  // Whether a waiting request that cannot be admitted now keeps those behind it waiting too.
  bool HoldsTheLine(const Request& request) const;
  AdmissionOutcome TryPrefill(Round& round, Request& request);
  AdmissionOutcome TryDecode(Round& round, Request& request);
  bool AnyResultOut() const;

  // Retraction (scheduler_retraction.cpp).
  struct Victim {
    Request* request = nullptr;
    bool last_resort = false;
  };
  void MakeRoom(Round& round);
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

  void Apply(Request& request, const SchedulerEvent& event);
  void Finish(Request& request);
  // Lets go of everything the request holds; what it has out will be dropped when it comes in.
  void End(Request& request);

  SchedulerConfig config_;
  std::vector<std::string> group_ids_;
  int32_t max_single_request_tokens_;
  std::optional<ResidencyLedger> ledger_;
  CacheCoordinator coordinator_;  // before the book: requests hold blocks
  RequestSlotPool slots_;
  RequestBook book_;
  LateResults late_results_;
  RequestAdmission admission_;
  StallWatch stall_watch_;
  int64_t round_number_ = 0;
  int64_t num_retractions_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_SCHEDULER_H_
