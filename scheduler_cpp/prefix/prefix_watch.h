// PrefixWatch: tells whether anything has been cached since that somebody waits for.
//
// A request that was refused for want of storage may fit later because others cache pages of its prompt, which it could
// then share. Watching its pages makes that an event, so that nobody has to look them up again and again.
//
// Ownership: tickets refer to the watch and must die before it. Thread safety: none.
// Costs: O(pages) to take or drop a ticket, O(1) per publication.

#ifndef TOKENSPEED_PREFIX_PREFIX_WATCH_H_
#define TOKENSPEED_PREFIX_PREFIX_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "prefix/prefix_hasher.h"

namespace tokenspeed {

class PrefixWatch {
 public:
  // Watches its pages while it lives.
  class Ticket {
   public:
    Ticket(PrefixWatch& watch, std::span<const PrefixHash> pages);
    Ticket(Ticket&& other) noexcept : watch_(std::exchange(other.watch_, nullptr)), pages_(std::move(other.pages_)) {}
    Ticket& operator=(Ticket&&) = delete;
    ~Ticket();

   private:
    PrefixWatch* watch_;
    std::vector<PrefixHash> pages_;
  };

  // Something of this page has been cached.
  void Note(const PrefixHash& page) {
    if (!watched_.empty() && watched_.contains(page)) ++num_arrivals_;
  }
  // What can be found has changed in ways that no page tells.
  void NoteAll() { ++num_arrivals_; }
  // Publications of watched pages so far, and other changes.
  uint64_t num_arrivals() const { return num_arrivals_; }

 private:
  struct Hasher {
    std::size_t operator()(const PrefixHash& page) const noexcept {
      std::size_t word;
      std::memcpy(&word, page.bytes.data(), sizeof(word));
      return word;
    }
  };

  std::unordered_map<PrefixHash, int32_t, Hasher> watched_;  // how many tickets have the page
  uint64_t num_arrivals_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_PREFIX_WATCH_H_
