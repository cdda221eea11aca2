// Exclusive under many threads: what ThreadSanitizer watches in a build of its own.

#include "core/exclusive.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// Without atomics, so that an overlap of two calls is a data race and a lost update.
struct Counter {
  int64_t calls = 0;
  bool inside = false;
};

TEST(Exclusive, OneCallAtATimeIsInsideAndTheOthersAreRefused) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 20000;
  Exclusive<Counter> exclusive("Counter");
  std::atomic<int64_t> done = 0;
  std::atomic<int64_t> refused = 0;
  std::barrier start(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int call = 0; call < kCalls; ++call) {
        try {
          exclusive.Use([&](Counter& counter) {
            EXPECT_FALSE(counter.inside);
            counter.inside = true;
            ++counter.calls;
            counter.inside = false;
          });
          ++done;
        } catch (const std::runtime_error&) {
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done + refused, int64_t{kThreads} * kCalls);
  exclusive.Use([&](const Counter& counter) { EXPECT_EQ(counter.calls, done); });
}

TEST(Exclusive, ACallFromWithinACallIsRefusedInWords) {
  Exclusive<Counter> exclusive("Counter");
  std::string words;
  exclusive.Use([&](Counter&) {
    try {
      exclusive.Use([](Counter&) {});
    } catch (const std::runtime_error& error) {
      words = error.what();
    }
  });
  EXPECT_EQ(words, "calls on one Counter must not overlap");
}

TEST(Exclusive, ACallThatThrowsLeavesTheObjectFree) {
  Exclusive<Counter> exclusive("Counter");
  EXPECT_THROW(exclusive.Use([](Counter&) -> void { throw std::invalid_argument("no"); }), std::invalid_argument);
  EXPECT_EQ(exclusive.Use([](Counter& counter) { return ++counter.calls; }), 1);
}

SchedulerConfig SmallConfig() {
  SchedulerConfig config;
  config.prefix_granularity = 4;
  config.max_scheduled_tokens = 64;
  config.max_batch_size = 4;
  config.num_device_pages = 64;
  config.cache_groups = {CacheGroupConfig{.group_id = "full", .block_granularity = 4, .total_pages = 64}};
  return config;
}

TEST(Exclusive, AMisusedSchedulerPlansWhatIsAskedOfItAndNothingIsLost) {
  constexpr int kThreads = 4;
  Exclusive<Scheduler> exclusive("Scheduler", SmallConfig());
  std::atomic<int64_t> planned = 0;
  std::atomic<int64_t> ended = 0;
  std::barrier start(kThreads);
  const auto insist = [&](const auto& call) {  // as a caller would that takes the refusal for "later"
    for (;;) {
      try {
        return exclusive.Use(call);
      } catch (const std::runtime_error&) {
        std::this_thread::yield();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      start.arrive_and_wait();
      for (int number = 0; number < 50; ++number) {
        const std::string id = std::to_string(thread) + "." + std::to_string(number);
        const std::vector<int32_t> prompt(6, number % 2);
        const RequestSpec spec{.request_id = id, .tokens = prompt};
        insist([&](Scheduler& scheduler) { scheduler.SubmitRequests({spec}); });
        planned += static_cast<int64_t>(
            insist([](Scheduler& scheduler) { return scheduler.NextExecutionPlan().forward->NumRows(); }));
        insist([&](Scheduler& scheduler) { scheduler.Advance(ExecutionEvent{{AbortEvent{id}}}); });
        ++ended;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  exclusive.Use([](Scheduler& scheduler) {
    scheduler.NextExecutionPlan();
    EXPECT_EQ(scheduler.WaitingSize() + scheduler.PrefillingSize() + scheduler.DecodingSize(), 0);
    EXPECT_EQ(scheduler.AvailableLcmBlocks(), 63);
  });
  EXPECT_EQ(ended, kThreads * 50);
  EXPECT_GT(planned, 0);
}

}  // namespace
}  // namespace tokenspeed
