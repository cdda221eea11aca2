// RequestSlotPool: which places of the device-side request state are taken. A request keeps one place from its
// admission until it lets go of its cache.
//
// Invariants: slots are 1..capacity, each held by at most one handle; freed slots are reused in order of release.
// Thread safety: none. A pool outlives its handles.

#ifndef TOKENSPEED_SCHEDULER_REQUEST_SLOT_POOL_H_
#define TOKENSPEED_SCHEDULER_REQUEST_SLOT_POOL_H_

#include <cstdint>
#include <deque>
#include <utility>

namespace tokenspeed {

class RequestSlotPool;

// Owns one slot and gives it back when it dies.
class RequestSlot {
 public:
  RequestSlot(RequestSlotPool& pool, int32_t index) : pool_(&pool), index_(index) {}
  RequestSlot(RequestSlot&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
  RequestSlot& operator=(RequestSlot&&) = delete;
  ~RequestSlot();

  int32_t index() const { return index_; }

 private:
  RequestSlotPool* pool_;
  int32_t index_;
};

class RequestSlotPool {
 public:
  explicit RequestSlotPool(int32_t capacity) {
    for (int32_t index = 1; index <= capacity; ++index) free_.push_back(index);
  }
  RequestSlotPool(const RequestSlotPool&) = delete;
  RequestSlotPool& operator=(const RequestSlotPool&) = delete;

  bool HasFree() const { return !free_.empty(); }
  // There must be a free slot.
  RequestSlot Take() {
    const int32_t index = free_.front();
    free_.pop_front();
    return RequestSlot(*this, index);
  }

 private:
  friend class RequestSlot;
  std::deque<int32_t> free_;
};

inline RequestSlot::~RequestSlot() {
  if (pool_ != nullptr) pool_->free_.push_back(index_);
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_SLOT_POOL_H_
