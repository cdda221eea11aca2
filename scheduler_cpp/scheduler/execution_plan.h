// Everything one round asks of the executor.

#ifndef TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
#define TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/cache_operation.h"
#include "scheduler/forward_batch.h"

namespace tokenspeed {

struct ExecutionPlan {
  // Shared with whoever reads it, so that views into a batch may outlive the plan.
  std::shared_ptr<ForwardBatch> forward = std::make_shared<ForwardBatch>();
  // Ids taken from the pool this round, per group, in order of acquisition; hits are not among them.
  std::map<std::string, std::vector<int32_t>> pages_to_zero;
  // Copies between the tiers, absent when there is nothing to copy. Unpinned write-backs come before everything else,
  // then the zeroing, then load-backs, then the batch.
  std::optional<WriteBackOp> write_back;
  std::optional<LoadBackOp> load_back;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
