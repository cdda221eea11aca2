// EventRules: what each event may do to a request in each state. A batch of events is judged as a whole, on shadows
// of the requests it names, before any of it is applied; a batch that is refused has changed nothing.
//
// The result of a row whose request has ended has no effect on any request (see late_results.h).
//
// Thread safety: none.

#ifndef TOKENSPEED_SCHEDULER_EVENT_RULES_H_
#define TOKENSPEED_SCHEDULER_EVENT_RULES_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "scheduler/execution_event.h"
#include "scheduler/late_results.h"
#include "scheduler/request_book.h"

namespace tokenspeed {

// An event that is illegal in its request's state.
class InvalidTransition : public std::runtime_error {
 public:
  InvalidTransition(const char* event, RequestState state);
};

class EventRules {
 public:
  EventRules(const RequestBook& book, const LateResults& late_results, const SchedulerConfig& config,
             int32_t max_single_request_tokens)
      : book_(book),
        late_results_(late_results),
        config_(config),
        max_single_request_tokens_(max_single_request_tokens) {}

  // The request that the event changes, given the events judged before it; null when the event has no effect. Throws
  // InvalidTransition, std::runtime_error or std::invalid_argument for an event that must not be applied.
  Request* Judge(const SchedulerEvent& event);

 private:
  struct Shadow {
    Request* request = nullptr;
    RequestState state = RequestState::kSubmitted;
    RowsOut rows_out = {};
    std::vector<int64_t> late_rounds = {};  // of rows that a former request of the id has out
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
  // Throws for forced tokens that no row could feed next. `row` is the one that the result is of.
  void CheckForcedTokens(const ExtendResultEvent& event, const Shadow& shadow, std::size_t row) const;

  const RequestBook& book_;
  const LateResults& late_results_;
  const SchedulerConfig& config_;
  int32_t max_single_request_tokens_;
  std::unordered_map<const Request*, Shadow> shadows_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EVENT_RULES_H_
