// What passes between the host tier and the device: the tier's extent, a prefix pinned in it, and blocks to be copied up.
//
// Ownership: the handles pin both ends of a copy. They must die before the pools.
// Thread safety: values.

#ifndef TOKENSPEED_COORDINATOR_HOST_TIER_H_
#define TOKENSPEED_COORDINATOR_HOST_TIER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "core/cache_block_ref.h"
#include "prefix/cache_key.h"

namespace tokenspeed {

// The storage below the device.
struct HostTier {
  int32_t num_lcm_blocks = 0;  // usable parents; 0 = there is no host tier
  bool streams = false;        // whether what is published on the device is queued for a copy
  bool has_storage = false;    // whether keys of an external store below the host are taken note of
};

// What the host adds to the device's prefix of one admission.
struct HostHit {
  int32_t num_common_tokens = 0;
  // Per group, from the end of the device's prefix on: the source of each slot, empty where it is a hole; and 1 where it
  // is still to be fetched from the external store.
  std::vector<std::vector<CacheBlockRef>> blocks;
  std::vector<std::vector<uint8_t>> from_storage;
  bool any_from_storage = false;
};

// One block that is to be copied from the host to the device.
struct LoadPair {
  CacheBlockRef source;
  CacheBlockRef destination;
  // Under which both ends are published once they are filled. Absent when the destination is published at once: every
  // block of its operation was on the host already.
  std::optional<CacheKey> key;
  bool from_storage = false;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_HOST_TIER_H_
