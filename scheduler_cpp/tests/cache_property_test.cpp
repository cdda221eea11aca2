// The cache under random workloads: see cache_workload.h for what is checked after every step.

#include <cstdint>
#include <random>
#include <vector>

#include "tests/cache_workload.h"
#include "tests/testing.h"

namespace tokenspeed {
namespace {

TEST(random_workloads_read_only_what_they_wrote) {
  int hits = 0;
  int refusals = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(600);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    testing::CacheWorkload workload(bytes);
    workload.Run();
    hits += workload.hits();
    refusals += workload.refusals();
    if (testing::FailureCount() > 0) {
      testing::Fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
  // The workloads must reach what they are there to test.
  EXPECT_TRUE(hits > 500);
  EXPECT_TRUE(refusals > 500);
}

}  // namespace
}  // namespace tokenspeed

TOKENSPEED_TEST_MAIN()
