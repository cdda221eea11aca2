// The cache under random workloads: see cache_workload.h for what is checked after every step.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/cache_workload.h"

namespace tokenspeed {
namespace {

TEST(CacheProperty, random_workloads_read_only_what_they_wrote) {
  int hits = 0;
  int refusals = 0;
  int forks = 0;
  int loads = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(800);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    testing::CacheWorkload workload(bytes);
    workload.Run();
    hits += workload.hits();
    refusals += workload.refusals();
    forks += workload.forks();
    loads += workload.loads();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
  // The workloads must reach what they are there to test.
  EXPECT_TRUE(hits > 500);
  EXPECT_TRUE(refusals > 500);
  EXPECT_TRUE(forks > 500);
  EXPECT_GT(loads, 200);
}

}  // namespace
}  // namespace tokenspeed
