#include "scheduler/round.h"

#include <utility>

namespace tokenspeed {

void Round::Account(Request& request, int32_t input_tokens, int32_t most_tokens) {
  budget_ -= input_tokens;
  request.last_round = number_;
  request.resources().rows_out.push_back(RowOut{.round = number_, .most_tokens = most_tokens});
}

ForwardBatch::PrefillRow Round::PrefillRowOf(const Request& request) const {
  const PrefillWindow& window = request.window();
  return {.request_id = request.id(),
          .request_pool_index = request.resources().slot_index(),
          .prompt = request.PrefillTokens(),
          .start = window.begin - window.replay,
          .length = window.size + window.replay,
          .replay = window.replay};
}

ForwardBatch::DecodeRow Round::DecodeRowOf(const Request& request, int32_t input_id) const {
  return {.request_id = request.id(),
          .request_pool_index = request.resources().slot_index(),
          .input_length = decode_width_,
          .prefill_length = request.prefill_size(),
          .input_id = input_id,
          .spec_candidates = request.draft_candidates()};
}

void Round::PushPrefill(Request& request) {
  plan_.forward->AddPrefill(PrefillRowOf(request));
  ++num_prompts_;
  const bool completes = request.state() != RequestState::kPrefilling;
  Account(request, request.window().size + request.window().replay, completes ? 1 : 0);
}

void Round::PushFeed(Request& request, int32_t num_fed) {
  const int32_t length = request.TokenSize() - request.unfed_tokens() - num_fed;
  plan_.forward->AddPrefill({.request_id = request.id(),
                             .request_pool_index = request.resources().slot_index(),
                             .prompt = request.tokens(),
                             .start = num_fed,
                             .length = length});
  Account(request, length, request.unfed_tokens() == 0 ? 1 : 0);
}

void Round::PushDecode(Request& request, int32_t input_id) {
  plan_.forward->AddDecode(DecodeRowOf(request, input_id));
  Account(request, decode_cost_, decode_width_);
}

void Round::PushHandOff(Request& request, int32_t bootstrap_token) {
  if (plan_.remote_decode == nullptr) plan_.remote_decode = std::make_shared<ForwardBatch>();
  plan_.remote_decode->AddDecode(DecodeRowOf(request, bootstrap_token));
  request.last_round = number_;
}

void Round::PushRemotePrefill(Request& request) {
  if (plan_.remote_prefill == nullptr) plan_.remote_prefill = std::make_shared<ForwardBatch>();
  plan_.remote_prefill->AddPrefill(PrefillRowOf(request));
  request.last_round = number_;
}

ExecutionPlan Round::Finish(std::shared_ptr<const std::vector<std::string>> group_ids, ResidentTables& tables,
                            bool copies_tables) {
  for (ForwardBatch* batch : {plan_.forward.get(), plan_.remote_decode.get(), plan_.remote_prefill.get()}) {
    if (batch == nullptr) continue;
    batch->Seal();
    if (copies_tables) batch->CopyTables(*group_ids, tables);
  }
  plan_.table_changes.reserve(group_ids->size());
  for (std::size_t group = 0; group < group_ids->size(); ++group) {
    plan_.table_changes.push_back(tables.TakeChanges(group));
  }
  for (std::size_t group = 0; group < fresh_.size(); ++group) {
    plan_.pages_to_zero.emplace((*group_ids)[group], std::move(fresh_[group]));
  }
  for (std::size_t group = 0; group < copies_.pairs.size(); ++group) {
    plan_.pages_to_copy.emplace((*group_ids)[group], std::move(copies_.pairs[group]));
  }
  plan_.group_ids = std::move(group_ids);
  plan_.round_number = number_;
  return std::move(plan_);
}

}  // namespace tokenspeed
