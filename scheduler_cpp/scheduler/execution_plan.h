// Everything one round asks of the executor, in this order: pages_to_zero, pages_to_copy, the batch.

#ifndef TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
#define TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/table_fork.h"
#include "scheduler/cache_operation.h"
#include "scheduler/forward_batch.h"

namespace tokenspeed {

struct ExecutionPlan {
  int64_t round_number = 0;  // counts from 1; tells a result of this plan from those of others
  // Shared with whoever reads it, so that views into a batch may outlive the plan.
  std::shared_ptr<ForwardBatch> forward = std::make_shared<ForwardBatch>();
  // Role P: prompts to hand to the peer, each with the token that follows it. Role D: a prompt for the peer to compute
  // into these tables. Null when there is none.
  std::shared_ptr<ForwardBatch> remote_decode;
  std::shared_ptr<ForwardBatch> remote_prefill;
  // Ids taken from the pool this round, per group, in order of acquisition. Hits are not among them, nor are the
  // destinations of copies, which are overwritten whole.
  std::map<std::string, std::vector<int32_t>> pages_to_zero;
  // What has changed in the resident tables since the plan before this one, per group in group order.
  std::vector<BlockTableChanges> table_changes;
  std::shared_ptr<const std::vector<std::string>> group_ids;
  // Per group, blocks whose whole contents go to another block of the group before the batch runs. No source is written
  // by anything before that, nor is it a destination, so the order among copies does not matter. Under sharding the two
  // blocks may belong to different shards. Without keys in a round that forks nothing; otherwise every group has one.
  std::map<std::string, std::vector<BlockCopy>> pages_to_copy;
  // Copies between the tiers, absent when there is nothing to copy. Unpinned write-backs come before everything else,
  // then the zeroing, the copies within the device, load-backs, and the batch.
  std::optional<WriteBackOp> write_back;
  std::optional<LoadBackOp> load_back;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
