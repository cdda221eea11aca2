// WaitingScan: remembers that a walk over the waiting requests admitted nobody, and what would have to change before
// another one could.
//
// Invariant: while Holds(), another walk would refuse the same requests for the same reasons: storage only shrinks, no
// request has come, gone or changed its state, nobody has cached a page that one of the refused could share, and the
// round offers the same budget.
// Thread safety: a value.

#ifndef TOKENSPEED_SCHEDULER_WAITING_SCAN_H_
#define TOKENSPEED_SCHEDULER_WAITING_SCAN_H_

#include <cstdint>
#include <optional>

#include "scheduler/request.h"

namespace tokenspeed {

// Everything that the outcome of a walk depends on, beside what only ever gets less.
struct WaitingScanInputs {
  uint64_t dropped_handles = 0;  // of both tiers
  uint64_t watched_arrivals = 0;
  uint64_t book_version = 0;
  int64_t budget = 0;
  std::optional<int32_t> sealed_priority;

  friend bool operator==(const WaitingScanInputs&, const WaitingScanInputs&) = default;
};

class WaitingScan {
 public:
  void Remember(const WaitingScanInputs& inputs, Request* blocker) {
    inputs_ = inputs;
    blocker_ = blocker;
  }
  void Forget() { inputs_.reset(); }
  bool Holds(const WaitingScanInputs& inputs) const { return inputs_ == inputs; }
  // The first that the cache could not hold; null when there was none.
  Request* blocker() const { return blocker_; }

 private:
  std::optional<WaitingScanInputs> inputs_;
  Request* blocker_ = nullptr;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_WAITING_SCAN_H_
