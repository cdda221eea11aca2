#include "scheduler/request_book.h"

#include <utility>

namespace tokenspeed {

void RequestBook::Insert(RequestSpec spec, const std::string& weight_version) {
  const Request* parent = spec.fork_of.empty() ? nullptr : Find(spec.fork_of);
  auto request = std::make_unique<Request>(std::move(spec), weight_version, next_sequence_, role_, parent);
  const auto [entry, inserted] = by_id_.try_emplace(request->id(), std::move(request));
  Request* added = entry->second.get();
  Join(*added);
  ++counts_[static_cast<std::size_t>(added->state())];
  ++next_sequence_;
  ++version_;
}

Request* RequestBook::Find(const std::string& id) const {
  const auto entry = by_id_.find(id);
  return entry == by_id_.end() ? nullptr : entry->second.get();
}

void RequestBook::Join(Request& request) {
  if (HoldsCache(request.state())) {
    resident_.Insert(request);
  } else if (request.state() == RequestState::kBootstrapping) {
    bootstrapping_.emplace(request.rank(), &request);
  } else if (request.state() == RequestState::kFinished) {
    finished_.push_back(&request);
  } else {
    waiting_.emplace(request.rank(), &request);
  }
}

void RequestBook::Leave(Request& request, RequestState state) {
  if (HoldsCache(state)) {
    resident_.Erase(request);
  } else if (state == RequestState::kBootstrapping) {
    bootstrapping_.erase(request.rank());
  } else {
    waiting_.erase(request.rank());
  }
}

void RequestBook::Reorder(Request& request, RequestState before) {
  const RequestState after = request.state();
  if (before == after) return;
  ++version_;
  --counts_[static_cast<std::size_t>(before)];
  ++counts_[static_cast<std::size_t>(after)];
  const bool stays = HoldsCache(before) && HoldsCache(after);
  if (stays) return;
  Leave(request, before);
  Join(request);
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
