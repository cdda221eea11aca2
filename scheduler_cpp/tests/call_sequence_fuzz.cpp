// Fuzz target: any string of bytes is a sequence of right and wrong calls that a scheduler must survive unharmed.
//
// With clang: -fsanitize=fuzzer,address,undefined. With any compiler: together with fuzz_driver.cpp.

#include <cstddef>
#include <cstdint>

#include "tests/call_sequence.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  tokenspeed::testing::CallSequence({data, size}).Run();
  return 0;
}
