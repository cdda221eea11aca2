#include "scheduler/late_results.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// What a request that is about to end leaves behind; `rounds` of its rows.
class Leaving {
 public:
  Leaving()
      : coordinator_(4, 8, std::vector<CacheGroupSpec>{CacheGroupSpec{.block_granularity = 4}}), tables_(1, 8), slots_(8) {}

  void Expect(LateResults& late, const std::string& id, const std::vector<int64_t>& rounds) {
    RequestSpec spec;
    spec.request_id = id;
    spec.tokens = {1};
    Request request(std::move(spec), "", 0, SchedulerConfig::Role::kFused, nullptr);
    auto resources =
        std::make_unique<RequestResources>(coordinator_, tables_, slots_.Take(), coordinator_.MakeTables());
    for (const int64_t round : rounds) resources->rows_out.push_back(RowOut{.round = round, .most_tokens = 1});
    request.StartPrefill(std::move(resources), PrefillWindow{.begin = 0, .size = 1}, 1);
    late.Expect(request);
  }

 private:
  CacheCoordinator coordinator_;
  ResidentTables tables_;
  RequestSlotPool slots_;
};

TEST(LateResults, RowsOfOneIdArriveInOrderOrByRound) {
  LateResults late;
  Leaving leaving;
  leaving.Expect(late, "a", {3, 4, 6});
  leaving.Expect(late, "b", {4});
  late.Arrive("a", kAnyRound);
  EXPECT_EQ(late.RoundsOf("a")[0], 4);
  late.Arrive("a", 6);
  late.Arrive("a", 6);
  late.Arrive("nobody", kAnyRound);
  EXPECT_EQ(late.RoundsOf("a").size(), std::size_t{1});
  late.CloseRound(4);
  late.CloseRound(4);
  EXPECT_TRUE(late.RoundsOf("a").empty());
  EXPECT_TRUE(late.RoundsOf("b").empty());
  EXPECT_EQ(late.Count(), std::size_t{0});
}

TEST(LateResults, ASlotIsExpectedInItsRoundOnly) {
  LateResults late;
  Leaving leaving;
  leaving.Expect(late, "a", {3});  // in slot 1
  EXPECT_TRUE(late.Expects(1, 3));
  EXPECT_FALSE(late.Expects(2, 3));
  EXPECT_FALSE(late.Expects(1, 4));
}

TEST(LateResults, WhatNeverArrivesIsWrittenOffOldestFirst) {
  LateResults late;
  Leaving leaving;
  for (std::size_t round = 1; round <= LateResults::kMostExpected + 10; ++round) {
    leaving.Expect(late, std::string("r").append(std::to_string(round)), {static_cast<int64_t>(round)});
  }
  EXPECT_EQ(late.Count(), LateResults::kMostExpected);
  EXPECT_TRUE(late.RoundsOf("r10").empty());
  EXPECT_EQ(late.RoundsOf("r11").size(), std::size_t{1});
}

}  // namespace
}  // namespace tokenspeed
