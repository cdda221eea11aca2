// Fuzz target: any string of bytes is a cache workload that must keep all invariants.
//
// With clang: -fsanitize=fuzzer,address,undefined. With any compiler: together with fuzz_driver.cpp.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "tests/cache_workload.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  ::testing::GTEST_FLAG(throw_on_failure) = true;  // nobody catches it, so a failed expectation ends the program
  tokenspeed::testing::CacheWorkload({data, size}).Run();
  return 0;
}
