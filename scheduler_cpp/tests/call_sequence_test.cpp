// Random call sequences: see call_sequence.h for what is checked all along.

#include "tests/call_sequence.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace tokenspeed {
namespace {

TEST(CallSequence, RandomCallsMeetEverythingThatTheyAreThereToTest) {
  testing::CallCounts met;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(1500);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    testing::CallSequence calls(bytes);
    calls.Run();
    met.plans_with_rows += calls.counts().plans_with_rows;
    met.hits += calls.counts().hits;
    met.retractions += calls.counts().retractions;
    met.late_results += calls.counts().late_results;
    met.refusals += calls.counts().refusals;
    met.dropped_events += calls.counts().dropped_events;
    met.finished += calls.counts().finished;
    met.blocks_loaded += calls.counts().blocks_loaded;
    met.clears_above_a_host += calls.counts().clears_above_a_host;
    met.forced += calls.counts().forced;
  }
  EXPECT_GT(met.plans_with_rows, 10000);
  EXPECT_GT(met.hits, 500);
  EXPECT_GT(met.retractions, 100);
  EXPECT_GT(met.late_results, 500);
  EXPECT_GT(met.refusals, 3000);
  EXPECT_GT(met.dropped_events, 50);
  EXPECT_GT(met.finished, 1000);
  EXPECT_GT(met.blocks_loaded, 300);
  EXPECT_GT(met.clears_above_a_host, 50);
  EXPECT_GT(met.forced, 100);
}

}  // namespace
}  // namespace tokenspeed
