#include "scheduler/round.h"

#include <utility>

namespace tokenspeed {

void Round::Account(Request& request, int32_t input_tokens) {
  budget_ -= input_tokens;
  request.last_round = number_;
  ++request.resources().results_in_flight;
}

void Round::PushPrefill(Request& request) {
  const PrefillWindow& window = request.window();
  plan_.forward->AddPrefill(ForwardBatch::PrefillRow{.request_id = request.id(),
                                                     .request_pool_index = request.resources().slot_index(),
                                                     .prompt = request.PrefillTokens(),
                                                     .start = window.begin - window.replay,
                                                     .length = window.size + window.replay,
                                                     .replay = window.replay});
  Account(request, window.size + window.replay);
}

void Round::PushDecode(Request& request) {
  plan_.forward->AddDecode(ForwardBatch::DecodeRow{.request_id = request.id(),
                                                   .request_pool_index = request.resources().slot_index(),
                                                   .input_length = decode_width_,
                                                   .prefill_length = request.prefill_size()});
  Account(request, decode_width_);
}

ExecutionPlan Round::Finish(std::shared_ptr<const std::vector<std::string>> group_ids, ResidentTables& tables,
                            bool copies_tables) {
  plan_.forward->Seal();
  if (copies_tables) plan_.forward->CopyTables(*group_ids, tables);
  plan_.table_changes.reserve(group_ids->size());
  for (std::size_t group = 0; group < group_ids->size(); ++group) {
    plan_.table_changes.push_back(tables.TakeChanges(group));
  }
  for (std::size_t group = 0; group < fresh_.size(); ++group) {
    plan_.pages_to_zero.emplace((*group_ids)[group], std::move(fresh_[group]));
  }
  for (std::size_t group = 0; group < copies_.size(); ++group) {
    plan_.pages_to_copy.emplace((*group_ids)[group], std::move(copies_[group]));
  }
  plan_.group_ids = std::move(group_ids);
  return std::move(plan_);
}

}  // namespace tokenspeed
