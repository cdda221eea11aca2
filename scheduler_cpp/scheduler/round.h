// Round: the plan under construction, and what is left of the round's limits.
//
// Invariants: rows <= max_batch_size; the inputs of all rows <= max_scheduled_tokens; a request is pushed at most once.
// Thread safety: none. The requests pushed must keep their resources until Finish.

#ifndef TOKENSPEED_SCHEDULER_ROUND_H_
#define TOKENSPEED_SCHEDULER_ROUND_H_

#include <cstdint>
#include <span>
#include <string>

#include "scheduler/execution_plan.h"
#include "scheduler/request.h"
#include "scheduler/request_admission.h"
#include "scheduler/scheduler_config.h"

namespace tokenspeed {

class Round {
 public:
  Round(const SchedulerConfig& config, int64_t number)
      : number_(number),
        max_rows_(static_cast<std::size_t>(config.max_batch_size)),
        decode_width_(config.decode_input_tokens),
        budget_(config.max_scheduled_tokens) {}

  int64_t budget() const { return budget_; }
  bool IsFull() const { return budget_ <= 0 || NumRows() >= max_rows_; }
  bool FitsDecode(int64_t kept_for_prefill) const {
    return !IsFull() && budget_ >= kept_for_prefill + decode_width_;
  }
  bool HasScheduled(const Request& request) const { return request.last_round == number_; }
  bool HasPrefill() const { return batch().NumExtends() > 0; }
  bool HasDecode() const { return NumRows() > batch().NumExtends(); }
  std::size_t NumRows() const { return batch().NumRows(); }
  RequestAdmission::FreshBlocks& fresh() { return fresh_; }

  // Of the candidates that the cache could not hold, the first of the most urgent ones; null while there is none.
  Request* blocker() const { return blocker_; }
  void RecordBlocker(Request& request) {
    if (blocker_ == nullptr || request.priority() < blocker_->priority()) blocker_ = &request;
  }

  // Adds the row of a request that has just been admitted.
  void PushPrefill(Request& request);
  void PushDecode(Request& request);

  // Closes the batch and hands out the plan. `group_ids` in group order.
  ExecutionPlan Finish(std::span<const std::string> group_ids);

 private:
  const ForwardBatch& batch() const { return *plan_.forward; }
  // `most_tokens`: that the result of the row can have.
  void Account(Request& request, int32_t input_tokens, int32_t most_tokens);

  int64_t number_;
  std::size_t max_rows_;
  int32_t decode_width_;
  int64_t budget_;
  Request* blocker_ = nullptr;
  ExecutionPlan plan_;
  RequestAdmission::FreshBlocks fresh_;  // empty until the first admission, then one list per group
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_ROUND_H_
