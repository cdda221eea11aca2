// EventRules: what each event may do to a request in each state. A batch of events is judged as a whole, on shadows
// of the requests it names, before any of it is applied; a batch that is refused has changed nothing.
//
// Thread safety: none.

#ifndef TOKENSPEED_SCHEDULER_EVENT_RULES_H_
#define TOKENSPEED_SCHEDULER_EVENT_RULES_H_

#include <cstdint>
#include <stdexcept>
#include <unordered_map>

#include "scheduler/execution_event.h"
#include "scheduler/request_book.h"

namespace tokenspeed {

// An event that is illegal in its request's state.
class InvalidTransition : public std::runtime_error {
 public:
  InvalidTransition(const char* event, RequestState state);
};

class EventRules {
 public:
  // `max_reserve_tokens`: the most tokens that one decode step may ask room for.
  EventRules(const RequestBook& book, SchedulerConfig::Role role, int32_t max_reserve_tokens)
      : book_(book), role_(role), max_reserve_tokens_(max_reserve_tokens) {}

  // The request that the event changes, given the events judged before it; null when the event has no effect. Throws
  // InvalidTransition, std::runtime_error or std::invalid_argument for an event that must not be applied.
  Request* Judge(const SchedulerEvent& event);

 private:
  struct Shadow {
    Request* request = nullptr;
    RequestState state = RequestState::kSubmitted;
    int64_t results_in_flight = 0;
    int64_t token_size = 0;
    int64_t covered_tokens = 0;
  };

  // Null for an unknown id.
  Shadow* ShadowOf(const std::string& id);

  bool Allows(const ExtendResultEvent& event, Shadow& shadow) const;
  bool Allows(const FinishEvent& event, Shadow& shadow) const;
  bool Allows(const AbortEvent& event, Shadow& shadow) const;
  bool Allows(const RetractEvent& event, Shadow& shadow) const;
  bool Allows(const UpdateReserveNumTokensEvent& event, Shadow& shadow) const;
  bool Allows(const BootstrappedEvent& event, Shadow& shadow) const;
  bool Allows(const FailedEvent& event, Shadow& shadow) const;
  bool Allows(const SucceededEvent& event, Shadow& shadow) const;
  bool Allows(const RemotePrefillDoneEvent& event, Shadow& shadow) const;

  // Throws for draft candidates where nobody hands them on.
  void CheckCandidates(const ExtendResultEvent& event, const Shadow& shadow) const;

  const RequestBook& book_;
  SchedulerConfig::Role role_;
  int32_t max_reserve_tokens_;
  std::unordered_map<const Request*, Shadow> shadows_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EVENT_RULES_H_
