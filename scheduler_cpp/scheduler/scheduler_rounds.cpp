// How a round is put together: which phases run, in which order, and when each of them stops.

#include <algorithm>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

ExecutionPlan Scheduler::NextExecutionPlan() {
  book_.Reap();
  if (ledger_.has_value()) ledger_->Trim(coordinator_);
  Round round(config_, ++round_number_, book_.resident().size());
  switch (config_.role) {
    case SchedulerConfig::Role::kPrefill:
      SchedulePrefillRole(round);
      break;
    case SchedulerConfig::Role::kDecode:
      ScheduleDecodeRole(round);
      MakeRoom(round);
      break;
    case SchedulerConfig::Role::kFused:
      ScheduleFusedRole(round);
      MakeRoom(round);
      break;
  }
  const bool idle = round.IsEmpty();
  ExecutionPlan plan = round.Finish(group_ids_, resident_tables_, config_.dense_block_tables);
  AttachCacheOperations(plan);
  const bool has_candidates = !book_.waiting().empty() || !book_.resident().empty();
  const bool anything_out = AnythingOut() || transfers_.HasAnyInFlight();
  stall_watch_.Record(idle && has_candidates && !anything_out, static_cast<int32_t>(book_.waiting().size()),
                      static_cast<int32_t>(book_.resident().size()));
  return plan;
}

void Scheduler::ScheduleFusedRole(Round& round) {
  if (config_.enable_mixed_prefill_decode) {
    const int64_t kept_for_prefill = HasPrefillWork() ? admission_.MinPrefillTokens() : 0;
    const bool decodes_held_back = !round.FitsDecode(kept_for_prefill);
    ScheduleDecodes(round, kept_for_prefill);
    SchedulePrefills(round);
    // The budget was kept for a prompt that cannot move, perhaps because decodes hold what it waits for.
    if (decodes_held_back && round.NumRows() == 0) ScheduleDecodes(round, 0);
  } else {
    SchedulePrefills(round);
    if (!round.HasPrefill()) ScheduleDecodes(round, 0);
  }
}

void Scheduler::AttachCacheOperations(ExecutionPlan& plan) {
  transfers_.StartPendingStores(SourceGuard::kPinnedUntilAck);
  const std::vector<TierOperation> stores = transfers_.TakeStartedStores();
  if (!stores.empty()) plan.write_back.emplace(stores);
  const std::vector<TierOperation> loads = transfers_.TakeStartedLoads();
  if (!loads.empty()) plan.load_back.emplace(loads);
}

bool Scheduler::HasPrefillWork() const {
  return !book_.waiting().empty() || book_.Count(RequestState::kPrefilling) > 0;
}

bool Scheduler::AnythingOut() const {
  const bool any_handed_off = !config_.DecodesHere() && book_.Count(RequestState::kDecoding) > 0;
  if (any_handed_off || book_.Count(RequestState::kRemotePrefilling) > 0) return true;
  for (const auto& [rank, request] : book_.resident()) {
    if (!request->resources().rows_out.empty()) return true;
  }
  return false;
}

bool Scheduler::IsRemote(const Request& request) const {
  return config_.role == SchedulerConfig::Role::kDecode && request.state() == RequestState::kSubmitted;
}

AdmissionOutcome Scheduler::TryPrefill(Round& round, Request& request) {
  if (IsRemote(request)) {
    const AdmissionOutcome outcome = admission_.RemotePrefill(request, round.fresh());
    if (outcome == AdmissionOutcome::kScheduled) round.PushRemotePrefill(request);
    return outcome;
  }
  const AdmissionOutcome outcome =
      request.IsWaiting() ? AdmitFirstChunk(round, request)
                          : admission_.Prefill(request, round.budget(), round.fresh(), round.copies());
  if (outcome == AdmissionOutcome::kScheduled) round.PushPrefill(request);
  return outcome;
}

AdmissionOutcome Scheduler::TryDecode(Round& round, Request& request, int64_t kept_for_prefill) {
  if (request.unfed_tokens() > 0) {
    const int32_t num_fed = request.NumFedTokens();
    const AdmissionOutcome outcome = admission_.Feed(request, round.budget() - kept_for_prefill, round.fresh());
    request.decode_blocked = outcome == AdmissionOutcome::kNoCapacity;
    if (outcome == AdmissionOutcome::kScheduled) round.PushFeed(request, num_fed);
    return outcome;
  }
  // The token that a peer computed is on no device here. Any other may not have landed yet.
  const bool starts_from_host =
      config_.role == SchedulerConfig::Role::kDecode && request.state() == RequestState::kPrefillDone;
  const std::optional<int32_t> first = starts_from_host ? request.BootstrapToken() : std::nullopt;
  const AdmissionOutcome outcome = admission_.Decode(request, round.fresh());
  request.decode_blocked = outcome == AdmissionOutcome::kNoCapacity;
  if (outcome == AdmissionOutcome::kScheduled) {
    round.PushDecode(request, first.value_or(ForwardBatch::kTokenIsOnDevice));
  }
  return outcome;
}

bool Scheduler::MustYield(const Request& request) const {
  if (!request.yields()) return false;
  for (const auto& [rank, resident] : book_.resident()) {
    if (resident->decode_blocked || resident->state() == RequestState::kPrefilling) return true;
  }
  return false;
}

void Scheduler::SchedulePrefills(Round& round) {
  if (ScheduleReadmission(round) && ScheduleResidentPrefills(round)) ScheduleWaiting(round);
}

