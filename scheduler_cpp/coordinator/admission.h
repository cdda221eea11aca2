// What goes into an admission of CacheCoordinator, and what comes out of it.
//
// Ownership: results own what they name: load pairs hold their blocks. Views must outlive the call they are passed to.
// Thread safety: values.

#ifndef TOKENSPEED_COORDINATOR_ADMISSION_H_
#define TOKENSPEED_COORDINATOR_ADMISSION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "coordinator/cache_group.h"
#include "coordinator/host_tier.h"
#include "coordinator/prefix_convergence.h"
#include "coordinator/table_fork.h"

namespace tokenspeed {

// What can be copied of the prefix page behind a probed prefix.
struct PartialHit {
  PrefixHash name;         // of the partial page
  int32_t num_tokens = 0;  // leading tokens of it that every group can resume behind; 0 = there is no such page
};

// Result of probing the cache for a prompt. Only valid for an admission that follows at once: nothing may be admitted,
// published or cleared in between.
struct PrefixProbe {
  std::vector<std::vector<CacheKey>> keys;  // per group, all candidate pages; empty for the neutral probe
  ConvergedPrefix device;
  ConvergedPrefix host = {};  // behind the device's prefix; no masks when there is no host tier to ask
  PartialHit partial = {};    // on the device, behind either

  int32_t device_prefix_tokens() const { return device.num_common_tokens; }
  bool ExtendsOnHost() const { return host.num_common_tokens > device.num_common_tokens; }
  // Whole pages.
  int32_t prefix_tokens() const { return ExtendsOnHost() ? host.num_common_tokens : device.num_common_tokens; }
  // Where the prompt is computed from.
  int32_t resume_tokens() const { return prefix_tokens() + partial.num_tokens; }
  // A boundary that all closed groups cover but no common match reaches, worth materialising; 0 when none.
  int32_t promotion_boundary_tokens() const;
};

// What a request did since its previous transaction.
struct RequestProgress {
  std::optional<CompletedPages> completed_pages;  // present only when num_computed_tokens is
  std::optional<int32_t> num_computed_tokens;
};

struct AdmissionResult {
  int32_t device_prefix_tokens = 0;
  // End of the prefix with what the host adds. Less than was probed when the host had no room for what comes from the store:
  // then the demands did not fit the hit, and the caller has to free the tables and to begin again.
  int32_t host_prefix_tokens = 0;
  int32_t promotion_boundary_tokens = 0;
  uint64_t access_epoch = 0;
  // Per group: ids of the blocks freshly acquired, in acquisition order; neither prefix hits nor the destinations of
  // copies are among them.
  std::vector<std::vector<int32_t>> new_block_ids;
  // What is to be copied of a partial page, per group, empty without one; and its blocks, which must be held until the
  // plan with these copies is closed: whoever were given one of them in it would overwrite it too early.
  std::vector<std::vector<BlockCopy>> copies;
  std::vector<CacheBlockRef> copied_blocks;
  std::vector<LoadPair> load_pairs;  // group by group, in slot order
};

// As AdmissionResult, of a request that takes over another one's blocks.
struct ForkedAdmission {
  uint64_t access_epoch = 0;
  std::vector<std::vector<int32_t>> new_block_ids;  // per group; the destinations of copies are not among them
  std::vector<std::vector<BlockCopy>> copies;       // per group
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_COORDINATOR_ADMISSION_H_
