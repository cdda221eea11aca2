// SimulatedHost: the host tier below a simulated device, whose copies end as late as the caller likes.
//
// A pinned store reads the device when it ends, an unpinned one when its plan begins; so a source that is given away too
// early shows. A load fills its destinations at once and checks at its end that neither side was given away meanwhile.
// Whatever a copy finds amiss ends the program (Require).
//
// Thread safety: none.

#ifndef TOKENSPEED_TESTS_SIMULATED_HOST_H_
#define TOKENSPEED_TESTS_SIMULATED_HOST_H_

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "scheduler/execution_event.h"
#include "scheduler/execution_plan.h"
#include "scheduler/scheduler_config.h"

namespace tokenspeed::testing {

// (group, block, row in it) -> fingerprint.
using Contents = std::map<std::tuple<std::size_t, int32_t, int32_t>, uint64_t>;

class SimulatedHost {
 public:
  // Both must outlive this object.
  SimulatedHost(const SchedulerConfig& config, Contents& device) : config_(config), device_(device) {}

  // What comes before everything else of a plan.
  void StartStores(const ExecutionPlan& plan);
  // What comes between a plan's zeroing and its batch.
  void Load(const ExecutionPlan& plan);

  // Copies that have not ended, oldest first.
  std::vector<uint32_t> UnderWay() const;
  // Ends one; returns the event that tells of it.
  SchedulerEvent End(uint32_t op_id);
  // After a clear of the host's cache.
  void Clear() { blocks_.clear(); }

  int64_t blocks_loaded() const { return blocks_loaded_; }

 private:
  using Block = std::pair<std::size_t, int32_t>;  // group, block
  using Rows = std::vector<uint64_t>;
  struct Copy {
    bool is_load = false;
    std::vector<std::pair<Block, Block>> blocks;  // source, destination
    std::optional<std::vector<Rows>> read;        // the contents, once they have been read
  };

  static Copy CopyOf(const CacheOperations& operations, std::size_t index);
  Rows OnDevice(Block block) const;
  std::vector<Rows> ReadSources(const Copy& copy) const;

  const SchedulerConfig& config_;
  Contents& device_;
  std::map<Block, Rows> blocks_;
  std::map<uint32_t, Copy> under_way_;  // ids count up
  int64_t blocks_loaded_ = 0;
};

}  // namespace tokenspeed::testing

#endif  // TOKENSPEED_TESTS_SIMULATED_HOST_H_
