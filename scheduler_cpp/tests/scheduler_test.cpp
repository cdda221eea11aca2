// The scheduler through its C++ face: a crowded closed loop under the sanitizers, events, and what Python cannot reach.

#include "scheduler/scheduler.h"

#include <random>
#include <set>

#include "scheduler/stall_watch.h"
#include "tests/testing.h"

namespace tokenspeed {
namespace {

SchedulerConfig Config(int32_t usable, bool with_state = false) {
  SchedulerConfig config;
  config.prefix_granularity = 4;
  config.max_scheduled_tokens = 16;
  config.max_batch_size = 4;
  config.num_device_pages = usable + 1;
  config.enable_kv_cache_events = true;
  CacheGroupConfig full{.group_id = "full", .block_granularity = 4, .total_pages = usable * 2 + 1};
  full.cache_blocks_per_lcm_block = 2;
  CacheGroupConfig window{.group_id = "window", .block_granularity = 2, .total_pages = usable + 1};
  window.retention = CacheRetention::kSlidingWindow;
  window.sliding_window_tokens = 5;
  CacheGroupConfig state{.group_id = "state", .block_granularity = 2, .total_pages = usable * 2 + 1};
  state.family = CacheGroupFamily::kState;
  state.cache_blocks_per_lcm_block = 2;
  config.cache_groups = {full, window};
  if (with_state) config.cache_groups.push_back(state);
  return config;
}

void Land(Scheduler& scheduler, const ForwardBatch& batch, std::mt19937& random, std::set<std::string>& live) {
  ExecutionEvent landed;
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    const std::string& id = batch.request_ids[row];
    const bool whole = row >= batch.NumExtends() ||
                       batch.extend_prefix_lens[row] + batch.input_lengths[row] == batch.prefill_lengths[row];
    ExtendResultEvent result{.request_id = id, .tokens = {}, .spec_candidate_ids = {}};
    if (whole) result.tokens.push_back(static_cast<int32_t>(random() % 2));
    landed.AddEvent(result);
    if (whole && random() % 8 == 0) {
      landed.AddEvent(FinishEvent{id});
      live.erase(id);
    }
  }
  scheduler.Advance(landed);
}

TEST(ACrowdedClosedLoopEndsWithNothingHeld) {
  for (const int variant : {0, 1, 2, 3}) {
    const int32_t usable = variant >= 2 ? 22 : 16;
    SchedulerConfig config = Config(usable, /*with_state=*/variant >= 2);
    config.enable_mixed_prefill_decode = variant % 2 == 1;
    Scheduler scheduler(config);
    std::mt19937 random(7);
    std::set<std::string> live;
    int submitted = 0;
    for (int round = 0; round < 20000 && (submitted < 100 || !live.empty()); ++round) {
      if (submitted < 100 && live.size() < 7) {
        const std::string id = std::string("r").append(std::to_string(submitted++));
        std::vector<int32_t> tokens(1 + random() % 20);
        for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
        scheduler.SubmitRequests({RequestSpec{.request_id = id, .tokens = tokens, .max_new_tokens = 8}});
        live.insert(id);
      }
      const ExecutionPlan plan = scheduler.NextExecutionPlan();
      Land(scheduler, *plan.forward, random, live);
      scheduler.DrainResidencyEvents();
      // Generation has no end of its own here; nobody may outgrow the pool for ever.
      for (auto id = live.begin(); id != live.end();) {
        if (scheduler.RequestTokenSize(*id) > 26) {
          scheduler.Advance(ExecutionEvent{{AbortEvent{*id}}});
          id = live.erase(id);
        } else {
          ++id;
        }
      }
    }
    EXPECT_TRUE(live.empty());
    scheduler.NextExecutionPlan();
    EXPECT_EQ(scheduler.ActiveLcmBlocks(), 0);
    EXPECT_EQ(scheduler.AvailableLcmBlocks(), usable);
    EXPECT_TRUE(scheduler.ClearCache());
    EXPECT_EQ(scheduler.EmptyLcmBlocks(), usable);
  }
}

TEST(ASchedulerMayDieWithRequestsAndCacheInIt) {
  Scheduler scheduler(Config(16));
  scheduler.SubmitRequests({RequestSpec{.request_id = "a", .tokens = {1, 2, 3, 4, 5}, .max_new_tokens = 0},
                            RequestSpec{.request_id = "b", .tokens = {1, 2, 3}, .max_new_tokens = 0}});
  EXPECT_EQ(scheduler.NextExecutionPlan().forward->NumRows(), std::size_t{2});
}

TEST(ABatchOutlivesItsScheduler) {
  std::shared_ptr<ForwardBatch> batch;
  {
    Scheduler scheduler(Config(16));
    scheduler.SubmitRequests({RequestSpec{.request_id = "a", .tokens = {1, 2, 3, 4, 5}, .max_new_tokens = 0}});
    batch = scheduler.NextExecutionPlan().forward;
  }
  EXPECT_EQ(batch->request_ids, (std::vector<std::string>{"a"}));
  EXPECT_EQ(batch->block_tables.at("full").ids, (std::vector<int32_t>{1, 2}));
}

TEST(ResidencyHashesAreTheDocumentedOnes) {
  const std::vector<int32_t> first = {1, 2, 3, 4};
  const std::vector<int32_t> second = {5, 6, 7, 8};
  EXPECT_EQ(HashResidencyPage(first, std::nullopt), uint64_t{15932823548972441343ULL});
  EXPECT_EQ(HashResidencyPage(second, 15932823548972441343ULL), uint64_t{12482753192408519678ULL});
}

TEST(AStallIsCountedUntilWorkResumes) {
  StallWatch watch;
  for (int round = 0; round < 5; ++round) watch.Record(true, 1, 0);
  EXPECT_EQ(watch.streak(), int64_t{5});
  watch.Record(false, 1, 0);
  EXPECT_EQ(watch.streak(), int64_t{0});
}

}  // namespace
}  // namespace tokenspeed

TOKENSPEED_TEST_MAIN()
