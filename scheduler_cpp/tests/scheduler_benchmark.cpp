// The scheduler's steps without Python: what a plan of decodes costs. Prints microseconds per step; asserts nothing about
// time. For profilers, `scheduler_benchmark <workload> <steps>` runs one of them.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// Prompts differ in length, so that in each step a sixteenth of the rows completes a page.
struct Workload {
  const char* name;
  int32_t rows;
  int32_t groups;  // full groups; beyond the first, windows
  int32_t prompt;
  int32_t max_new;
  int32_t blocked;  // prompts that find no room
};

constexpr Workload kWorkloads[] = {
    {"decode-256", 256, 1, 512, 512, 0},
    {"decode-256-undeclared", 256, 1, 512, 0, 0},
    {"decode-256-3-groups", 256, 3, 512, 512, 0},
    {"decode-1024-8-groups", 1024, 8, 512, 512, 0},
    {"decode-32-long", 32, 1, 65536, 512, 0},
    {"decode-32-short", 32, 1, 512, 512, 0},
    {"blocked-0", 33, 1, 512, 512, 0},
    {"blocked-256", 33, 1, 512, 512, 256},
};

SchedulerConfig ConfigFor(const Workload& workload) {
  SchedulerConfig config;
  config.prefix_granularity = 16;
  config.max_scheduled_tokens = 65536;
  config.max_batch_size = 1024;
  config.enable_mixed_prefill_decode = true;
  config.dense_block_tables = false;
  const int32_t blocks = workload.rows * ((workload.prompt + workload.max_new) / 16 + 1);
  config.num_device_pages = (workload.blocked > 0 ? blocks + 64 : blocks * workload.groups + 4096) + 1;
  for (int32_t group = 0; group < workload.groups; ++group) {
    CacheGroupConfig one;
    one.group_id = std::to_string(group);
    one.block_granularity = 16;
    one.total_pages = 1;
    if (group > 0) {
      one.retention = CacheRetention::kSlidingWindow;
      one.sliding_window_tokens = 1024;
    }
    config.cache_groups.push_back(one);
  }
  return config;
}

RequestSpec Prompt(int32_t number, int32_t tokens, int32_t max_new) {
  RequestSpec spec;
  spec.request_id = std::to_string(number);
  spec.max_new_tokens = max_new;
  spec.tokens.resize(static_cast<std::size_t>(tokens));
  std::iota(spec.tokens.begin(), spec.tokens.end(), number * 100'000);
  return spec;
}

void Land(Scheduler& scheduler, const ExecutionPlan& plan) {
  const ForwardBatch& batch = *plan.forward;
  std::vector<int32_t> counts;
  std::vector<int32_t> tokens;
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    const bool completes = row >= batch.NumExtends() ||
                           batch.extend_prefix_lens[row] + batch.input_lengths[row] == batch.prefill_lengths[row];
    counts.push_back(completes ? 1 : 0);
    if (completes) tokens.push_back(7);
  }
  scheduler.AdvanceRows({.slots = batch.request_pool_indices, .token_counts = counts, .tokens = tokens});
}

void Run(const Workload& workload, int steps) {
  Scheduler scheduler(ConfigFor(workload));
  std::vector<RequestSpec> specs;
  for (int32_t i = 0; i < workload.rows; ++i) specs.push_back(Prompt(i, workload.prompt + i % 16, workload.max_new));
  scheduler.SubmitRequests(std::move(specs));
  while (scheduler.DecodingSize() < workload.rows) Land(scheduler, scheduler.NextExecutionPlan());
  specs.clear();
  for (int32_t i = 0; i < workload.blocked; ++i) specs.push_back(Prompt(10'000 + i, 2048, 512));
  scheduler.SubmitRequests(std::move(specs));
  Land(scheduler, scheduler.NextExecutionPlan());
  std::vector<double> planning;
  std::vector<double> landing;
  for (int step = 0; step < steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const ExecutionPlan plan = scheduler.NextExecutionPlan();
    const auto planned = std::chrono::steady_clock::now();
    Land(scheduler, plan);
    const auto landed = std::chrono::steady_clock::now();
    planning.push_back(std::chrono::duration<double, std::micro>(planned - start).count());
    landing.push_back(std::chrono::duration<double, std::micro>(landed - planned).count());
  }
  std::sort(planning.begin(), planning.end());
  std::sort(landing.begin(), landing.end());
  const auto at = [&](const std::vector<double>& sorted, double share) {
    return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
  };
  std::printf("%-24s plan %9.2f us median, %9.2f us p95   land %9.2f us median\n", workload.name, at(planning, 0.5),
              at(planning, 0.95), at(landing, 0.5));
}

}  // namespace
}  // namespace tokenspeed

int main(int argc, char** argv) {
  const std::string_view only = argc > 1 ? argv[1] : "";
  const int steps = argc > 2 ? std::atoi(argv[2]) : 200;
  for (const tokenspeed::Workload& workload : tokenspeed::kWorkloads) {
    if (only.empty() || only == workload.name) tokenspeed::Run(workload, steps);
  }
  return 0;
}
