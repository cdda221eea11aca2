#include "coordinator/tier_transfers.h"

#include <algorithm>
#include <cstddef>

#include "core/check.h"

namespace tokenspeed {

int32_t TierTransfers::BlockId(const CacheBlockRef& block) const {
  return coordinator_.group(block->group()).allocator().BlockId(block);
}

std::vector<TierTransfers::StoreTicket> TierTransfers::PendingTickets() {
  std::vector<StoreTicket> tickets;
  std::unordered_set<CacheKey, CacheKeyHash> seen;
  for (const CacheKey& key : coordinator_.TakePendingStores()) {
    if (coordinator_.HostHas(key) || storing_.contains(key) || !seen.insert(key).second) continue;
    CacheBlockRef device = coordinator_.FindOnDevice(key);
    if (device) tickets.push_back({.key = key, .device = std::move(device), .host = {}});
  }
  return tickets;
}

void TierTransfers::StartPendingStores(SourceGuard guard) {
  if (!coordinator_.HasPendingStores()) return;
  std::vector<StoreTicket> tickets = PendingTickets();
  std::vector<HostBlockWish> wishes;
  wishes.reserve(tickets.size());
  for (const StoreTicket& ticket : tickets) {
    const int32_t shards = coordinator_.group(ticket.key.group_id).allocator().shard_count();
    wishes.push_back({.group = ticket.key.group_id, .bucket = ticket.device->Location().slot_index % shards});
  }
  HostAllocation allocation = coordinator_.AllocateOnHost(wishes);
  num_dropped_stores_ += allocation.num_unallocated;
  for (std::size_t i = 0; i < tickets.size(); ++i) tickets[i].host = std::move(allocation.blocks[i]);
  std::erase_if(tickets, [](const StoreTicket& ticket) { return !ticket.host; });
  if (tickets.empty()) return;

  const bool pinned = guard == SourceGuard::kPinnedUntilAck;
  TierOperation operation{.op_id = next_op_id_++, .source_pinned = pinned, .transfers = {}};
  for (StoreTicket& ticket : tickets) {
    operation.transfers.push_back({.group_id = ticket.key.group_id,
                                   .source_id = BlockId(ticket.device),
                                   .destination_id = BlockId(ticket.host),
                                   .key = ticket.key});
    storing_.insert(ticket.key);
    if (pinned) {
      coordinator_.BeginTransfer(ticket.device);
    } else {
      ticket.device.reset();
    }
  }
  if (pinned) pinned_stores_.insert(operation.op_id);
  stores_.emplace(operation.op_id, std::move(tickets));
  started_stores_.push_back(std::move(operation));
}

void TierTransfers::StartPrefixLoad(std::vector<LoadPair> pairs) {
  TOKENSPEED_CHECK(!pairs.empty(), "a load copies nothing");
  TierOperation operation{.op_id = next_op_id_++, .source_pinned = false, .transfers = {}};
  for (const LoadPair& pair : pairs) {
    TOKENSPEED_CHECK(pair.source && pair.destination, "a load lacks one of its ends");
    TOKENSPEED_CHECK(pair.key || !pair.from_storage, "a block is fetched without its key");
    operation.transfers.push_back({.group_id = pair.destination->group(),
                                   .source_id = BlockId(pair.source),
                                   .destination_id = BlockId(pair.destination),
                                   .key = pair.key,
                                   .from_storage = pair.from_storage});
    coordinator_.BeginTransfer(pair.destination);
  }
  loads_.emplace(operation.op_id, std::move(pairs));
  started_loads_.push_back(std::move(operation));
}

bool TierTransfers::IsUntold(const std::vector<TierOperation>& started, uint32_t op_id) {
  return std::any_of(started.begin(), started.end(),
                     [&](const TierOperation& operation) { return operation.op_id == op_id; });
}

void TierTransfers::CompleteWriteBack(uint32_t op_id) {
  if (IsUntold(started_stores_, op_id)) return;
  auto store = stores_.extract(op_id);
  if (store.empty()) return;
  pinned_stores_.erase(op_id);
  for (const StoreTicket& ticket : store.mapped()) {
    storing_.erase(ticket.key);
    if (ticket.device) coordinator_.EndTransfer(ticket.device);
    coordinator_.PublishOnHost(ticket.host, ticket.key);
  }
}

std::vector<LoadPair> TierTransfers::CompleteLoadBack(uint32_t op_id, bool success) {
  if (IsUntold(started_loads_, op_id)) return {};
  auto load = loads_.extract(op_id);
  if (load.empty()) return {};
  for (const LoadPair& pair : load.mapped()) {
    coordinator_.EndTransfer(pair.destination);
    if (!success) {
      if (!pair.key) coordinator_.WithdrawFromDevice(pair.destination);
      continue;
    }
    if (pair.from_storage) coordinator_.PublishOnHost(pair.source, *pair.key);
    if (pair.key) coordinator_.PublishOnDevice(pair.destination, *pair.key);
  }
  return std::move(load.mapped());
}

std::optional<uint32_t> TierTransfers::OldestHoldingDevice() const {
  std::optional<uint32_t> oldest;
  if (!pinned_stores_.empty()) oldest = *pinned_stores_.begin();
  if (!loads_.empty()) oldest = std::min(oldest.value_or(loads_.begin()->first), loads_.begin()->first);
  return oldest;
}

}  // namespace tokenspeed
