// What a landing takes (S-PD5 to S-PD7, S-RP9), how a decode worker looks a prompt up (S-PM24), and both halves of a
// disaggregated worker against each other under the sanitizers.

#include "scheduler/remote_admission.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "scheduler/scheduler.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using Role = SchedulerConfig::Role;

CacheGroupConfig Group(const std::string& id, int32_t granularity) {
  return {.group_id = id, .block_granularity = granularity, .transfer_policy = CacheTransferPolicy::kFullSuffix};
}

CacheGroupConfig Sliding(const std::string& id, int32_t window, int32_t granularity, bool replayable = false) {
  CacheGroupConfig group = Group(id, granularity);
  group.retention = CacheRetention::kSlidingWindow;
  group.sliding_window_tokens = window;
  group.replayable = replayable;
  return group;
}

CacheGroupConfig Snapshots(const std::string& id, int32_t granularity) {
  CacheGroupConfig group = Group(id, granularity);
  group.family = CacheGroupFamily::kState;
  group.transfer_policy = CacheTransferPolicy::kLatestSnapshot;
  return group;
}

int32_t FirstBlock(const CacheGroupConfig& group, int32_t hit, int32_t prompt) {
  SchedulerConfig config;
  config.cache_groups = {group};
  const PrefillReserve reserve{.decode_width = 1, .completes = true, .growth = true};
  const TokenDemand demand = RemoteLandingDemands(config, hit, prompt, reserve).at(0);
  const auto* sparse = std::get_if<SparseSuffix>(&demand.extent);
  if (sparse == nullptr) return -1;
  EXPECT_EQ(sparse->extent_tokens, prompt);
  return sparse->first_block;
}

TEST(RemoteAdmission, ALandingTakesWhatThePeersTablesHoldAtTheEnd) {
  EXPECT_EQ(FirstBlock(Group("full", 2), 4, 8), -1);
  EXPECT_EQ(FirstBlock(Snapshots("state", 2), 0, 8), 3);
  EXPECT_EQ(FirstBlock(Snapshots("state", 1), 0, 8), 7);
  EXPECT_EQ(FirstBlock(Sliding("swa", 4, 2), 0, 8), 2);
  EXPECT_EQ(FirstBlock(Sliding("swa", 4, 2), 8, 16), 6);
  EXPECT_EQ(FirstBlock(Sliding("swa", 16, 4), 32, 40), 8);
  EXPECT_EQ(FirstBlock(Sliding("swa", 1, 2), 0, 8), 4);
  EXPECT_EQ(FirstBlock(Sliding("swa", 100, 2), 0, 8), 0);
}

TEST(RemoteAdmission, AReplayableWindowLandsWholeWhateverIsHit) {
  EXPECT_EQ(FirstBlock(Sliding("swa", 16, 4, true), 0, 40), 6);
  EXPECT_EQ(FirstBlock(Sliding("swa", 16, 4, true), 32, 40), 6);
  EXPECT_EQ(FirstBlock(Sliding("swa", 2, 2, true), 0, 40), 19);
}

TEST(RemoteAdmission, PM24_a_state_that_arrives_is_not_matched) {
  const std::vector<CacheGroupSpec> specs = {testing::Full(2), testing::State(2)};
  CacheCoordinator cache(2, 16, specs);
  const std::vector<PrefixHash> pages = testing::Hashes(1, 3);
  std::vector<BlockTable> tables = cache.MakeTables();
  const std::vector<TokenDemand> demands = {testing::Dense(6), testing::Sparse(6, 2)};
  const auto admitted = cache.Admit(cache.ProbePrefix({}), tables, demands, RequestProgress{});
  ASSERT_TRUE(admitted.has_value());
  // Three pages of history, and no snapshot at any of their boundaries.
  cache.CacheCompletedBlocks(tables, testing::Completed(pages, 0, BoundaryKind::kEndpoint, 6), admitted->access_epoch);
  cache.Free(tables);
  EXPECT_EQ(cache.ProbePrefix(pages).device_prefix_tokens(), 0);
  const PrefixProbe probe = cache.ProbeDecodeDevicePrefix(pages);
  EXPECT_EQ(probe.device_prefix_tokens(), 6);
  EXPECT_EQ(probe.device.masks[1], (PrefixMask{0, 0, 0}));
}

TEST(RemoteAdmission, WithoutHistoryADecodeWorkerHitsNothing) {
  const std::vector<CacheGroupSpec> specs = {testing::State(2)};
  CacheCoordinator cache(2, 16, specs);
  EXPECT_EQ(cache.ProbeDecodeDevicePrefix(testing::Hashes(1, 3)).device_prefix_tokens(), 0);
}

