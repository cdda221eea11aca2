// The rounds of the two halves of a disaggregated worker. Role P computes prompts and hands them to a peer; role D has
// its prompts computed by one, decodes, and computes here only what a retraction took away.

#include "core/check.h"
#include "scheduler/scheduler.h"

namespace tokenspeed {

void Scheduler::SchedulePrefillRole(Round& round) {
  ScheduleHandOffs(round);
  if (ScheduleResidentPrefills(round)) ScheduleWaiting(round);
  RestartLonePrompt(round);
}

void Scheduler::ScheduleHandOffs(Round& round) {
  for (const auto& [rank, request] : book_.resident()) {
    if (request->state() != RequestState::kPrefillDone) continue;
    const AdmissionOutcome outcome = admission_.Decode(*request, round.fresh());
    TOKENSPEED_CHECK(outcome == AdmissionOutcome::kScheduled, "a hand-off takes no block");
    round.PushHandOff(*request, request->BootstrapToken().value());
  }
}

void Scheduler::RestartLonePrompt(Round& round) {
  Request* blocked = round.blocker();
  if (blocked == nullptr || blocked->state() != RequestState::kPrefilling) return;
  if (book_.resident().size() > 1 || !blocked->resources().rows_out.empty()) return;
  // It has the pool to itself, so its blocks are scattered over parents that others had opened. Only an empty pool
  // packs as densely as the capacity model promises. Nothing of an unfinished prompt is in the peer's hands.
  Retract(*blocked, /*made_way=*/false);
  coordinator_.EvictDeviceCache();
}

void Scheduler::ScheduleDecodeRole(Round& round) {
  ScheduleRecovery(round);
  if (round.HasPrefill()) return;  // a recovery runs alone
  ScheduleDecodes(round, 0);
  ScheduleRemotePrefill(round);
}

void Scheduler::ScheduleRecovery(Round& round) {
  if (book_.Count(RequestState::kPrefilling) == 0) {
    ScheduleReadmission(round);
    return;
  }
  ScheduleResidentPrefills(round);
  // What an unfinished recovery waits for must not go to those who come after it.
  if (round.blocker() != nullptr) round.SealNewPrompts(round.blocker()->priority());
}

void Scheduler::ScheduleRemotePrefill(Round& round) {
  std::vector<Request*> passed_over;
  for (const auto& [rank, waiting] : book_.waiting()) {
    Request& request = *waiting;
    if (request.IsReadmission()) continue;
    if (!admission_.HasFreeSlot() || round.IsSealedFor(request)) return;
    const AdmissionOutcome outcome = TryPrefill(round, request);
    if (outcome == AdmissionOutcome::kScheduled) {
      for (Request* overtaken : passed_over) ++overtaken->overtaken_rounds;
      return;
    }
    round.RecordBlocker(request);
    // A prompt is landed whole, so one that holds the line keeps it until it starts: as others end, nothing but it may
    // take their blocks. Requests that come back do not wait in this line; they go before it.
    if (HoldsTheLine(request)) return;
    passed_over.push_back(&request);
  }
}

}  // namespace tokenspeed
