// The copies between device and host that one plan asks for: columns over operations, and within an operation over its
// blocks.
//
// Invariants: all columns have one entry per operation, all inner lists of an operation one per block; no operation is
// empty; no (group, source, destination) occurs twice.
//
// What the executor owes: an unpinned write-back reads its sources before anything of the same plan, or of a later one,
// writes there; a pinned one reads them behind all forwards of earlier plans. A load-back fills its destinations, with
// the zeroing of pages_to_zero before it, ahead of the plan's batch. What is to be fetched from the external store must
// be there before the batch runs, and before a further plan is asked for: if it is not, none of the batch is run, each
// of its requests is retracted, and the operation is completed without success.
//
// Thread safety: values.

#ifndef TOKENSPEED_SCHEDULER_CACHE_OPERATION_H_
#define TOKENSPEED_SCHEDULER_CACHE_OPERATION_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coordinator/tier_transfers.h"

namespace tokenspeed {

struct CacheOperations {
  std::vector<uint32_t> op_ids;
  std::vector<std::vector<uint32_t>> group_ids;
  std::vector<std::vector<int32_t>> src_pages;
  std::vector<std::vector<int32_t>> dst_pages;
  std::vector<std::vector<std::string>> content_hashes;  // hexadecimal; empty where a load has no key
  std::vector<std::vector<int32_t>> page_offsets;

 protected:
  // The operations must not be empty.
  explicit CacheOperations(std::span<const TierOperation> operations);
};

struct WriteBackOp : CacheOperations {
  explicit WriteBackOp(std::span<const TierOperation> operations);

  std::vector<bool> source_pinned;  // per operation
};

struct LoadBackOp : CacheOperations {
  explicit LoadBackOp(std::span<const TierOperation> operations);

  std::vector<std::vector<uint8_t>> prefetch_from_storage;  // 1 where the source is to be fetched first
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_CACHE_OPERATION_H_
