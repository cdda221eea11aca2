// What a decode worker's cache must hold for a prompt that its peer computes: the destination of the transfer, and room
// to decode from. The peer hands over what its own tables hold at the end of the prompt, so a landing takes the same
// slots: of a closed group everything behind the hit, of a window its last W - 1 positions, of a state the snapshot at
// the end.
//
// Thread safety: pure functions.

#ifndef TOKENSPEED_SCHEDULER_REMOTE_ADMISSION_H_
#define TOKENSPEED_SCHEDULER_REMOTE_ADMISSION_H_

#include <cstdint>
#include <vector>

#include "coordinator/group_geometry.h"
#include "scheduler/reserve.h"
#include "scheduler/scheduler_config.h"

namespace tokenspeed {

// One demand per group, for tables that hold a hit of `hit` < `prompt` tokens. A replayable group holds nothing of a
// hit, and nothing is fed again on this worker, so its whole window must land.
std::vector<TokenDemand> RemoteLandingDemands(const SchedulerConfig& config, int32_t hit, int32_t prompt,
                                              const PrefillReserve& reserve);

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REMOTE_ADMISSION_H_
