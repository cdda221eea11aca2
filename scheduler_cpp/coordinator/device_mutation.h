// DeviceMutation: what becomes of the device cache, told to whoever listens.
//
// Thread safety: values.

#ifndef TOKENSPEED_COORDINATOR_DEVICE_MUTATION_H_
#define TOKENSPEED_COORDINATOR_DEVICE_MUTATION_H_

#include <cstdint>
#include <functional>

#include "prefix/cache_key.h"

namespace tokenspeed {

enum class DeviceMutation : uint8_t { kStored, kRemoved };
using DeviceMutationSink = std::function<void(const CacheKey&, DeviceMutation)>;

// How much of a prefix boundary is cached, in the groups that count (CacheCoordinator::DeviceBoundaryResidency).
enum class BoundaryResidency : uint8_t { kNone, kPartial, kComplete };

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_DEVICE_MUTATION_H_
