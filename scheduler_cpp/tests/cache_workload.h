// CacheWorkload: requests that live through a cache the way the scheduler makes them, driven by a string of bytes.
//
// The bytes choose everything: prompts (which share prefixes), chunk lengths, decode steps, forks, endings, clears, and
// when copies to and from a host tier begin and end. After each step the workload checks what must always hold:
// - the contents a request reads are the ones its own tokens produce, also through hits, reuse, eviction and copies;
// - both ends of a copy stay as they are until it ends, and on one shard;
// - full-attention tables have no hole, window tables keep all that the next query reads (I13, I14);
// - tables only grow, frontiers only move on, capacity equals the admitted growth (I11, I12, I15);
// - a refused admission leaves pools, indexes, tables and epochs as they were (I16);
// - in the end every block returns (I50).
//
// The same workload runs under a seeded generator in a test and under a fuzzer. Failures are GoogleTest's.

#ifndef TOKENSPEED_TESTS_CACHE_WORKLOAD_H_
#define TOKENSPEED_TESTS_CACHE_WORKLOAD_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "coordinator/tier_transfers.h"
#include "tests/cache_fixture.h"

namespace tokenspeed::testing {

class CacheWorkload {
 public:
  static constexpr int32_t kPrefixGranularity = 4;

  explicit CacheWorkload(std::span<const uint8_t> bytes)
      : bytes_(bytes),
        specs_(ChooseSpecs()),
        cache_(kPrefixGranularity, 2 + Below(30), specs_, nullptr, ChooseHost()),
        transfers_(cache_) {}

  void Run();

  int hits() const { return hits_; }
  int refusals() const { return refusals_; }
  int forks() const { return forks_; }
  int loads() const { return loads_; }

 private:
  using BlockContents = std::vector<int32_t>;  // the tokens that a block reflects
  using Place = std::pair<int32_t, int32_t>;   // group, block id
  struct Request {
    std::vector<int32_t> tokens;
    int32_t prompt = 0;
    int32_t computed = 0;
    uint64_t epoch = 0;
    std::vector<PrefixHash> hashes;
    std::vector<int32_t> state_boundaries;
    std::vector<BlockTable> tables;
    std::vector<int32_t> known_slots;  // lengths and frontiers seen last
    std::vector<int32_t> known_frontiers;
  };
  struct Copy {
    TierOperation operation;
    bool is_store = false;
    std::vector<BlockContents> copied;  // empty for a pinned store, which reads only when it ends
  };
  // What can be told apart from outside: (group, parent, slot, owners, epoch, kind, acquired).
  using Image = std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t, uint64_t, int32_t, bool>>;

  int32_t Below(int32_t bound);

  std::vector<CacheGroupSpec> ChooseSpecs();
  HostTier ChooseHost();

  void Step();

  void StepTiers();

  void Arrive();

  void Advance(Request& request);

  // Another continuation of a request's prompt, on what the request still holds of it.
  void Fork(const Request& parent);

  // Whether the parent still holds all rows that a query at `position` reads.
  bool HoldsAllRead(const Request& parent, int32_t position) const;

  RequestProgress Progress(const Request& request, std::vector<PrefixHash>& hashes) const;

  bool Prefill(Request& request, const PrefixProbe& probe, int32_t before, const RequestProgress& progress);

  bool Decode(Request& request, const RequestProgress& progress);

  bool Admit(Request& request, const PrefixProbe& probe, const std::vector<TokenDemand>& demands,
             const RequestProgress& progress);

  // The forward pass: rows of [before, after) are written; a state group keeps only the state after the last of them.
  void Write(Request& request, int32_t before, int32_t after);

  static BlockContents Contents(const Request& request, int32_t slot, int32_t granularity, int32_t computed);

  Place PlaceOf(const Request& request, std::size_t g, int32_t slot) const;

  void StartStores(SourceGuard guard);

  // Starts the copies of what the last admission brings back from the host.
  void StartLoad(Request& request, std::span<const PrefixHash> candidates);

  void EndCopy(std::size_t i);

  // The copy's ends on the device and on the host.
  std::pair<Place, Place> Ends(const BlockTransfer& transfer, bool is_store) const;

  // That a query at `position` finds all it reads, and that it is what the request's own tokens give.
  void CheckReadable(const Request& request, int32_t position);

  void Leave(std::size_t i, bool publish);

  void CheckTables(Request& request);

  // The gauges against a scan of the pool and all tables.
  void CheckGauges() const;

  // Everything observable of pools, indexes and this request's tables.
  Image Snapshot(const Request& request) const;

  std::span<const uint8_t> bytes_;
  std::vector<CacheGroupSpec> specs_;
  CacheCoordinator cache_;
  TierTransfers transfers_;
  std::vector<Request> requests_;
  std::map<Place, BlockContents> contents_;
  std::map<Place, BlockContents> host_contents_;
  std::vector<Copy> copies_;
  AdmissionResult admitted_;  // of the last admission
  int32_t arrivals_ = 0;
  uint64_t epochs_issued_ = 0;
  int hits_ = 0;
  int refusals_ = 0;
  int forks_ = 0;
  int loads_ = 0;
};

}  // namespace tokenspeed::testing

#endif  // TOKENSPEED_TESTS_CACHE_WORKLOAD_H_
