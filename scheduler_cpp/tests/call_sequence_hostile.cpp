// The wrong calls of a CallSequence.

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tests/call_sequence.h"

namespace tokenspeed::testing {

void CallSequence::Refused(const Call& call) {
  const std::vector<int64_t> before = Gauges(scheduler_);
  bool refused = false;
  try {
    call(scheduler_);
  } catch (const std::invalid_argument&) {
    refused = true;
  } catch (const std::runtime_error&) {
    refused = true;
  }
  Require(refused, "a wrong call is refused");
  Require(Gauges(scheduler_) == before, "a refused call changes nothing");
  ++counts_.refusals;
}

// Among right ones, at a place that the bytes choose.
void CallSequence::RefusedEvents(std::vector<SchedulerEvent> bad) {
  ExecutionEvent batch;
  const int32_t place = Below(3);
  if (!out_.empty() && place > 0) {
    const std::string& id = out_.begin()->first;
    const auto* result = std::get_if<ExtendResultEvent>(&bad.front());
    // A right result of the same id would make room for a wrong one.
    if (result == nullptr || result->request_id != id) {
      for (SchedulerEvent& event : ResultOf(id, place == 1)) batch.AddEvent(std::move(event));
    }
  }
  batch.AddEvent(AbortEvent{"nobody"});
  for (SchedulerEvent& event : bad) batch.AddEvent(std::move(event));
  batch.AddEvent(AbortEvent{AnyLive()});
  Refused([&](Scheduler& scheduler) { scheduler.Advance(batch); });
}

void CallSequence::WrongEvent() {
  const std::string id = AnyLive();
  if (id.empty()) return;
  const auto rows = out_.find(id);
  const std::vector<int32_t> many(1000, 1);
  switch (Below(8)) {
    case 0: {  // one result more than there are rows
      std::vector<SchedulerEvent> results;
      for (std::size_t row = rows == out_.end() ? 0 : rows->second.size(); row > 0; --row) {
        results.emplace_back(ExtendResultEvent{.request_id = id});
      }
      results.emplace_back(ExtendResultEvent{.request_id = id});
      return RefusedEvents(std::move(results));
    }
    case 1:  // more tokens than any row produces; a late row swallows whatever comes for it
      if (rows != out_.end() && IsLate(id, rows->second.front())) return;
      return RefusedEvents({ExtendResultEvent{.request_id = id, .tokens = many}});
    case 2:
      return RefusedEvents({ExtendResultEvent{.request_id = id, .round_number = 1'000'000'000}});
    case 3:
      return RefusedEvents({ExtendResultEvent{.request_id = id, .round_number = -1}});
    case 4:
      return RefusedEvents({UpdateReserveNumTokensEvent{id, -1 - Below(100)}});
    case 5:
      return RefusedEvents({UpdateReserveNumTokensEvent{id, std::numeric_limits<int32_t>::max()}});
    case 6:  // forced tokens that follow nothing; a late row swallows these too
      if (rows != out_.end() && IsLate(id, rows->second.front())) return;
      return RefusedEvents({ExtendResultEvent{.request_id = id, .forced_tokens = {1}}});
    default:  // a token for a chunk that produces none
      if (rows == out_.end() || IsLate(id, rows->second.front()) || !rows->second.back().row.tokens.empty()) return;
      return RefusedEvents({ExtendResultEvent{.request_id = id, .tokens = {1}}});
  }
}

void CallSequence::WrongRows() {
  std::vector<int32_t> slots, counts, tokens;
  int64_t round = kAnyRound;
  for (const auto& [id, rows] : out_) {
    const Out& out = rows.front();
    if (IsLate(id, out)) continue;
    slots.push_back(out.row.slot);
    counts.push_back(static_cast<int32_t>(out.row.tokens.size()));
    tokens.insert(tokens.end(), out.row.tokens.begin(), out.row.tokens.end());
  }
  const auto add = [&](int32_t slot, int32_t count) {
    slots.push_back(slot);
    counts.push_back(count);
    tokens.insert(tokens.end(), static_cast<std::size_t>(std::max(count, 0)), 1);
  };
  switch (Below(6)) {
    case 0:
      add(Below(2) == 0 ? 0 : config_.max_batch_size + 1, 0);
      break;
    case 1:
      add(std::numeric_limits<int32_t>::min(), 0);
      break;
    case 2:
      add(1, -1);
      break;
    case 3:
      if (slots.empty()) return;
      add(slots[0], 0);
      break;
    case 4:
      counts.push_back(0);
      break;
    default:
      round = 1'000'000'000;
  }
  Refused([&](Scheduler& scheduler) {
    scheduler.AdvanceRows(RowResults{.slots = slots, .token_counts = counts, .tokens = tokens, .round = round});
  });
}

void CallSequence::WrongSubmission() {
  std::vector<RequestSpec> specs = {RequestSpec{.request_id = "good", .tokens = {1, 2, 3}}};
  RequestSpec bad{.request_id = "bad", .tokens = {1}};
  switch (Below(7)) {
    case 0:
      bad.tokens.clear();
      break;
    case 1:
      bad.max_new_tokens = -1 - Below(9);
      break;
    case 2:
      bad.max_new_tokens = std::numeric_limits<int32_t>::max();
      break;
    case 3:
      bad.request_id = "good";
      break;
    case 4:
      bad.request_id = std::string(Below(2) == 0 ? 0 : 4097, 'x');
      break;
    case 5:
      bad.request_id = AnyLive();  // or empty
      break;
    default:  // one token too long, where the pool and not the width of an id is the limit
      if (scheduler_.MaxSingleRequestTokens() > 10'000) return;
      bad.tokens.assign(static_cast<std::size_t>(scheduler_.MaxSingleRequestTokens()), 1);
  }
  specs.insert(Below(2) == 0 ? specs.begin() : specs.end(), bad);
  Refused([&](Scheduler& scheduler) { scheduler.SubmitRequests(specs); });
}

// Events that name nobody, and transfers that never were: taken, and without any effect.
void CallSequence::ResultsOfNobody() {
  const std::vector<int64_t> before = Gauges(scheduler_);
  scheduler_.Advance(ExecutionEvent{{ExtendResultEvent{.request_id = "nobody", .tokens = {1, 2}},
                                     FinishEvent{"nobody"}, RetractEvent{""}, UpdateReserveNumTokensEvent{"nobody", -1},
                                     WriteBackDoneEvent{4'000'000'000U}, LoadBackDoneEvent{4'000'000'000U, false},
                                     RemotePrefillDoneEvent{"nobody", -1}, SucceededEvent{"nobody"}}});
  Require(Gauges(scheduler_) == before, "events of nobody change nothing");
}

}  // namespace tokenspeed::testing
