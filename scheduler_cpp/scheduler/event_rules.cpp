#include "scheduler/event_rules.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <variant>

#include "scheduler/landing_rules.h"

namespace tokenspeed {
namespace {

// Callers compare these texts, so they are spelt out rather than derived from the types.
const char* StateName(RequestState state) {
  switch (state) {
    case RequestState::kBootstrapping:
      return "tokenspeed::fsm::Bootstrapping";
    case RequestState::kSubmitted:
      return "tokenspeed::fsm::Submitted";
    case RequestState::kPrefilling:
      return "tokenspeed::fsm::Prefilling";
    case RequestState::kRemotePrefilling:
      return "tokenspeed::fsm::RemotePrefilling";
    case RequestState::kPrefillAwaitingResult:
      return "tokenspeed::fsm::PrefillAwaitingResult";
    case RequestState::kPrefillDone:
      return "tokenspeed::fsm::PrefillDone";
    case RequestState::kDecoding:
      return "tokenspeed::fsm::Decoding";
    case RequestState::kRetracted:
      return "tokenspeed::fsm::Retracted";
    case RequestState::kFinished:
      return "tokenspeed::fsm::Finished";
  }
  return "unknown";
}

// Whether a result belongs to a row of a former request; the row then is expected no more.
bool TakeLate(std::vector<int64_t>& rounds, int64_t round) {
  const auto taken = round == kAnyRound ? rounds.begin() : std::ranges::find(rounds, round);
  if (taken == rounds.end()) return false;
  rounds.erase(taken);
  return true;
}

}  // namespace

InvalidTransition::InvalidTransition(const char* event, RequestState state)
    : std::runtime_error(std::string("FSM transition invalid: event=tokenspeed::fsm::") + event +
                         "; state=" + StateName(state)) {}

EventRules::Shadow* EventRules::ShadowOf(const std::string& id) {
  Request* request = book_.Find(id);
  if (request == nullptr) return nullptr;
  const auto [entry, fresh] = shadows_.try_emplace(request);
  Shadow& shadow = entry->second;
  if (fresh) {
    shadow = Shadow{.request = request, .state = request->state(), .token_size = request->TokenSize()};
    const auto late = late_results_.RoundsOf(id);
    shadow.late_rounds.assign(late.begin(), late.end());
    if (request->IsResident()) {
      shadow.rows_out = request->resources().rows_out;
      shadow.covered_tokens = request->resources().covered_tokens;
    }
  }
  return &shadow;
}

Request* EventRules::Judge(const SchedulerEvent& event) {
  return std::visit(
      [this](const auto& typed) -> Request* {
        using Event = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<Event, WriteBackDoneEvent> || std::is_same_v<Event, LoadBackDoneEvent>) {
          return nullptr;  // concerns no request, and is never refused
        } else {
          Shadow* shadow = ShadowOf(typed.request_id);
          return shadow != nullptr && Allows(typed, *shadow) ? shadow->request : nullptr;
        }
      },
      event);
}

bool EventRules::Allows(const ExtendResultEvent& event, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished || TakeLate(shadow.late_rounds, event.round_number)) return false;
  const bool runs_here = HoldsCache(shadow.state) && shadow.state != RequestState::kRemotePrefilling;
  if (!runs_here) throw InvalidTransition("ExtendResultEvent", shadow.state);
  const LandingState at{.state = shadow.state,
                        .rows_out = shadow.rows_out,
                        .token_size = shadow.token_size,
                        .covered_tokens = shadow.covered_tokens};
  const auto num_tokens = static_cast<int64_t>(event.tokens.size());
  const LandingVerdict verdict = JudgeLanding(at, num_tokens, event.round_number);
  if (verdict == LandingVerdict::kNothingOut) {
    throw std::runtime_error("ExtendResult for request '" + event.request_id + "', which has no forward in flight");
  }
  if (verdict == LandingVerdict::kOtherRound || verdict == LandingVerdict::kOutOfOrder) {
    throw std::runtime_error("ExtendResult for request '" + event.request_id + "': round " +
                             std::to_string(event.round_number) +
                             (verdict == LandingVerdict::kOtherRound ? " has no row of it that is out"
                                                                     : " comes after one that has not landed"));
  }
  if (verdict == LandingVerdict::kPromptUnfinished) throw InvalidTransition("ExtendResultEvent", shadow.state);
  CheckCandidates(event, shadow);
  if (verdict == LandingVerdict::kTooManyTokens) {
    throw std::invalid_argument("ExtendResult for request '" + event.request_id + "': " + std::to_string(num_tokens) +
                                " tokens are more than its scheduled forwards can have produced");
  }
  const std::size_t row = *RowOfResult(shadow.rows_out, num_tokens, event.round_number);
  CheckForcedTokens(event, shadow, row);
  shadow.token_size += num_tokens + static_cast<int64_t>(event.forced_tokens.size());
  shadow.rows_out.erase(shadow.rows_out.begin() + static_cast<std::ptrdiff_t>(row));
  if (shadow.state == RequestState::kPrefillAwaitingResult && num_tokens > 0) {
    shadow.state = RequestState::kPrefillDone;
  }
  return true;
}

