#include "scheduler/late_results.h"

#include <algorithm>

namespace tokenspeed {

void LateResults::Expect(const Request& request) {
  for (const RowOut& row : request.resources().rows_out) {
    rounds_[row.round].push_back(Row{.id = request.id(), .slot = request.resources().slot_index()});
    rounds_by_id_[request.id()].push_back(row.round);
    ++count_;
  }
  while (count_ > kMostExpected) Close(rounds_.begin());
}

std::span<const int64_t> LateResults::RoundsOf(const std::string& id) const {
  const auto entry = rounds_by_id_.find(id);
  return entry == rounds_by_id_.end() ? std::span<const int64_t>() : entry->second;
}

bool LateResults::Expects(int32_t slot, int64_t round) const {
  const auto entry = rounds_.find(round);
  return entry != rounds_.end() &&
         std::ranges::any_of(entry->second, [&](const Row& row) { return row.slot == slot; });
}

void LateResults::Arrive(const std::string& id, int64_t round) {
  const std::span<const int64_t> expected = RoundsOf(id);
  if (expected.empty()) return;
  const int64_t arrived = round == kAnyRound ? expected.front() : round;
  if (std::ranges::find(expected, arrived) == expected.end()) return;
  const auto entry = rounds_.find(arrived);
  std::erase_if(entry->second, [&](const Row& row) { return row.id == id; });
  if (entry->second.empty()) rounds_.erase(entry);
  ForgetRound(id, arrived);
}

void LateResults::CloseRound(int64_t round) {
  const auto entry = rounds_.find(round);
  if (entry != rounds_.end()) Close(entry);
}

void LateResults::ForgetRound(const std::string& id, int64_t round) {
  const auto entry = rounds_by_id_.find(id);
  std::erase(entry->second, round);
  if (entry->second.empty()) rounds_by_id_.erase(entry);
  --count_;
}

void LateResults::Close(Rounds::iterator round) {
  for (const Row& row : round->second) ForgetRound(row.id, round->first);
  rounds_.erase(round);
}

}  // namespace tokenspeed
