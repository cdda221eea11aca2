#include "scheduler/round.h"

#include <utility>

namespace tokenspeed {

void Round::Account(Request& request, int32_t input_tokens, int32_t most_tokens) {
  budget_ -= input_tokens;
  request.last_round = number_;
  request.resources().rows_out.push_back(RowOut{.round = number_, .most_tokens = most_tokens});
}

void Round::PushPrefill(Request& request) {
  const PrefillWindow& window = request.window();
  plan_.forward->AddPrefill(ForwardBatch::PrefillRow{.request_id = request.id(),
                                                     .request_pool_index = request.resources().slot_index(),
                                                     .prompt = request.PrefillTokens(),
                                                     .start = window.begin - window.replay,
                                                     .length = window.size + window.replay,
                                                     .replay = window.replay,
                                                     .tables = request.resources().ids()});
  Account(request, window.size + window.replay, request.state() == RequestState::kPrefilling ? 0 : 1);
}

void Round::PushDecode(Request& request) {
  plan_.forward->AddDecode(ForwardBatch::DecodeRow{.request_id = request.id(),
                                                   .request_pool_index = request.resources().slot_index(),
                                                   .input_length = decode_width_,
                                                   .prefill_length = request.prefill_size(),
                                                   .tables = request.resources().ids()});
  Account(request, decode_width_, decode_width_);
}

ExecutionPlan Round::Finish(std::span<const std::string> group_ids) {
  plan_.forward->Seal(group_ids);
  for (std::size_t group = 0; group < fresh_.size(); ++group) {
    plan_.pages_to_zero.emplace(group_ids[group], std::move(fresh_[group]));
  }
  plan_.round_number = number_;
  return std::move(plan_);
}

}  // namespace tokenspeed
