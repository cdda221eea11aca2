// The scheduler through its C++ face: a crowded closed loop under the sanitizers, events, and what Python cannot reach.

#include "scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "scheduler/stall_watch.h"

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

// What became of a step, in both forms that the scheduler takes.
struct Results {
  ExecutionEvent events;
  std::vector<int32_t> slots, token_counts, tokens, finished;
};

Results Run(const ForwardBatch& batch, std::mt19937& random, std::set<std::string>& live) {
  Results results;
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    const std::string& id = batch.request_ids[row];
    const bool whole = row >= batch.NumExtends() ||
                       batch.extend_prefix_lens[row] + batch.input_lengths[row] == batch.prefill_lengths[row];
    ExtendResultEvent result{.request_id = id, .tokens = {}, .spec_candidate_ids = {}};
    if (whole) result.tokens.push_back(static_cast<int32_t>(random() % 2));
    const int32_t slot = batch.request_pool_indices[row];
    results.slots.push_back(slot);
    results.token_counts.push_back(static_cast<int32_t>(result.tokens.size()));
    results.tokens.insert(results.tokens.end(), result.tokens.begin(), result.tokens.end());
    results.events.AddEvent(result);
    if (whole && random() % 8 == 0) {
      results.events.AddEvent(FinishEvent{id});
      results.finished.push_back(slot);
      live.erase(id);
    }
  }
  return results;
}

void Land(Scheduler& scheduler, const Results& results, bool as_rows) {
  if (!as_rows) return scheduler.Advance(results.events);
  scheduler.AdvanceRows(
      RowResults{.slots = results.slots, .token_counts = results.token_counts, .tokens = results.tokens});
  scheduler.FinishRows(results.finished);
}

void RunACrowdedClosedLoop(bool mixed, bool as_rows, bool with_state, bool with_forks) {
  const int32_t usable = with_state ? 22 : 16;
  SchedulerConfig config = Config(usable, with_state);
  config.enable_mixed_prefill_decode = mixed;
  Scheduler scheduler(config);
  std::mt19937 random(7);
  std::set<std::string> live;
  int submitted = 0;
  std::size_t copies = 0;
  for (int round = 0; round < 20000 && (submitted < 100 || !live.empty()); ++round) {
    if (submitted < 100 && live.size() < 7) {
      const std::string id = std::string("r").append(std::to_string(submitted++));
      std::vector<int32_t> tokens(1 + random() % 20);
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
      scheduler.SubmitRequests({RequestSpec{.request_id = id, .tokens = tokens, .max_new_tokens = 8}});
      live.insert(id);
      for (int fork = 0; with_forks && fork < 2; ++fork) {
        const std::string fork_id = id + std::string(1, static_cast<char>('a' + fork));
        scheduler.SubmitRequests({RequestSpec{.request_id = fork_id, .tokens = tokens, .fork_of = id}});
        live.insert(fork_id);
      }
    }
    const ExecutionPlan plan = scheduler.NextExecutionPlan();
    for (const auto& [group_id, group_copies] : plan.pages_to_copy) copies += group_copies.size();
    Land(scheduler, Run(*plan.forward, random, live), as_rows);
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
  EXPECT_EQ(copies > 0, with_forks && !with_state);
  scheduler.NextExecutionPlan();
  EXPECT_EQ(scheduler.ActiveLcmBlocks(), 0);
  EXPECT_EQ(scheduler.AvailableLcmBlocks(), usable);
  EXPECT_TRUE(scheduler.ClearCache());
  EXPECT_EQ(scheduler.EmptyLcmBlocks(), usable);
}

TEST(Scheduler, ACrowdedClosedLoopEndsWithNothingHeld) {
  for (const bool mixed : {false, true}) {
    for (const bool as_rows : {false, true}) {
      for (const bool with_state : {false, true}) {
        for (const bool with_forks : {false, true}) RunACrowdedClosedLoop(mixed, as_rows, with_state, with_forks);
      }
    }
  }
}

TEST(Scheduler, ASchedulerMayDieWithRequestsAndCacheInIt) {
  Scheduler scheduler(Config(16));
  scheduler.SubmitRequests({RequestSpec{.request_id = "a", .tokens = {1, 2, 3, 4, 5}, .max_new_tokens = 0},
                            RequestSpec{.request_id = "b", .tokens = {1, 2, 3}, .max_new_tokens = 0}});
  EXPECT_EQ(scheduler.NextExecutionPlan().forward->NumRows(), std::size_t{2});
}

TEST(Scheduler, ABatchOutlivesItsScheduler) {
  std::shared_ptr<ForwardBatch> batch;
  {
    Scheduler scheduler(Config(16));
    scheduler.SubmitRequests({RequestSpec{.request_id = "a", .tokens = {1, 2, 3, 4, 5}, .max_new_tokens = 0}});
    batch = scheduler.NextExecutionPlan().forward;
  }
  EXPECT_EQ(batch->request_ids, (std::vector<std::string>{"a"}));
  EXPECT_EQ(batch->block_tables.at("full").ids, (std::vector<int32_t>{1, 2}));
}

std::vector<std::string> Hashes(const std::string& salt, const std::string& version) {
  SchedulerConfig config = Config(16);
  config.weight_version = version;
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5};
  return Scheduler(config).PrefixHashesForTokens(tokens, salt);
}

