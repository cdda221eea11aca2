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
  int64_t round_number = 0;  // counts from 1; tells a result of this plan from those of others
  // Shared with whoever reads it, so that views into a batch may outlive the plan.
  std::shared_ptr<ForwardBatch> forward = std::make_shared<ForwardBatch>();
  // Ids taken from the pool this round, per group, in order of acquisition; hits are not among them.
  std::map<std::string, std::vector<int32_t>> pages_to_zero;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_EXECUTION_PLAN_H_
