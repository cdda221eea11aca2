#include "scheduler/cache_operation.h"

#include <set>
#include <tuple>

#include "core/check.h"

namespace tokenspeed {

CacheOperations::CacheOperations(std::span<const TierOperation> operations) {
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;
  for (const TierOperation& operation : operations) {
    TOKENSPEED_CHECK(!operation.transfers.empty(), "an operation copies nothing");
    op_ids.push_back(operation.op_id);
    auto& groups = group_ids.emplace_back();
    auto& sources = src_pages.emplace_back();
    auto& destinations = dst_pages.emplace_back();
    auto& hashes = content_hashes.emplace_back();
    auto& offsets = page_offsets.emplace_back();
    for (const BlockTransfer& transfer : operation.transfers) {
      const bool is_new = seen.emplace(transfer.group_id, transfer.source_id, transfer.destination_id).second;
      TOKENSPEED_CHECK(is_new, "a plan copies the same block to the same place twice");
      groups.push_back(static_cast<uint32_t>(transfer.group_id));
      sources.push_back(transfer.source_id);
      destinations.push_back(transfer.destination_id);
      hashes.push_back(transfer.key ? transfer.key->content_hash.ToHex() : std::string());
      offsets.push_back(transfer.key ? transfer.key->page_offset : 0);
    }
  }
}

WriteBackOp::WriteBackOp(std::span<const TierOperation> operations) : CacheOperations(operations) {
  for (const TierOperation& operation : operations) source_pinned.push_back(operation.source_pinned);
}

LoadBackOp::LoadBackOp(std::span<const TierOperation> operations) : CacheOperations(operations) {
  for (const TierOperation& operation : operations) {
    auto& fetched = prefetch_from_storage.emplace_back();
    for (const BlockTransfer& transfer : operation.transfers) fetched.push_back(transfer.from_storage ? 1 : 0);
  }
}

}  // namespace tokenspeed
