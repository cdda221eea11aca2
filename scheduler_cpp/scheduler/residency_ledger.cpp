#include "scheduler/residency_ledger.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace tokenspeed {
namespace {

class Fnv1a {
 public:
  void AddByte(uint8_t byte) { state_ = (state_ ^ byte) * 1099511628211ULL; }
  void AddLittleEndian(uint64_t value, int bytes) {
    for (int index = 0; index < bytes; ++index) AddByte(static_cast<uint8_t>(value >> (8 * index)));
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 14695981039346656037ULL;
};

}  // namespace

uint64_t HashResidencyPage(std::span<const int32_t> tokens, std::optional<uint64_t> parent) {
  Fnv1a hash;
  hash.AddByte(parent.has_value() ? 1 : 0);
  if (parent.has_value()) hash.AddLittleEndian(*parent, 8);
  hash.AddLittleEndian(tokens.size(), 8);
  for (const int32_t token : tokens) hash.AddLittleEndian(static_cast<uint32_t>(token), 4);
  return hash.value();
}

std::optional<uint64_t> ResidencyChainStart(std::span<const std::string> chain_keys) {
  if (chain_keys.empty()) return std::nullopt;
  const PrefixHash hash = HashPrefixPage({}, std::nullopt, chain_keys);
  uint64_t start = 0;
  for (int index = 0; index < 8; ++index) {
    start |= uint64_t{hash.bytes[static_cast<std::size_t>(index)]} << (8 * index);
  }
  return start;
}

std::size_t ResidencyLedger::ContentHasher::operator()(const PrefixHash& hash) const noexcept {
  std::size_t value = 0;
  std::memcpy(&value, hash.bytes.data(), sizeof(value));
  return value;
}

void ResidencyLedger::Describe(const PrefixHash& content_hash, std::span<const uint64_t> event_hashes,
                               std::size_t page, std::span<const int32_t> page_tokens,
                               const std::string& cache_salt) {
  const auto [entry, fresh] = boundaries_.try_emplace(content_hash);
  Boundary& boundary = entry->second;
  if (!fresh) {
    TOKENSPEED_CHECK(boundary.event_hash == event_hashes[page] && boundary.depth == page,
                     "a content hash names one prefix boundary");
    return;
  }
  boundary.tokens.assign(page_tokens.begin(), page_tokens.end());
  boundary.event_hash = event_hashes[page];
  if (page > 0) {
    boundary.parent_hash = event_hashes[page - 1];
  } else {
    boundary.cache_salt = cache_salt;
  }
  boundary.depth = page;
  Mark(content_hash);
}

void ResidencyLedger::WaitFor(const PrefixHash& content_hash) { ++boundaries_.at(content_hash).waiting; }

void ResidencyLedger::StopWaiting(const PrefixHash& content_hash) {
  --boundaries_.at(content_hash).waiting;
  Mark(content_hash);
}

void ResidencyLedger::Mark(const PrefixHash& content_hash) {
  const auto entry = boundaries_.find(content_hash);
  if (entry == boundaries_.end() || entry->second.marked) return;
  entry->second.marked = true;
  marked_.push_back(content_hash);
}

void ResidencyLedger::Settle(const CacheCoordinator& coordinator) {
  std::size_t num_stored = 0;
  std::vector<PrefixHash> kept;
  for (const PrefixHash& hash : marked_) {
    const auto entry = boundaries_.find(hash);
    Boundary& boundary = entry->second;
    const BoundaryResidency residency = coordinator.DeviceBoundaryResidency(hash);
    const bool complete = residency == BoundaryResidency::kComplete;
    boundary.marked = complete != boundary.published;
    if (boundary.marked && complete && num_stored == max_stored_) {
      boundary.marked = false;
      ++num_dropped_;
    }
    num_stored += boundary.marked && complete ? 1 : 0;
    if (boundary.marked) {
      kept.push_back(hash);
    } else if (residency == BoundaryResidency::kNone && boundary.waiting == 0) {
      boundaries_.erase(entry);
    }
  }
  marked_ = std::move(kept);
  kept_ = marked_.size();
}

void ResidencyLedger::Trim(const CacheCoordinator& coordinator) {
  // The more was kept the rarer, so that a mark is looked at a constant number of times on average.
  if (marked_.size() > 2 * std::max(kept_, max_stored_)) Settle(coordinator);
}

std::vector<ResidencyEvent> ResidencyLedger::Drain(const CacheCoordinator& coordinator) {
  Settle(coordinator);
  std::vector<std::pair<std::size_t, ResidencyEvent>> removed;
  std::vector<std::pair<std::size_t, ResidencyEvent>> stored;
  for (const PrefixHash& hash : marked_) {
    const auto entry = boundaries_.find(hash);
    Boundary& boundary = entry->second;
    boundary.marked = false;
    boundary.published = !boundary.published;
    if (boundary.published) {
      stored.emplace_back(boundary.depth,
                          BlockStoredEvent{{boundary.event_hash},
                                           boundary.parent_hash,
                                           boundary.tokens,
                                           coordinator.prefix_granularity(),
                                           boundary.cache_salt});
      continue;
    }
    removed.emplace_back(boundary.depth, BlockRemovedEvent{{boundary.event_hash}});
    const bool is_gone = coordinator.DeviceBoundaryResidency(hash) == BoundaryResidency::kNone;
    if (is_gone && boundary.waiting == 0) boundaries_.erase(entry);
  }
  marked_.clear();
  kept_ = 0;
  // A router that applies the events one by one never sees a page without the pages before it.
  std::stable_sort(removed.begin(), removed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::stable_sort(stored.begin(), stored.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<ResidencyEvent> events;
  events.reserve(removed.size() + stored.size());
  for (auto& [depth, event] : removed) events.push_back(std::move(event));
  for (auto& [depth, event] : stored) events.push_back(std::move(event));
  return events;
}

}  // namespace tokenspeed
