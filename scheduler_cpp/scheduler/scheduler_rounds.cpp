// How a round is put together: which phases run, in which order, and when each of them stops.

#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

ExecutionPlan Scheduler::NextExecutionPlan() {
  book_.Reap();
  if (ledger_.has_value()) ledger_->Trim(coordinator_);
  Round round(config_, ++round_number_);
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
  MakeRoom(round);
  const bool idle = round.NumRows() == 0;
  const bool has_candidates = !book_.waiting().empty() || !book_.resident().empty();
  stall_watch_.Record(idle && has_candidates && !AnyResultOut(), static_cast<int32_t>(book_.waiting().size()),
                      static_cast<int32_t>(book_.resident().size()));
  return round.Finish(group_ids_);
}

bool Scheduler::HasPrefillWork() const {
  return !book_.waiting().empty() || book_.Count(RequestState::kPrefilling) > 0;
}

bool Scheduler::AnyResultOut() const {
  for (const auto& [rank, request] : book_.resident()) {
    if (!request->resources().rows_out.empty()) return true;
  }
  return false;
}

AdmissionOutcome Scheduler::TryPrefill(Round& round, Request& request) {
  const AdmissionOutcome outcome = admission_.Prefill(request, round.budget(), round.fresh());
  if (outcome == AdmissionOutcome::kScheduled) round.PushPrefill(request);
  return outcome;
}

AdmissionOutcome Scheduler::TryDecode(Round& round, Request& request) {
  const AdmissionOutcome outcome = admission_.Decode(request, round.fresh());
  request.decode_blocked = outcome == AdmissionOutcome::kNoCapacity;
  if (outcome == AdmissionOutcome::kScheduled) round.PushDecode(request);
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
  if (ScheduleResidentPrefills(round)) ScheduleWaiting(round);
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
  const bool fits_alone = int64_t{request.TokenSize()} + config_.decode_input_tokens <= max_single_request_tokens_;
  return fits_alone && request.overtaken_rounds >= config_.max_overtaken_rounds;
}

void Scheduler::ScheduleWaiting(Round& round) {
  std::vector<Request*> passed_over;
  for (auto next = book_.waiting().begin(); next != book_.waiting().end();) {
    if (round.IsFull() || !admission_.HasFreeSlot()) return;
    Request& request = *next->second;
    ++next;  // an admission takes the request out of this order
    const bool yields = MustYield(request);
    const AdmissionOutcome outcome = yields ? AdmissionOutcome::kNoCapacity : TryPrefill(round, request);
    if (outcome == AdmissionOutcome::kNoCapacity) {
      if (!yields) round.RecordBlocker(request);
      if (HoldsTheLine(request)) return;
      passed_over.push_back(&request);
    } else if (outcome == AdmissionOutcome::kScheduled) {
      for (Request* overtaken : passed_over) ++overtaken->overtaken_rounds;
      passed_over.clear();  // each counts a round once
    }
    if (request.state() == RequestState::kPrefilling) return;
  }
}

void Scheduler::ScheduleDecodes(Round& round, int64_t kept_for_prefill) {
  for (const auto& [rank, request] : book_.resident()) {
    if (request->state() == RequestState::kPrefilling || round.HasScheduled(*request)) continue;
    if (!round.FitsDecode(kept_for_prefill)) return;
    if (TryDecode(round, *request) == AdmissionOutcome::kNoCapacity) round.RecordBlocker(*request);
  }
}

}  // namespace tokenspeed
