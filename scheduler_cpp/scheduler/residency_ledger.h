// ResidencyLedger: tells an outside router which prefixes are in the device cache. One event describes one prefix
// boundary, whatever the number of groups and blocks behind it. Of a model with a closed group (full attention) it is
// there when that group has it: a router follows chains of pages, and these have no gaps. A window or a state may be
// missing behind it, so that a hit is shorter than what was published.
//
// Invariants:
// - After a drain the published boundaries are exactly the completely resident ones, unless some were dropped.
// - A content hash has one description for as long as any of it is resident.
// - Events are the net change since the previous drain, in an order that depends on the calls alone.
//
// - What waits for a drain is bounded, however long nobody drains: a boundary that came and went is forgotten, at most
//   `max_stored` arrivals are kept, and departures only of boundaries that the router was told of. Arrivals beyond that
//   are dropped and counted, the latest first, since the earlier ones are the starts of prefixes. So a router may miss
//   a boundary that is there, but never believes in one that is not.
//
// Thread safety: none. Costs: a mark O(1), settling included; a drain O(marks log marks).

#ifndef TOKENSPEED_SCHEDULER_RESIDENCY_LEDGER_H_
#define TOKENSPEED_SCHEDULER_RESIDENCY_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "coordinator/cache_coordinator.h"

namespace tokenspeed {

struct BlockStoredEvent {
  std::vector<uint64_t> block_hashes;
  std::optional<uint64_t> parent_block_hash;
  std::vector<int32_t> token_ids;
  int32_t block_size = 0;  // tokens
  std::string cache_salt = {};  // of a chain's first page; empty for the others, and for none
};

struct BlockRemovedEvent {
  std::vector<uint64_t> block_hashes;
};

using ResidencyEvent = std::variant<BlockStoredEvent, BlockRemovedEvent>;

// FNV-1a over: a byte telling whether there is a parent, the parent, the token count, the tokens; little endian.
uint64_t HashResidencyPage(std::span<const int32_t> tokens, std::optional<uint64_t> parent);

// What the first page of a chain hashes as its parent, so that an outside router takes no salted prefix for another:
// nothing without chain keys, else the leading bytes, little endian, of their prefix hash over no tokens.
std::optional<uint64_t> ResidencyChainStart(std::span<const std::string> chain_keys);

class ResidencyLedger {
 public:
  explicit ResidencyLedger(int32_t max_stored) : max_stored_(static_cast<std::size_t>(max_stored)) {}

  // Describes prefix page number `page` of a prompt with this salt. `event_hashes` covers the pages up to and including
  // it. To be called before the page can be published; repeating it changes nothing.
  void Describe(const PrefixHash& content_hash, std::span<const uint64_t> event_hashes, std::size_t page,
                std::span<const int32_t> page_tokens, const std::string& cache_salt);

  // Keeps the description although nothing of the boundary is resident: its blocks are on their way, and are published
  // without being described again. As many calls of StopWaiting must follow.
  void WaitFor(const PrefixHash& content_hash);
  void StopWaiting(const PrefixHash& content_hash);

  // Something about the boundary changed in the device cache.
  void Mark(const PrefixHash& content_hash);

  // Keeps what waits for a drain within its bound. To be called between rounds, when no page is about to be published.
  void Trim(const CacheCoordinator& coordinator);

  std::vector<ResidencyEvent> Drain(const CacheCoordinator& coordinator);

  // Arrivals dropped since the start.
  int64_t num_dropped() const { return num_dropped_; }

 private:
  struct Boundary {
    std::vector<int32_t> tokens;
    std::string cache_salt;
    uint64_t event_hash = 0;
    std::optional<uint64_t> parent_hash;
    std::size_t depth = 0;
    bool published = false;
    bool marked = false;
    int32_t waiting = 0;  // for copies under way
  };
  // Forgets marks and descriptions without a net change, and arrivals beyond the bound.
  void Settle(const CacheCoordinator& coordinator);

  struct ContentHasher {
    std::size_t operator()(const PrefixHash& hash) const noexcept;
  };

  std::unordered_map<PrefixHash, Boundary, ContentHasher> boundaries_;
  std::vector<PrefixHash> marked_;  // in the order of marking; gives the events their order
  std::size_t max_stored_;
  std::size_t kept_ = 0;  // marks that the last settling has left
  int64_t num_dropped_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_RESIDENCY_LEDGER_H_
