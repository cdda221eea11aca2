// TierTransfers: the copies between device and host that are under way.
//
// Invariants:
// - Operation ids are issued once, in increasing order from 1, to copies of either direction alike.
// - An operation has at least one block, and a key is in at most one store at a time.
// - Until an operation is acknowledged its host blocks stay allocated, and so do the device blocks of a load and of a
//   pinned store, whatever becomes of the request they were made for.
// - Nothing is published on the host before the copy that fills it is acknowledged.
// - An acknowledgement that is unknown, repeated, or of an operation that nobody has been told of changes nothing.
//
// Ownership: owns references to the blocks under way; must die before the coordinator, which it borrows.
// Thread safety: none. Costs: a round without new stores O(1).

#ifndef TOKENSPEED_COORDINATOR_TIER_TRANSFERS_H_
#define TOKENSPEED_COORDINATOR_TIER_TRANSFERS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "coordinator/cache_coordinator.h"

namespace tokenspeed {

// What keeps the contents of a store's source until they are copied.
enum class SourceGuard : uint8_t {
  kPinnedUntilAck,  // the store holds it
  // Nothing: it may be handed out again at once. Only for contents that are written when the plan carrying the store
  // runs, which copies them before anything else.
  kStreamOrdered,
};

struct BlockTransfer {
  int32_t group_id = 0;
  int32_t source_id = 0;  // as block tables would name it
  int32_t destination_id = 0;
  std::optional<CacheKey> key;  // absent for a load that was published when it was started
  bool from_storage = false;    // a load whose source is still to be fetched from the external store
};

// One operation as the executor is told of it.
struct TierOperation {
  uint32_t op_id = 0;
  bool source_pinned = false;  // of a store
  std::vector<BlockTransfer> transfers;
};

class TierTransfers {
 public:
  explicit TierTransfers(CacheCoordinator& coordinator) : coordinator_(coordinator) {}
  TierTransfers(const TierTransfers&) = delete;
  TierTransfers& operator=(const TierTransfers&) = delete;

  // Drains the store queue into one operation; none when nothing of it is worth storing or finds room on the host.
  void StartPendingStores(SourceGuard guard);
  void StartPrefixLoad(std::vector<LoadPair> pairs);

  void CompleteWriteBack(uint32_t op_id);
  // The loaded blocks, when the operation was known: what depends on them is settled now.
  std::vector<LoadPair> CompleteLoadBack(uint32_t op_id, bool success);

  // Operations started since the last call, oldest first.
  std::vector<TierOperation> TakeStartedStores() { return std::exchange(started_stores_, {}); }
  std::vector<TierOperation> TakeStartedLoads() { return std::exchange(started_loads_, {}); }

  bool HasAnyInFlight() const { return !stores_.empty() || !loads_.empty(); }
  // The oldest operation that holds device blocks; absent when none does.
  std::optional<uint32_t> OldestHoldingDevice() const;
  uint32_t next_op_id() const { return next_op_id_; }
  // Blocks that were not stored for want of room on the host, since the start.
  int64_t num_dropped_stores() const { return num_dropped_stores_; }

 private:
  struct StoreTicket {
    CacheKey key;
    CacheBlockRef device;  // empty when the store does not hold its source
    CacheBlockRef host;
  };

  static bool IsUntold(const std::vector<TierOperation>& started, uint32_t op_id);
  // The queue's blocks that are on the device and neither on the host nor on their way there.
  std::vector<StoreTicket> PendingTickets();
  int32_t BlockId(const CacheBlockRef& block) const;

  CacheCoordinator& coordinator_;
  uint32_t next_op_id_ = 1;
  std::map<uint32_t, std::vector<StoreTicket>> stores_;
  std::map<uint32_t, std::vector<LoadPair>> loads_;
  std::set<uint32_t> pinned_stores_;  // those that hold their sources
  std::unordered_set<CacheKey, CacheKeyHash> storing_;
  std::vector<TierOperation> started_stores_;
  std::vector<TierOperation> started_loads_;
  int64_t num_dropped_stores_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_TIER_TRANSFERS_H_
