#include "scheduler/request_book.h"

#include <utility>

namespace tokenspeed {

void RequestBook::Insert(RequestSpec spec, const std::string& weight_version) {
  const Request* parent = spec.fork_of.empty() ? nullptr : Find(spec.fork_of);
  auto request = std::make_unique<Request>(std::move(spec), weight_version, next_sequence_, role_, parent);
  const auto [entry, inserted] = by_id_.try_emplace(request->id(), std::move(request));
  Request* added = entry->second.get();
  OrderOf(added->state())->emplace(added->rank(), added);
  ++counts_[static_cast<std::size_t>(added->state())];
  ++next_sequence_;
  ++version_;
}

Request* RequestBook::Find(const std::string& id) const {
  const auto entry = by_id_.find(id);
  return entry == by_id_.end() ? nullptr : entry->second.get();
}

RequestBook::Order* RequestBook::OrderOf(RequestState state) {
  switch (state) {
    case RequestState::kBootstrapping:
      return &bootstrapping_;
    case RequestState::kSubmitted:
    case RequestState::kRetracted:
      return &waiting_;
    case RequestState::kPrefilling:
    case RequestState::kRemotePrefilling:
    case RequestState::kPrefillAwaitingResult:
    case RequestState::kPrefillDone:
    case RequestState::kDecoding:
      return &resident_;
    case RequestState::kFinished:
      break;
  }
  return nullptr;
}

void RequestBook::Reorder(Request& request, RequestState before) {
  const RequestState after = request.state();
  if (before == after) return;
  ++version_;
  --counts_[static_cast<std::size_t>(before)];
  ++counts_[static_cast<std::size_t>(after)];
  Order* from = OrderOf(before);
  Order* to = OrderOf(after);
  if (from != to) {
    if (to != nullptr) {
      to->insert(from->extract(request.rank()));
    } else {
      from->erase(request.rank());
      finished_.push_back(&request);
    }
  }
}

void RequestBook::Reseat(Request& request, std::optional<int32_t> before) {
  const std::optional<int32_t> after = request.SlotIndex();
  if (before == after) return;
  if (before.has_value()) by_slot_[static_cast<std::size_t>(*before)] = nullptr;
  if (!after.has_value()) return;
  const auto slot = static_cast<std::size_t>(*after);
  if (slot >= by_slot_.size()) by_slot_.resize(slot + 1, nullptr);
  by_slot_[slot] = &request;
}

int32_t RequestBook::NumPdPinned() const {
  int32_t pinned = 0;
  for (std::size_t state = 0; state < counts_.size(); ++state) {
    if (IsPdPinned(role_, static_cast<RequestState>(state))) pinned += counts_[state];
  }
  return pinned;
}

void RequestBook::Reap() {
  for (const Request* request : finished_) by_id_.erase(by_id_.find(request->id()));
  counts_[static_cast<std::size_t>(RequestState::kFinished)] = 0;
  finished_.clear();
}

}  // namespace tokenspeed
