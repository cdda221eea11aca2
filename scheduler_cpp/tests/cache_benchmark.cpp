// Micro-benchmarks of the cache's hot paths. Prints nanoseconds per operation; asserts nothing about time.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "tests/cache_fixture.h"

namespace tokenspeed {
namespace {

using testing::Dense;
using testing::Full;
using testing::Window;

constexpr int32_t kPrefixGranularity = 64;

void Report(const char* name, int64_t operations, const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  std::printf("%-56s %12.1f ns\n", name, elapsed.count() / static_cast<double>(operations));
}

void BenchmarkPool() {
  constexpr int32_t kBlocks = 100000;
  for (const int32_t packing : {1, 12}) {
    BlockPool pool(kBlocks, {packing});
    std::vector<CacheBlockRef> blocks;
    Report(packing == 1 ? "acquire a block, one per parent" : "acquire a block, twelve per parent", kBlocks,
           [&] { blocks = pool.AcquireBlocks(0, kBlocks); });
    Report("release a block", kBlocks, [&] { blocks.clear(); });
  }
}

void BenchmarkHashing() {
  std::vector<int32_t> tokens(1 << 17);
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto pages = static_cast<int32_t>(tokens.size()) / kPrefixGranularity;
  std::vector<PrefixHash> hashes;
  Report("hash a token of a prompt of 131072", static_cast<int64_t>(tokens.size()),
         [&] { ExtendPrefixHashes(tokens, kPrefixGranularity, pages, hashes); });
}

std::vector<std::vector<BlockTable>> Residents(CacheCoordinator& cache, int32_t count, int32_t tokens) {
  std::vector<std::vector<BlockTable>> residents;
  for (int32_t i = 0; i < count; ++i) {
    residents.push_back(cache.MakeTables());
    const std::vector<TokenDemand> demands(cache.NumGroups(), Dense(tokens));
    cache.Admit(cache.ProbePrefix({}), residents.back(), demands, {});
  }
  return residents;
}

void BenchmarkDecode() {
  constexpr int32_t kResidents = 256;
  constexpr int32_t kSteps = 512;
  const std::vector<CacheGroupSpec> specs = {Full(64, 6), Window(1024, 64, 6)};
  CacheCoordinator cache(kPrefixGranularity, 40000, specs);
  auto residents = Residents(cache, kResidents, 8192);
  const std::vector<TokenDemand> one(specs.size(), Dense(1));
  const PrefixProbe neutral = cache.ProbePrefix({});
  Report("decode step of one resident, two groups", int64_t{kResidents} * kSteps, [&] {
    for (int32_t step = 0; step < kSteps; ++step) {
      const int32_t computed = 8192 + step;
      for (auto& tables : residents) {
        if (!cache.ConsumeInPlace(tables, 1, computed)) {
          cache.Admit(neutral, tables, one, testing::Frontier(computed), uint64_t{1});
        }
      }
    }
  });
  for (auto& tables : residents) cache.Free(tables);
}

void BenchmarkPressure() {
  constexpr int32_t kPages = 128;
  constexpr int32_t kPrompts = 400;
  const std::vector<CacheGroupSpec> specs = {Full(64, 6), Window(1024, 64, 6)};
  CacheCoordinator cache(kPrefixGranularity, 2 * kPages * kPrompts / 6, specs);
  const std::vector<TokenDemand> demands(specs.size(), Dense(kPages * kPrefixGranularity));
  const auto serve = [&](int32_t prompt) {
    const auto hashes = testing::Hashes(prompt, kPages);
    auto tables = cache.MakeTables();
    const auto admitted = cache.Admit(cache.ProbePrefix({}), tables, demands, {});
    cache.CacheFullBlocks(tables, hashes, admitted->access_epoch, 0, BoundaryKind::kEndpoint);
    cache.Free(tables);
  };
  for (int32_t prompt = 0; prompt < kPrompts; ++prompt) serve(prompt);
  Report("admit and publish a prompt of 8192 into a full cache", 100, [&] {
    for (int32_t prompt = 0; prompt < 100; ++prompt) serve(kPrompts + prompt);
  });
  const auto hashes = testing::Hashes(kPrompts, kPages);
  int32_t hit = 0;
  Report("probe a cached prompt of 8192, per page", int64_t{100} * kPages, [&] {
    for (int i = 0; i < 100; ++i) hit += cache.ProbePrefix(hashes).device_prefix_tokens();
  });
  const std::vector<TokenDemand> too_much(specs.size(), Dense(10 * kPages * kPrompts * kPrefixGranularity));
  Report("refuse an admission that cannot fit, full scan", 5, [&] {
    for (int i = 0; i < 5; ++i) {
      auto tables = cache.MakeTables();
      cache.Admit(cache.ProbePrefix({}), tables, too_much, {});
    }
  });
}

}  // namespace
}  // namespace tokenspeed

int main() {
  tokenspeed::BenchmarkPool();
  tokenspeed::BenchmarkHashing();
  tokenspeed::BenchmarkDecode();
  tokenspeed::BenchmarkPressure();
}
