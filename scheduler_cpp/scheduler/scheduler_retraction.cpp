// Retraction: when nobody's prompt moves and somebody is blocked for want of storage, a resident request gives up its
// cache and comes back later with its output as part of its prompt.

#include <optional>
#include <tuple>
#include <utility>

#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

bool IsSpared(const Request& request, bool spare_covered) {
  return spare_covered && request.Budget().ReserveCoversGeneration();
}

bool IsQuiescent(const Request& request) { return request.resources().rows_out.empty(); }

}  // namespace

bool Scheduler::Exposed::Includes(const Request& request) const {
  return request.priority() == priority && !IsSpared(request, spare_covered);
}

std::optional<Scheduler::Exposed> Scheduler::LeastUrgent(bool spare_covered) const {
  // The order is by priority, so the last one that is not spared is of the least urgent.
  for (auto entry = book_.resident().rbegin(); entry != book_.resident().rend(); ++entry) {
    const Request& request = *entry->second;
    if (!request.IsPdPinned() && !IsSpared(request, spare_covered)) return Exposed{request.priority(), spare_covered};
  }
  return std::nullopt;
}

Request* Scheduler::ChooseAmongPrefilling(const Exposed& exposed) const {
  Request* chosen = nullptr;
  for (const auto& [rank, request] : book_.resident()) {
    if (request->state() != RequestState::kPrefilling || !exposed.Includes(*request)) continue;
    if (chosen == nullptr || request->TokenSize() > chosen->TokenSize()) chosen = request;
  }
  return chosen;
}

Request* Scheduler::ChooseAmongDecoding(const Exposed& exposed) const {
  std::vector<Request*> candidates;
  bool any_quiescent = false;
  for (const auto& [rank, request] : book_.resident()) {
    if (!HasCompletePrefill(request->state()) || !exposed.Includes(*request)) continue;
    candidates.push_back(request);
    any_quiescent = any_quiescent || IsQuiescent(*request);
  }
  // Whoever would be chosen has a result out, so the choice, which scans whole tables, is not worth making.
  if (!any_quiescent) return nullptr;
  Request* chosen = nullptr;
  int32_t chosen_releasable = 0;
  for (Request* request : candidates) {
    const int32_t releasable =
        coordinator_.NumNewlyReleasableLcmBlocks(std::as_const(*request).resources().tables());
    if (chosen == nullptr || std::tuple(-releasable, request->TokenSize(), std::string_view(request->id())) <
                                 std::tuple(-chosen_releasable, chosen->TokenSize(), std::string_view(chosen->id()))) {
      chosen = request;
      chosen_releasable = releasable;
    }
  }
  return chosen;
}

Scheduler::Victim Scheduler::ChooseVictim(const Round& round) const {
  for (const bool last_resort : {false, true}) {
    if (last_resort && !round.IsEmpty()) break;
    const std::optional<Exposed> exposed = LeastUrgent(/*spare_covered=*/!last_resort);
    if (!exposed.has_value()) continue;
    Request* chosen = ChooseAmongPrefilling(*exposed);
    if (chosen == nullptr) chosen = ChooseAmongDecoding(*exposed);
    // A worse victim in place of one whose result is still out would only postpone the same loss.
    if (chosen == nullptr || !IsQuiescent(*chosen)) break;
    return Victim{.request = chosen, .last_resort = last_resort};
  }
  return Victim{};
}

void Scheduler::Retract(Request& request, bool made_way) {
  ++num_retractions_;
  if (made_way && config_.HasHostCache()) admission_.PublishAtRetraction(request);
  // The executor's retractions leave nothing to come back to; a decode worker's requests come back all the same, since
  // their peer has let go of them.
  const bool recoverable = config_.role == SchedulerConfig::Role::kDecode || (made_way && config_.HasHostCache());
  book_.Move(request, [&](Request& moved) { moved.Retract(made_way, recoverable, num_retractions_); });
}

Request* Scheduler::FirstReadyExcept(const Request& excluded) const {
  for (const auto& [rank, request] : book_.waiting()) {
    // What an urgent request gives up is not for a less urgent one; it may be this one's again in the next round.
    if (request->priority() > excluded.priority()) return nullptr;
    if (request->IsReadmission()) continue;
    if (AwaitsParent(*request)) continue;
    if (request != &excluded && !MustYield(*request)) return request;
    if (HoldsTheLine(*request)) return nullptr;
  }
  return nullptr;
}

bool Scheduler::Grant(Round& round, Request& grantee) {
  const bool decodes = HasCompletePrefill(grantee.state());
  if (round.IsFull() || (decodes && !round.FitsDecode(0))) return true;
  const bool joins_batch = !decodes && !IsRemote(grantee);
  const bool mixes = config_.role == SchedulerConfig::Role::kFused && config_.enable_mixed_prefill_decode;
  if (joins_batch && round.HasDecode() && !mixes) return true;
  const AdmissionOutcome outcome = decodes ? TryDecode(round, grantee, 0) : TryPrefill(round, grantee);
  return outcome != AdmissionOutcome::kNoCapacity;
}

bool Scheduler::MustAwaitTransfers() {
  const std::optional<uint32_t> oldest = transfers_.OldestHoldingDevice();
  if (!oldest.has_value()) return false;
  if (!awaited_before_.has_value()) awaited_before_ = transfers_.next_op_id();
  return *oldest < *awaited_before_;
}

void Scheduler::MakeRoom(Round& round) {
  Request* grantee = round.HasPrefill() || round.HasRemotePrefill() ? nullptr : round.blocker();
  if (grantee == nullptr) {
    awaited_before_.reset();
    return;
  }
  if (MustAwaitTransfers()) return;
  while (grantee != nullptr) {
    const Victim victim = ChooseVictim(round);
    if (victim.request == nullptr) return;
    Retract(*victim.request, /*made_way=*/true);
    awaited_before_.reset();
    // It was blocked with the pool to itself, so its blocks were scattered over parents that cached ones had opened.
    // Only an empty pool packs as densely as the capacity model promises.
    if (book_.resident().empty()) coordinator_.EvictDeviceCache();
    if (victim.last_resort) {
      ScheduleDecodes(round, 0);
      if (round.HasDecode()) return;
    }
    if (grantee == victim.request) grantee = FirstReadyExcept(*victim.request);
    if (grantee == nullptr || Grant(round, *grantee)) return;
    // What the victim has given up may be held by copies still, so a second one might give way for nothing.
    if (transfers_.OldestHoldingDevice().has_value()) return;
  }
}

}  // namespace tokenspeed
