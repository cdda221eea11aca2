// StallWatch: tells the operator when the scheduler has had requests but no work for suspiciously long. It only
// counts and speaks; it never changes a plan.
//
// Thread safety: none.

#ifndef TOKENSPEED_SCHEDULER_STALL_WATCH_H_
#define TOKENSPEED_SCHEDULER_STALL_WATCH_H_

#include <cstdint>
#include <cstdio>

namespace tokenspeed {

class StallWatch {
 public:
  static constexpr int64_t kFirstWarning = 1024;

  // One round went by; it was stalled when nothing ran, nothing was out, and yet somebody waited.
  void Record(bool stalled, int32_t num_waiting, int32_t num_resident) {
    if (!stalled) {
      if (streak_ >= kFirstWarning) {
        std::fprintf(stderr, "tokenspeed scheduler: work resumed after %lld stalled rounds\n",
                     static_cast<long long>(streak_));
      }
      streak_ = 0;
      next_warning_ = kFirstWarning;
      return;
    }
    if (++streak_ == next_warning_) {
      std::fprintf(stderr,
                   "tokenspeed scheduler: no request could be scheduled for %lld rounds (%d waiting, %d resident)\n",
                   static_cast<long long>(streak_), num_waiting, num_resident);
      next_warning_ *= 2;
    }
  }

  int64_t streak() const { return streak_; }

 private:
  int64_t streak_ = 0;
  int64_t next_warning_ = kFirstWarning;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_STALL_WATCH_H_
