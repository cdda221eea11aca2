#include "prefix/prefix_watch.h"

namespace tokenspeed {

PrefixWatch::Ticket::Ticket(PrefixWatch& watch, std::span<const PrefixHash> pages)
    : watch_(&watch), pages_(pages.begin(), pages.end()) {
  for (const PrefixHash& page : pages_) ++watch.watched_[page];
}

PrefixWatch::Ticket::~Ticket() {
  if (watch_ == nullptr) return;
  for (const PrefixHash& page : pages_) {
    const auto entry = watch_->watched_.find(page);
    if (--entry->second == 0) watch_->watched_.erase(entry);
  }
}

}  // namespace tokenspeed
