// Round: the plan under construction, and what is left of the round's limits.
//
// Invariants: rows <= max_batch_size; the inputs of all rows, on role D of the prefill rows, <= max_scheduled_tokens; a
// request is pushed at most once. What goes to or comes from the peer takes neither a row nor budget, and no result of
// it lands.
// Thread safety: none. The requests pushed must keep their resources until Finish.

#ifndef TOKENSPEED_SCHEDULER_ROUND_H_
#define TOKENSPEED_SCHEDULER_ROUND_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/execution_plan.h"
#include "scheduler/request.h"
#include "scheduler/request_admission.h"
#include "scheduler/scheduler_config.h"

namespace tokenspeed {

class Round {
 public:
  // `resident`: requests that may decode.
  Round(const SchedulerConfig& config, int64_t number, std::size_t resident)
      : number_(number),
        max_rows_(static_cast<std::size_t>(config.max_batch_size)),
        decode_width_(config.decode_input_tokens),
        decode_cost_(config.role == SchedulerConfig::Role::kDecode ? 0 : config.decode_input_tokens),
        budget_(config.max_scheduled_tokens) {
    plan_.forward->Reserve(std::min(resident, max_rows_));
  }

  int64_t budget() const { return budget_; }
  bool IsFull() const { return budget_ <= 0 || NumRows() >= max_rows_; }
  bool FitsDecode(int64_t kept_for_prefill) const {
    return !IsFull() && budget_ >= kept_for_prefill + decode_cost_;
  }
  bool HasScheduled(const Request& request) const { return request.last_round == number_; }
  // Of prompts; the output of a request may need a row of this kind too, and counts as a decode.
  bool HasPrefill() const { return num_prompts_ > 0; }
  bool HasDecode() const { return NumRows() > num_prompts_; }
  bool HasRemotePrefill() const { return plan_.remote_prefill != nullptr; }
  // No row and nothing for the peer.
  bool IsEmpty() const { return NumRows() == 0 && !HasRemotePrefill() && plan_.remote_decode == nullptr; }
  std::size_t NumRows() const { return batch().NumRows(); }
  RequestAdmission::FreshBlocks& fresh() { return fresh_; }
  RequestAdmission::BlockCopies& copies() { return copies_; }

  // Of the candidates that the cache could not hold, the first of the most urgent ones; null while there is none.
  Request* blocker() const { return blocker_; }
  void RecordBlocker(Request& request) {
    if (blocker_ == nullptr || request.priority() < blocker_->priority()) blocker_ = &request;
  }

  // From now on no new prompt of this priority or a less urgent one may start in this round.
  void SealNewPrompts(int32_t priority) { sealed_priority_ = priority; }
  std::optional<int32_t> sealed_priority() const { return sealed_priority_; }
  bool IsSealedFor(const Request& request) const {
    return sealed_priority_.has_value() && request.priority() >= *sealed_priority_;
  }

  // Adds the row of a request that has just been admitted.
  void PushPrefill(Request& request);
  // The row of output that goes on from the first `num_fed` tokens, up to what has been fed now.
  void PushFeed(Request& request, int32_t num_fed);
  // `input_id` as in ForwardBatch.
  void PushDecode(Request& request, int32_t input_id);
  void PushHandOff(Request& request, int32_t bootstrap_token);
  void PushRemotePrefill(Request& request);

  // Closes the batch and hands out the plan, with copies of the rows' tables if wanted. `group_ids` in group order.
  ExecutionPlan Finish(std::shared_ptr<const std::vector<std::string>> group_ids, ResidentTables& tables,
                       bool copies_tables);

 private:
  const ForwardBatch& batch() const { return *plan_.forward; }
  ForwardBatch::PrefillRow PrefillRowOf(const Request& request) const;
  ForwardBatch::DecodeRow DecodeRowOf(const Request& request, int32_t input_id) const;
  // `most_tokens`: that the result of the row can have.
  void Account(Request& request, int32_t input_tokens, int32_t most_tokens);

  int64_t number_;
  std::size_t max_rows_;
  int32_t decode_width_;
  int32_t decode_cost_;  // budget that a decode row takes
  int64_t budget_;
  std::size_t num_prompts_ = 0;
  Request* blocker_ = nullptr;
  std::optional<int32_t> sealed_priority_;
  ExecutionPlan plan_;
  RequestAdmission::FreshBlocks fresh_;  // empty until the first admission, then one list per group
  RequestAdmission::BlockCopies copies_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_ROUND_H_