SchedulerConfig RoleConfig(Role role, int32_t usable) {
  SchedulerConfig config;
  config.prefix_granularity = 4;
  config.max_scheduled_tokens = 8;
  config.max_batch_size = 4;
  config.role = role;
  config.num_device_pages = usable + 1;
  config.enable_kv_cache_events = true;
  config.cache_groups = {Group("full", 4), Sliding("window", 5, 2), Snapshots("state", 2)};
  for (CacheGroupConfig& group : config.cache_groups) group.total_pages = usable + 1;
  return config;
}

// Lands every row of the batch; completed prompts and decodes get a token. Returns those that got one.
std::vector<std::string> LandAll(Scheduler& scheduler, const ForwardBatch& batch) {
  std::vector<std::string> with_token;
  ExecutionEvent results;
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    const bool whole = row >= batch.NumExtends() ||
                       batch.extend_prefix_lens[row] + batch.input_lengths[row] == batch.prefill_lengths[row];
    ExtendResultEvent result{.request_id = batch.request_ids[row], .tokens = {}, .spec_candidate_ids = {}};
    if (whole) {
      result.tokens.push_back(1);
      with_token.push_back(result.request_id);
    }
    results.AddEvent(result);
  }
  scheduler.Advance(results);
  return with_token;
}

class Pair {
 public:
  void Run() {
    for (int round = 0; round < 4000 && (submitted_ < 60 || !left_.empty()); ++round) {
      if (submitted_ < 60 && left_.size() < 6) Submit();
      const ExecutionPlan prefills = prefill_.NextExecutionPlan();
      if (prefills.remote_decode) Note(*prefills.remote_decode, handed_off_);
      LandAll(prefill_, *prefills.forward);
      const ExecutionPlan decodes = decode_.NextExecutionPlan();
      if (decodes.remote_prefill) Note(*decodes.remote_prefill, awaited_);
      for (const std::string& id : LandAll(decode_, *decodes.forward)) {
        if (--left_.at(id) <= 0) End(id, FinishEvent{id});
      }
      Transfer();
      prefill_.DrainResidencyEvents();
      decode_.DrainResidencyEvents();
      // Neither side may have room for what the other is ready for.
      idle_ = prefills.forward->NumRows() + decodes.forward->NumRows() == 0 ? idle_ + 1 : 0;
      if (idle_ > 8 && !left_.empty()) End(left_.begin()->first, AbortEvent{left_.begin()->first});
    }
    EXPECT_TRUE(left_.empty());
    for (Scheduler* scheduler : {&prefill_, &decode_}) {
      scheduler->NextExecutionPlan();
      EXPECT_EQ(scheduler->PdTransferSize(), 0);
      EXPECT_EQ(scheduler->ActiveLcmBlocks(), 0);
      EXPECT_TRUE(scheduler->ClearCache());
    }
    EXPECT_GT(landings_, 30);
    EXPECT_GT(decode_.NumRetractions(), 0);
  }

 private:
  void Submit() {
    const std::string id = std::string("r").append(std::to_string(submitted_++));
    std::vector<int32_t> tokens(1 + random_() % 20);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_() % 2);
    left_[id] = static_cast<int32_t>(1 + random_() % 10);
    for (Scheduler* scheduler : {&prefill_, &decode_}) {
      scheduler->SubmitRequests({RequestSpec{.request_id = id, .tokens = tokens}});
      scheduler->Advance(ExecutionEvent{{BootstrappedEvent{id}}});
    }
  }

  static void Note(const ForwardBatch& batch, std::set<std::string>& ids) {
    ids.insert(batch.request_ids.begin(), batch.request_ids.end());
  }

  void Transfer() {
    const std::set<std::string> awaited = awaited_;
    for (const std::string& id : awaited) {
      if (!handed_off_.contains(id) || random_() % 3 == 0) continue;
      decode_.Advance(ExecutionEvent{{RemotePrefillDoneEvent{id, 1}, RemotePrefillDoneEvent{id, 1}}});
      prefill_.Advance(ExecutionEvent{{SucceededEvent{id}}});
      awaited_.erase(id);
      handed_off_.erase(id);
      ++landings_;
    }
  }

  void End(const std::string& id, SchedulerEvent event) {
    const std::string ended = id;
    decode_.Advance(ExecutionEvent{{std::move(event)}});
    prefill_.Advance(ExecutionEvent{{FailedEvent{ended}}});
    awaited_.erase(ended);
    handed_off_.erase(ended);
    left_.erase(ended);
  }

  Scheduler prefill_{RoleConfig(Role::kPrefill, 24)};
  Scheduler decode_{RoleConfig(Role::kDecode, 22)};
  std::mt19937 random_{7};
  std::map<std::string, int32_t> left_;  // tokens still to be generated
  std::set<std::string> handed_off_, awaited_;
  int submitted_ = 0;
  int landings_ = 0;
  int idle_ = 0;
};

TEST(RemoteAdmission, ACrowdedPairOfWorkersEndsWithNothingHeld) { Pair().Run(); }

}  // namespace
}  // namespace tokenspeed