void EventRules::CheckCandidates(const ExtendResultEvent& event, const Shadow& shadow) const {
  if (event.spec_candidate_ids.empty()) return;
  if (config_.role != SchedulerConfig::Role::kPrefill) {
    throw std::invalid_argument("spec_candidate_ids belong to role P; request '" + event.request_id + "' has some");
  }
  if (shadow.state != RequestState::kPrefillAwaitingResult || event.tokens.empty()) {
    throw std::invalid_argument("spec_candidate_ids of request '" + event.request_id +
                                "' must come with the token that follows its prompt");
  }
}

void EventRules::CheckForcedTokens(const ExtendResultEvent& event, const Shadow& shadow, std::size_t row) const {
  if (event.forced_tokens.empty()) return;
  const std::string who = "forced_tokens of request '" + event.request_id + "' ";
  const bool are_fed = config_.role == SchedulerConfig::Role::kFused && config_.enable_mixed_prefill_decode &&
                       config_.decode_input_tokens == 1;
  if (!are_fed) {
    throw std::invalid_argument(who + "need role Fused, enable_mixed_prefill_decode and decode_input_tokens 1");
  }
  if (event.tokens.empty()) throw std::invalid_argument(who + "must follow a token that was drawn");
  const auto negative = std::ranges::find_if(event.forced_tokens, [](int32_t token) { return token < 0; });
  if (negative != event.forced_tokens.end()) {
    throw std::invalid_argument(who + "must be >= 0, got " + std::to_string(*negative));
  }
  const int64_t after = shadow.token_size + 1 + static_cast<int64_t>(event.forced_tokens.size());
  if (after > max_single_request_tokens_) {
    throw std::invalid_argument(who + "make it " + std::to_string(after) + " tokens long; the device cache holds " +
                                std::to_string(max_single_request_tokens_) + " of one request");
  }
  if (row + 1 < shadow.rows_out.size()) {
    throw std::runtime_error(who + "come too late: a later row of it is out, which was planned without them");
  }
}

bool EventRules::Allows(const FinishEvent&, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished) return false;
  const bool may_end = HasCompletePrefill(shadow.state) || shadow.state == RequestState::kRetracted;
  if (!may_end || IsPdPinned(config_.role, shadow.state)) throw InvalidTransition("FinishEvent", shadow.state);
  shadow.state = RequestState::kFinished;
  return true;
}

bool EventRules::Allows(const AbortEvent&, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished) return false;
  shadow.state = RequestState::kFinished;
  return true;
}

bool EventRules::Allows(const RetractEvent&, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished || shadow.state == RequestState::kRetracted) return false;
  if (!HoldsCache(shadow.state)) throw InvalidTransition("RetractEvent", shadow.state);
  shadow.state = RequestState::kRetracted;
  return true;
}

bool EventRules::Allows(const UpdateReserveNumTokensEvent& event, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished) return false;
  if (shadow.state != RequestState::kDecoding) throw InvalidTransition("UpdateReserveNumTokensEvent", shadow.state);
  const int32_t tokens = event.reserve_num_tokens_in_next_schedule_event;
  const int32_t most = std::min(max_single_request_tokens_, config_.max_scheduled_tokens);
  if (tokens < 0 || tokens > most) {
    throw std::invalid_argument("reserve_num_tokens_in_next_schedule_event of request '" + event.request_id +
                                "' must be in [0, " + std::to_string(most) + "], got " +
                                std::to_string(tokens));
  }
  return true;
}

bool EventRules::Allows(const BootstrappedEvent&, Shadow& shadow) const {
  if (shadow.state != RequestState::kBootstrapping) return false;
  shadow.state = RequestState::kSubmitted;
  return true;
}

bool EventRules::Allows(const FailedEvent&, Shadow& shadow) const { return Allows(AbortEvent{}, shadow); }

bool EventRules::Allows(const SucceededEvent&, Shadow& shadow) const {
  if (shadow.state == RequestState::kFinished) return false;
  if (!HasCompletePrefill(shadow.state)) throw InvalidTransition("SucceededEvent", shadow.state);
  shadow.state = RequestState::kFinished;
  return true;
}

bool EventRules::Allows(const RemotePrefillDoneEvent& event, Shadow& shadow) const {
  if (HasCompletePrefill(shadow.state) || shadow.state == RequestState::kFinished) return false;
  if (shadow.state != RequestState::kRemotePrefilling) throw InvalidTransition("RemotePrefillDoneEvent", shadow.state);
  if (event.bootstrap_token < 0) {
    throw std::invalid_argument("bootstrap_token of request '" + event.request_id + "' must be >= 0, got " +
                                std::to_string(event.bootstrap_token));
  }
  ++shadow.token_size;
  shadow.state = RequestState::kPrefillDone;
  return true;
}

}  // namespace tokenspeed
