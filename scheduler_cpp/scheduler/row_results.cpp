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

  Request& At(std::size_t index, int32_t slot) {
    Request* request = book_.AtSlot(slot);
    if (request == nullptr) throw std::runtime_error(Entry(call_, index, slot) + "no request holds this slot");
    if (seen_[static_cast<std::size_t>(slot)]) {
      throw std::invalid_argument(Entry(call_, index, slot) + "the slot occurs twice");
    }
    seen_[static_cast<std::size_t>(slot)] = true;
    return *request;
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

}  // namespace

std::vector<Request*> JudgeRows(const RequestBook& book, const RowResults& rows) {
  CheckShape(rows);
  SlotLookup lookup(book, "advance_rows");
  std::vector<Request*> requests;
  requests.reserve(rows.slots.size());
  for (std::size_t index = 0; index < rows.slots.size(); ++index) {
    const int32_t slot = rows.slots[index];
    const int32_t count = rows.token_counts[index];
    Request& request = lookup.At(index, slot);
    const auto entry = [&] { return Entry("advance_rows", index, slot) + "request '" + request.id() + "' "; };
    switch (JudgeLanding(LandingState::Of(request), count)) {
      case LandingVerdict::kAllowed:
        break;
      case LandingVerdict::kNothingOut:
        throw std::runtime_error(entry() + "has no forward in flight");
      case LandingVerdict::kPromptUnfinished:
        throw std::runtime_error(entry() + "has an unfinished prompt, whose chunks produce no token");
      case LandingVerdict::kTooManyTokens:
        throw std::invalid_argument(entry() + "got " + std::to_string(count) +
                                    " tokens, more than its scheduled forwards can have produced");
    }
    requests.push_back(&request);
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
