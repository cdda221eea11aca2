// Exclusive: an object that one call at a time may use. A second call meanwhile is refused rather than queued, for it
// is a mistake of the caller: waiting would hide it, and corruption would be worse.
//
// Invariants: at most one call is inside; a refused call has touched nothing; a call that throws leaves it free.
// Thread safety: Use may be called from any thread. Costs: one atomic exchange and one store a call, no lock.

#ifndef TOKENSPEED_CORE_EXCLUSIVE_H_
#define TOKENSPEED_CORE_EXCLUSIVE_H_

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace tokenspeed {

template <typename Owned>
class Exclusive {
 public:
  // `name` is what the refusal calls the object.
  template <typename... Args>
  explicit Exclusive(const char* name, Args&&... args) : name_(name), owned_(std::forward<Args>(args)...) {}

  // Runs call(owned). Throws std::runtime_error while another call is inside.
  template <typename Call>
  decltype(auto) Use(Call&& call) {
    if (busy_.test_and_set(std::memory_order_acquire)) {
      throw std::runtime_error(std::string("calls on one ") + name_ + " must not overlap");
    }
    const Release release{busy_};
    return std::forward<Call>(call)(owned_);
  }

 private:
  struct Release {
    std::atomic_flag& busy;
    ~Release() { busy.clear(std::memory_order_release); }
  };

  const char* name_;
  Owned owned_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_EXCLUSIVE_H_
