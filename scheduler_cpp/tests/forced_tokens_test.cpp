// Forced tokens: output that a result brings along without its having been drawn, and that the next rows feed.

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

using Tokens = std::vector<int32_t>;

SchedulerConfig Config(bool with_state = false) {
  constexpr int32_t kUsable = 16;
  SchedulerConfig config;
  config.prefix_granularity = 4;
  config.max_scheduled_tokens = 16;
  config.max_batch_size = 4;
  config.num_device_pages = kUsable + 1;
  config.enable_mixed_prefill_decode = true;
  config.overlap_schedule_depth = 1;
  config.cache_groups = {{.group_id = "full", .block_granularity = 4, .total_pages = kUsable + 1}};
  if (!with_state) return config;
  CacheGroupConfig state{.group_id = "state", .block_granularity = 4, .total_pages = kUsable + 1};
  state.family = CacheGroupFamily::kState;
  config.cache_groups.push_back(state);
  return config;
}

Tokens Prompt(int32_t size) {
  Tokens tokens(static_cast<std::size_t>(size));
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

void Land(Scheduler& scheduler, const std::string& id, Tokens tokens, Tokens forced = {}, int64_t round = 0) {
  scheduler.Advance(ExecutionEvent{{ExtendResultEvent{
      .request_id = id, .tokens = std::move(tokens), .round_number = round, .forced_tokens = std::move(forced)}}});
}

// Submits a prompt and has it computed; its result is out.
ExecutionPlan Prefilled(Scheduler& scheduler, const std::string& id, int32_t prompt) {
  scheduler.SubmitRequests({RequestSpec{.request_id = id, .tokens = Prompt(prompt)}});
  return scheduler.NextExecutionPlan();
}

TEST(ForcedTokens, TheNextRowFeedsThemBehindTheDrawnOneAndDrawsOnce) {
  Scheduler scheduler(Config());
  Prefilled(scheduler, "r", 6);
  Land(scheduler, "r", {7}, {8, 9, 10});
  EXPECT_EQ(scheduler.RequestTokenSize("r"), 10);
  const ExecutionPlan plan = scheduler.NextExecutionPlan();
  const ForwardBatch& batch = *plan.forward;
  ASSERT_EQ(batch.NumExtends(), std::size_t{1});
  EXPECT_EQ(batch.extend_prefix_lens, (Tokens{6}));
  EXPECT_EQ(batch.input_ids, (Tokens{7, 8, 9, 10}));
  EXPECT_EQ(batch.prefill_lengths, (Tokens{10}));
  EXPECT_EQ(batch.extend_replay_lens, (Tokens{0}));
  EXPECT_EQ(batch.block_tables.at("full").Row(0).size(), std::size_t{3});
  // Beneath that row the next one is an ordinary decode step, whose token is on the device.
  const ExecutionPlan ahead = scheduler.NextExecutionPlan();
  EXPECT_EQ(ahead.forward->NumExtends(), std::size_t{0});
  EXPECT_EQ(ahead.forward->decode_input_ids, (Tokens{ForwardBatch::kTokenIsOnDevice}));
  Land(scheduler, "r", {11}, {}, plan.round_number);
  Land(scheduler, "r", {12}, {}, ahead.round_number);
  EXPECT_EQ(scheduler.RequestTokenSize("r"), 12);
}

TEST(ForcedTokens, AnyDecodeStepMayBringThemAndOthersDecodeBeside) {
  Scheduler scheduler(Config());
  Prefilled(scheduler, "a", 3);
  Land(scheduler, "a", {1});
  Prefilled(scheduler, "b", 3);  // a decodes in the same round
  Land(scheduler, "a", {2}, {3, 4});
  Land(scheduler, "b", {5});
  const ExecutionPlan plan = scheduler.NextExecutionPlan();
  EXPECT_EQ(plan.forward->request_ids, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(plan.forward->extend_prefix_lens, (Tokens{4}));
  EXPECT_EQ(plan.forward->input_ids, (Tokens{2, 3, 4}));
  EXPECT_EQ(plan.forward->decode_input_ids, (Tokens{ForwardBatch::kTokenIsOnDevice}));
}

TEST(ForcedTokens, ABudgetCutsThemAndOnlyTheLastPieceDraws) {
  SchedulerConfig config = Config();
  config.max_scheduled_tokens = 4;
  Scheduler scheduler(config);
  Prefilled(scheduler, "r", 4);
  Land(scheduler, "r", {1}, {2, 3, 4, 5});
  const ExecutionPlan first = scheduler.NextExecutionPlan();
  EXPECT_EQ(first.forward->input_ids, (Tokens{1, 2, 3, 4}));
  EXPECT_EQ(first.forward->prefill_lengths, (Tokens{9}));
  EXPECT_THROW(Land(scheduler, "r", {6}), std::invalid_argument) << "a piece in the middle draws nothing";
  Land(scheduler, "r", {});
  const ExecutionPlan last = scheduler.NextExecutionPlan();
  EXPECT_EQ(last.forward->input_ids, (Tokens{5})) << "it is not on the device, although it is one token";
  EXPECT_EQ(last.forward->extend_prefix_lens, (Tokens{8}));
  Land(scheduler, "r", {6});
  EXPECT_EQ(scheduler.RequestTokenSize("r"), 10);
}

TEST(ForcedTokens, BesideStateNoRowGoesBeyondABoundary) {
  Scheduler scheduler(Config(/*with_state=*/true));
  Prefilled(scheduler, "r", 6);
  Land(scheduler, "r", {1}, {2, 3, 4, 5});
  EXPECT_EQ(scheduler.NextExecutionPlan().forward->input_ids, (Tokens{1, 2}));
  Land(scheduler, "r", {});
  EXPECT_EQ(scheduler.NextExecutionPlan().forward->input_ids, (Tokens{3, 4, 5}));
}

TEST(ForcedTokens, WhatNoRowHasFedIsNotPublished) {
  SchedulerConfig config = Config();
  config.enable_kv_cache_events = true;
  Scheduler scheduler(config);
  Prefilled(scheduler, "r", 5);
  Land(scheduler, "r", {1}, {2, 3, 4, 5, 6, 7});
  scheduler.Advance(ExecutionEvent{{FinishEvent{"r"}}});
  EXPECT_EQ(scheduler.DrainResidencyEvents().size(), std::size_t{1}) << "of twelve tokens five were computed";
  Prefilled(scheduler, "s", 5);
  Land(scheduler, "s", {1}, {2, 3, 4, 5, 6, 7});
  scheduler.NextExecutionPlan();
  scheduler.Advance(ExecutionEvent{{FinishEvent{"s"}}});
  EXPECT_EQ(scheduler.DrainResidencyEvents().size(), std::size_t{1}) << "the last token completes the third page";
}

TEST(ForcedTokens, ARetractionComputesThemWithThePrompt) {
  Scheduler scheduler(Config());
  Prefilled(scheduler, "r", 6);
  Land(scheduler, "r", {7}, {8, 9});
  scheduler.Advance(ExecutionEvent{{RetractEvent{"r"}}});
  const ExecutionPlan plan = scheduler.NextExecutionPlan();
  EXPECT_EQ(plan.forward->prefill_lengths, (Tokens{9}));
  EXPECT_EQ(plan.forward->input_ids.back(), 9);
  Land(scheduler, "r", {1});
  EXPECT_EQ(scheduler.NextExecutionPlan().forward->NumExtends(), std::size_t{0});
}

TEST(ForcedTokens, AForkTakesOverThePromptOfAParentThatHasSome) {
  Scheduler scheduler(Config());
  const RequestSpec parent{.request_id = "r", .tokens = Prompt(8)};
  RequestSpec fork = parent;
  fork.request_id = "f";
  fork.fork_of = "r";
  scheduler.SubmitRequests({parent, fork});
  scheduler.NextExecutionPlan();
  Land(scheduler, "r", {7}, {8, 9});
  const ExecutionPlan plan = scheduler.NextExecutionPlan();
  EXPECT_EQ(plan.forward->request_ids, (std::vector<std::string>{"r", "f"}));
  EXPECT_EQ(plan.forward->extend_prefix_lens, (Tokens{8, 7}));
}

TEST(ForcedTokens, APoolThatCannotHoldThemTakesABackSeatRequest) {
  SchedulerConfig config = Config();
  config.num_device_pages = 5;
  config.cache_groups[0].total_pages = 5;
  Scheduler scheduler(config);
  scheduler.SubmitRequests({RequestSpec{.request_id = "a", .tokens = Prompt(6)},
                            RequestSpec{.request_id = "b", .tokens = Prompt(7)}});
  scheduler.NextExecutionPlan();
  Land(scheduler, "a", {1}, {2, 3, 4, 5});
  Land(scheduler, "b", {1});
  const ExecutionPlan plan = scheduler.NextExecutionPlan();
  EXPECT_EQ(scheduler.NumRetractions(), 0) << "somebody whose result is out keeps its cache";
  EXPECT_EQ(plan.forward->request_ids, (std::vector<std::string>{"b"}));
  Land(scheduler, "b", {2});
  scheduler.NextExecutionPlan();
  EXPECT_EQ(scheduler.NumRetractions(), 1);
}

TEST(ForcedTokens, WhatNoRowCouldFeedIsRefused) {
  Scheduler scheduler(Config());
  Prefilled(scheduler, "r", 6);
  EXPECT_THROW(Land(scheduler, "r", {}, {1}), std::invalid_argument);
  EXPECT_THROW(Land(scheduler, "r", {1}, {-1}), std::invalid_argument);
  EXPECT_THROW(Land(scheduler, "r", {1}, Tokens(60, 1)), std::invalid_argument);
  scheduler.NextExecutionPlan();
  EXPECT_THROW(Land(scheduler, "r", {1}, {2}), std::runtime_error) << "a later row has been planned without them";
  EXPECT_EQ(scheduler.RequestTokenSize("r"), 6);
  Land(scheduler, "r", {1});
  Land(scheduler, "r", {2}, {3});
  EXPECT_EQ(scheduler.RequestTokenSize("r"), 9);

  SchedulerConfig wide = Config();
  wide.decode_input_tokens = 2;
  SchedulerConfig unmixed = Config();
  unmixed.enable_mixed_prefill_decode = false;
  for (const SchedulerConfig& config : {wide, unmixed}) {
    Scheduler other(config);
    Prefilled(other, "r", 6);
    EXPECT_THROW(Land(other, "r", {1}, {2}), std::invalid_argument);
  }
}

}  // namespace
}  // namespace tokenspeed