TEST(Scheduler, WhatPythonCannotPassAsASaltSeparatesPrefixesAllTheSame) {
  const std::string raw("\xff\0\xfe", 3);
  EXPECT_TRUE(Hashes(raw, "") == Hashes(raw, ""));
  EXPECT_FALSE(Hashes(raw, "") == Hashes(raw.substr(0, 1), ""));
  EXPECT_FALSE(Hashes(raw, "") == Hashes("", raw));
}

// First rows of a prompt that comes back, submitted first under one salt and version and then under others.
int32_t HitAfterSeed(const std::string& salt, const std::string& version) {
  Scheduler scheduler(Config(16));
  scheduler.SetWeightVersion("w1");
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  RequestSpec seed{.request_id = "seed", .tokens = prompt, .max_new_tokens = 0, .cache_salt = "s1"};
  scheduler.SubmitRequests({seed});
  scheduler.NextExecutionPlan();
  scheduler.Advance(ExecutionEvent{{ExtendResultEvent{"seed", {7}, {}}, FinishEvent{"seed"}}});
  scheduler.SetWeightVersion(version);
  scheduler.SubmitRequests({RequestSpec{.request_id = "again", .tokens = prompt, .cache_salt = salt}});
  return scheduler.NextExecutionPlan().forward->extend_prefix_lens.at(0);
}

TEST(Scheduler, NoBlockIsSharedAcrossSaltsOrWeightVersions) {
  EXPECT_EQ(HitAfterSeed("s1", "w1"), 8);
  EXPECT_EQ(HitAfterSeed("s2", "w1"), 0);
  EXPECT_EQ(HitAfterSeed("", "w1"), 0);
  EXPECT_EQ(HitAfterSeed("s1", "w2"), 0);
  EXPECT_EQ(HitAfterSeed("s1", ""), 0);
  EXPECT_EQ(HitAfterSeed("w1", "s1"), 0);
  EXPECT_EQ(HitAfterSeed("", ""), 0);
}

TEST(Scheduler, APromptThatReadsNoCacheIsFedWholeAndStillFillsIt) {
  Scheduler scheduler(Config(16));
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<int32_t> hits;
  for (const bool reads : {false, false, true}) {
    scheduler.SubmitRequests({RequestSpec{.request_id = "r", .tokens = prompt, .reads_prefix_cache = reads}});
    hits.push_back(scheduler.NextExecutionPlan().forward->extend_prefix_lens.at(0));
    scheduler.Advance(ExecutionEvent{{ExtendResultEvent{"r", {7}, {}}, FinishEvent{"r"}}});
    scheduler.NextExecutionPlan();  // reaps it
  }
  EXPECT_EQ(hits, (std::vector<int32_t>{0, 0, 8}));
}

// Where a prompt of 21 tokens goes on when it comes back, retracted after some of its steps of 8 tokens.
int32_t HitAfterRetraction(bool reads, int32_t steps) {
  SchedulerConfig config = Config(16);
  config.max_scheduled_tokens = 8;
  Scheduler scheduler(config);
  std::vector<int32_t> prompt(21);
  std::iota(prompt.begin(), prompt.end(), 1);
  scheduler.SubmitRequests({RequestSpec{.request_id = "r", .tokens = prompt, .reads_prefix_cache = reads}});
  for (int32_t step = 1; step <= steps; ++step) {
    scheduler.NextExecutionPlan();
    const std::vector<int32_t> drawn(step == 3 ? 1 : 0, 7);
    scheduler.Advance(ExecutionEvent{{ExtendResultEvent{"r", drawn, {}}}});
  }
  scheduler.Advance(ExecutionEvent{{RetractEvent{"r"}}});
  return scheduler.NextExecutionPlan().forward->extend_prefix_lens.at(0);
}

TEST(Scheduler, APromptThatReadsNoCacheTakesItsOwnBlocksBackOnceItIsComplete) {
  EXPECT_EQ(HitAfterRetraction(/*reads=*/true, 2), 8);
  EXPECT_EQ(HitAfterRetraction(/*reads=*/false, 2), 0);
  EXPECT_EQ(HitAfterRetraction(/*reads=*/true, 3), 16);
  EXPECT_EQ(HitAfterRetraction(/*reads=*/false, 3), 16);
}

TEST(Scheduler, ResidencyHashesAreTheDocumentedOnes) {
  const std::vector<int32_t> first = {1, 2, 3, 4};
  const std::vector<int32_t> second = {5, 6, 7, 8};
  EXPECT_EQ(HashResidencyPage(first, std::nullopt), uint64_t{15932823548972441343ULL});
  EXPECT_EQ(HashResidencyPage(second, 15932823548972441343ULL), uint64_t{12482753192408519678ULL});
}

TEST(Scheduler, AStallIsCountedUntilWorkResumes) {
  StallWatch watch;
  for (int round = 0; round < 5; ++round) watch.Record(true, 1, 0);
  EXPECT_EQ(watch.streak(), int64_t{5});
  watch.Record(false, 1, 0);
  EXPECT_EQ(watch.streak(), int64_t{0});
}

}  // namespace
}  // namespace tokenspeed
