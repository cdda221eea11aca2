// Fuzz target: any string of bytes is a cache workload that must keep all invariants.
//
// With clang: -fsanitize=fuzzer,address,undefined. With any compiler: together with fuzz_driver.cpp.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "tests/cache_workload.h"
#include "tests/testing.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  tokenspeed::testing::CacheWorkload({data, size}).Run();
  if (tokenspeed::testing::FailureCount() > 0) std::abort();
  return 0;
}
