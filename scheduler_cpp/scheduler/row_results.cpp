#include "scheduler/row_results.h"

#include <stdexcept>

#include "scheduler/landing_rules.h"

namespace tokenspeed {
namespace {

std::string Entry(const char* call, std::size_t index, int32_t slot) {
  return std::string(call) + " entry " + std::to_string(index) + " (slot " + std::to_string(slot) + "): ";
}

// Finds the requests of a list of slots and refuses empty and repeated ones.
class SlotLookup {
 public:
  SlotLookup(const RequestBook& book, const char* call) : book_(book), call_(call), seen_(book.SlotBound(), false) {}

  // Null for a slot that no request holds, but that a request has held.
  Request* Find(std::size_t index, int32_t slot) {
    if (slot < 0 || static_cast<std::size_t>(slot) >= seen_.size()) Refuse(index, slot);
    if (seen_[static_cast<std::size_t>(slot)]) {
      throw std::invalid_argument(Entry(call_, index, slot) + "the slot occurs twice");
    }
    seen_[static_cast<std::size_t>(slot)] = true;
    return book_.AtSlot(slot);
  }

  Request& At(std::size_t index, int32_t slot) {
    Request* request = Find(index, slot);
    if (request == nullptr) Refuse(index, slot);
    return *request;
  }

  [[noreturn]] void Refuse(std::size_t index, int32_t slot) const {
    throw std::runtime_error(Entry(call_, index, slot) + "no request holds this slot");
  }

 private:
  const RequestBook& book_;
  const char* call_;
  std::vector<bool> seen_;
};

void CheckShape(const RowResults& rows) {
  if (rows.slots.size() != rows.token_counts.size()) {
    throw std::invalid_argument("advance_rows: slots and token_counts must have the same length, got " +
                                std::to_string(rows.slots.size()) + " and " +
                                std::to_string(rows.token_counts.size()));
  }
  int64_t total = 0;
  for (std::size_t index = 0; index < rows.slots.size(); ++index) {
    const int32_t count = rows.token_counts[index];
    if (count < 0) {
      throw std::invalid_argument(Entry("advance_rows", index, rows.slots[index]) +
                                  "its token count must be >= 0, got " + std::to_string(count));
    }
    total += count;
  }
  if (total != static_cast<int64_t>(rows.tokens.size())) {
    throw std::invalid_argument("advance_rows: token_counts sum up to " + std::to_string(total) + ", but there are " +
                                std::to_string(rows.tokens.size()) + " tokens");
  }
}

[[noreturn]] void RefuseRow(const std::string& entry, LandingVerdict verdict, int32_t count, int64_t round) {
  switch (verdict) {
    case LandingVerdict::kOtherRound:
      throw std::runtime_error(entry + "has no row of round " + std::to_string(round) + " that is out");
    case LandingVerdict::kOutOfOrder:
      throw std::runtime_error(entry + "has a row before round " + std::to_string(round) + " that has not landed");
    case LandingVerdict::kPromptUnfinished:
      throw std::runtime_error(entry + "has an unfinished prompt, whose chunks produce no token");
    case LandingVerdict::kTooManyTokens:
      throw std::invalid_argument(entry + "got " + std::to_string(count) +
                                  " tokens, more than its scheduled forwards can have produced");
    case LandingVerdict::kAllowed:
    case LandingVerdict::kNothingOut:
      break;
  }
  throw std::runtime_error(entry + "has no forward in flight");
}

}  // namespace

std::vector<Request*> JudgeRows(const RequestBook& book, const LateResults& late, const RowResults& rows) {
  CheckShape(rows);
  SlotLookup lookup(book, "advance_rows");
  std::vector<Request*> requests;
  requests.reserve(rows.slots.size());
  for (std::size_t index = 0; index < rows.slots.size(); ++index) {
    const int32_t slot = rows.slots[index];
    Request* request = lookup.Find(index, slot);
    if (rows.round != kAnyRound && late.Expects(slot, rows.round)) {
      request = nullptr;
    } else if (request == nullptr) {
      lookup.Refuse(index, slot);
    } else {
      const int32_t count = rows.token_counts[index];
      const LandingVerdict verdict = JudgeLanding(LandingState::Of(*request), count, rows.round);
      if (verdict != LandingVerdict::kAllowed) {
        RefuseRow(Entry("advance_rows", index, slot) + "request '" + request->id() + "' ", verdict, count, rows.round);
      }
    }
    requests.push_back(request);
  }
  return requests;
}

std::vector<Request*> JudgeFinishes(const RequestBook& book, std::span<const int32_t> slots) {
  SlotLookup lookup(book, "finish_rows");
  std::vector<Request*> requests;
  requests.reserve(slots.size());
  for (std::size_t index = 0; index < slots.size(); ++index) {
    Request& request = lookup.At(index, slots[index]);
    const auto entry = [&] { return Entry("finish_rows", index, slots[index]) + "request '" + request.id() + "' "; };
    if (request.IsPdPinned()) throw std::runtime_error(entry() + "is the peer's to end");
    if (!HasCompletePrefill(request.state())) throw std::runtime_error(entry() + "has an unfinished prompt");
    requests.push_back(&request);
  }
  return requests;
}

}  // namespace tokenspeed
