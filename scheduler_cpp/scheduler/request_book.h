// RequestBook: all live requests, by id, by slot and in the order in which they are served.
//
// Invariants: an id names at most one request; every change of a request's state goes through the book, so that its
// orders, slots and counts are always current; orders follow priority and, within one, submission, whatever a request
// has been through.
//
// Ownership: owns the requests. Thread safety: none. Costs: by id or slot O(1); a move between orders O(log requests).

#ifndef TOKENSPEED_SCHEDULER_REQUEST_BOOK_H_
#define TOKENSPEED_SCHEDULER_REQUEST_BOOK_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler/request.h"

namespace tokenspeed {

// Requests by rank, side by side in memory, because every round walks all that hold cache. A change moves what stands
// behind it, and ends every walk.
class ResidentOrder {
 public:
  using Entry = std::pair<RequestRank, Request*>;

  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  auto rbegin() const { return entries_.rbegin(); }
  auto rend() const { return entries_.rend(); }
  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  Request& operator[](std::size_t place) const { return *entries_[place].second; }

  void Insert(Request& request) {
    const Entry entry(request.rank(), &request);
    entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entry.first, IsBefore), entry);
  }
  // It must be there.
  void Erase(const Request& request) {
    const auto behind = std::upper_bound(entries_.begin(), entries_.end(), request.rank(), IsBefore);
    entries_.erase(std::prev(behind));
  }

 private:
  static bool IsBefore(const RequestRank& rank, const Entry& entry) { return rank < entry.first; }

  std::vector<Entry> entries_;
};

class RequestBook {
 public:
  using Order = std::map<RequestRank, Request*>;
  using ReadmissionOrder = std::map<ReadmissionRank, Request*>;

  // `role` is the worker's; it decides in which state a request starts.
  explicit RequestBook(SchedulerConfig::Role role) : role_(role) {}

  // The id must be new, and the parent of a fork must be known.
  void Insert(RequestSpec spec, const std::string& weight_version);
  // Null when the id is unknown.
  Request* Find(const std::string& id) const;
  bool Contains(const std::string& id) const { return Find(id) != nullptr; }

  // The resident request in this request-pool slot; null for a free slot and for any other number.
  Request* AtSlot(int32_t slot) const {
    return slot >= 0 && static_cast<std::size_t>(slot) < by_slot_.size() ? by_slot_[static_cast<std::size_t>(slot)]
                                                                         : nullptr;
  }
  // One more than the largest slot that a request has ever been in.
  std::size_t SlotBound() const { return by_slot_.size(); }

  // Submitted and Retracted.
  const Order& waiting() const { return waiting_; }
  // Those that hold cache.
  const ResidentOrder& resident() const { return resident_; }
  // Those of waiting() that are readmissions, in their own order.
  const ReadmissionOrder& readmissions() const { return readmissions_; }
  // Grows with every request that comes, and with every change of a state.
  uint64_t version() const { return version_; }
  int32_t Count(RequestState state) const { return counts_[static_cast<std::size_t>(state)]; }
  int32_t NumPdPinned() const;

  // Runs a transition of the request and moves it to where its new state belongs.
  template <typename Transition>
  void Move(Request& request, Transition&& transition) {
    const RequestState before = request.state();
    const std::optional<int32_t> slot = request.SlotIndex();
    if (request.IsReadmission()) readmissions_.erase(request.readmission_rank());
    transition(request);
    if (request.IsReadmission()) readmissions_.emplace(request.readmission_rank(), &request);
    Reseat(request, slot);
    Reorder(request, before);
  }

  // Forgets the finished requests.
  void Reap();

 private:
  void Reorder(Request& request, RequestState before);
  void Reseat(Request& request, std::optional<int32_t> before);
  // Puts a request into the order that its state belongs to, and takes it out of it.
  void Join(Request& request);
  void Leave(Request& request, RequestState state);

  SchedulerConfig::Role role_;
  std::unordered_map<std::string, std::unique_ptr<Request>> by_id_;
  Order bootstrapping_;
  Order waiting_;
  ResidentOrder resident_;
  ReadmissionOrder readmissions_;
  std::vector<Request*> by_slot_;
  std::vector<Request*> finished_;
  std::array<int32_t, kNumRequestStates> counts_ = {};
  int64_t next_sequence_ = 0;
  uint64_t version_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_BOOK_H_