bool Scheduler::ScheduleReadmission(Round& round) {
  if (book_.readmissions().empty() || round.IsFull()) return true;
  Request& request = *book_.readmissions().begin()->second;
  const auto new_prompt = std::find_if(book_.waiting().begin(), book_.waiting().end(),
                                       [](const auto& entry) { return !entry.second->IsReadmission(); });
  const bool passed = new_prompt != book_.waiting().end() && new_prompt->second->priority() < request.priority();
  if (passed || MustYield(request)) return true;
  if (TryPrefill(round, request) == AdmissionOutcome::kNoCapacity) round.SealNewPrompts(request.priority());
  return request.state() != RequestState::kPrefilling;
}

bool Scheduler::ScheduleResidentPrefills(Round& round) {
  if (book_.Count(RequestState::kPrefilling) == 0) return true;
  for (const auto& [rank, request] : book_.resident()) {
    if (request->state() != RequestState::kPrefilling) continue;
    if (round.IsFull()) return false;
    const AdmissionOutcome outcome = TryPrefill(round, *request);
    if (outcome == AdmissionOutcome::kNoCapacity) {
      round.RecordBlocker(*request);
      return false;
    }
    // An unfinished prompt keeps the head of the line, whether it moved or not.
    if (request->state() == RequestState::kPrefilling) return false;
  }
  return true;
}

bool Scheduler::HoldsTheLine(const Request& request) const {
  // One that has outgrown the whole pool would hold it for ever.
  const int64_t least = int64_t{request.TokenSize()} + (config_.DecodesHere() ? config_.decode_input_tokens : 0);
  const bool fits_alone = least <= max_single_request_tokens_;
  return fits_alone && request.overtaken_rounds >= config_.max_overtaken_rounds;
}

WaitingScanInputs Scheduler::InputsOfScan(const Round& round) {
  return WaitingScanInputs{.dropped_handles = coordinator_.device_pool().NumDroppedHandles() +
                                              coordinator_.host_pool().NumDroppedHandles(),
                           .watched_arrivals = coordinator_.watch().num_arrivals(),
                           .book_version = book_.version(),
                           .budget = round.budget(),
                           .sealed_priority = round.sealed_priority()};
}

void Scheduler::ScheduleWaiting(Round& round) {
  if (round.IsFull() || !admission_.HasFreeSlot()) return;
  const WaitingScanInputs inputs = InputsOfScan(round);
  if (waiting_scan_.Holds(inputs)) {
    if (waiting_scan_.blocker() != nullptr) round.RecordBlocker(*waiting_scan_.blocker());
    return;
  }
  waiting_scan_.Forget();
  std::vector<Request*> passed_over;
  bool repeatable = true;
  Request* blocker = nullptr;
  for (auto next = book_.waiting().begin(); next != book_.waiting().end();) {
    if (round.IsFull() || !admission_.HasFreeSlot()) return;
    Request& request = *next->second;
    ++next;  // an admission takes the request out of this order
    if (request.IsReadmission()) continue;
    if (round.IsSealedFor(request)) break;
    if (AwaitsParent(request)) {
      repeatable = false;
      continue;
    }
    const bool yields = MustYield(request);
    const AdmissionOutcome outcome = yields ? AdmissionOutcome::kNoCapacity : TryPrefill(round, request);
    // Whether a request must yield changes with decodes that do not fit, which no version counts.
    repeatable = repeatable && !request.yields() && outcome == AdmissionOutcome::kNoCapacity;
    if (outcome == AdmissionOutcome::kNoCapacity) {
      if (!yields) {
        round.RecordBlocker(request);
        if (blocker == nullptr) blocker = &request;
        admission_.Watch(request);
      }
      if (HoldsTheLine(request)) break;
      passed_over.push_back(&request);
    } else if (outcome == AdmissionOutcome::kScheduled) {
      for (Request* overtaken : passed_over) ++overtaken->overtaken_rounds;
      passed_over.clear();  // each counts a round once
    }
    if (request.state() == RequestState::kPrefilling) return;
  }
  if (repeatable) waiting_scan_.Remember(inputs, blocker);
}

void Scheduler::ScheduleDecodes(Round& round, int64_t kept_for_prefill) {
  // Requests and what they hold are scattered over memory that the model runner has used since; asking for the next
  // ones early hides most of the way there.
  constexpr std::size_t kRequestsAhead = 8;
  constexpr std::size_t kResourcesAhead = 5;
  constexpr std::size_t kTablesAhead = 2;
  const ResidentOrder& resident = book_.resident();
  for (std::size_t place = 0; place < resident.size(); ++place) {
    if (place + kRequestsAhead < resident.size()) resident[place + kRequestsAhead].Prefetch();
    if (place + kResourcesAhead < resident.size()) resident[place + kResourcesAhead].PrefetchResources();
    if (place + kTablesAhead < resident.size()) resident[place + kTablesAhead].PrefetchTables();
    Request& request = resident[place];
    if (!HasCompletePrefill(request.state()) || round.HasScheduled(request)) continue;
    if (!config_.plan_past_max_new_tokens && request.IsDeclaredOutputOut()) continue;
    if (!round.FitsDecode(kept_for_prefill)) return;
    if (TryDecode(round, request, kept_for_prefill) == AdmissionOutcome::kNoCapacity) round.RecordBlocker(request);
  }
}

}  // namespace tokenspeed
