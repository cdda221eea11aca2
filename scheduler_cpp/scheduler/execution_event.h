// What the executor reports back. Every type is a plain record; their meaning per request state is in
// event_rules.h.

#ifndef TOKENSPEED_SCHEDULER_EXECUTION_EVENT_H_
#define TOKENSPEED_SCHEDULER_EXECUTION_EVENT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tokenspeed {

struct ExtendResultEvent {
  std::string request_id;
  std::vector<int32_t> tokens = {};
  std::vector<int32_t> spec_candidate_ids = {};
  int64_t round_number = 0;  // of the plan that had the row; 0 = the oldest row that fits
  // Output behind `tokens` that is certain without being drawn. The next row feeds it all, the drawn token included.
  std::vector<int32_t> forced_tokens = {};
};

struct FinishEvent {
  std::string request_id;
};

struct AbortEvent {
  std::string request_id;
};

struct RetractEvent {
  std::string request_id;
};

struct UpdateReserveNumTokensEvent {
  std::string request_id;
  int32_t reserve_num_tokens_in_next_schedule_event = 0;
};

struct WriteBackDoneEvent {
  uint32_t op_id = 0;
};

struct LoadBackDoneEvent {
  uint32_t op_id = 0;
  bool success = true;
};

struct BootstrappedEvent {
  std::string request_id;
};

struct FailedEvent {
  std::string request_id;
};

struct SucceededEvent {
  std::string request_id;
};

struct RemotePrefillDoneEvent {
  std::string request_id;
  int32_t bootstrap_token = -1;
};

using SchedulerEvent =
    std::variant<ExtendResultEvent, FinishEvent, AbortEvent, RetractEvent, UpdateReserveNumTokensEvent,
                 WriteBackDoneEvent, LoadBackDoneEvent, BootstrappedEvent, FailedEvent, SucceededEvent,
                 RemotePrefillDoneEvent>;

struct ExecutionEvent {
  std::vector<SchedulerEvent> events;  // applied in this order

  ExecutionEvent& AddEvent(SchedulerEvent event) {
    events.push_back(std::move(event));
    return *this;
  }
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EXECUTION_EVENT_H_
