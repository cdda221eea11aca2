// Everything one round asks of the executor.

#ifndef TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
#define TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/forward_batch.h"

namespace tokenspeed {

struct ExecutionPlan {
  // Shared with whoever reads it, so that views into a batch may outlive the plan.
  std::shared_ptr<ForwardBatch> forward = std::make_shared<ForwardBatch>();
  // Ids taken from the pool this round, per group, in order of acquisition; hits are not among them.
  std::map<std::string, std::vector<int32_t>> pages_to_zero;
  // What has changed in the resident tables since the plan before this one, per group in group order.
  std::vector<BlockTableChanges> table_changes;
  std::shared_ptr<const std::vector<std::string>> group_ids;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
