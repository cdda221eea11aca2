// Drives a fuzz target without libFuzzer: replays the files named, or generates `--runs` inputs from `--seed`.
//
//   call_sequence_fuzz --runs=10000 --seed=7
//   call_sequence_fuzz crash-0123abcd

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);

namespace {

bool ParseOption(std::string_view argument, std::string_view name, uint64_t& value) {
  if (!argument.starts_with(name)) return false;
  argument.remove_prefix(name.size());
  const char* end = argument.data() + argument.size();
  const auto [stop, error] = std::from_chars(argument.data(), end, value);
  return error == std::errc() && stop == end;
}

bool Replay(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    return false;
  }
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::size_t kLongestInput = 800;
  uint64_t runs = 0;
  uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (ParseOption(argv[i], "--runs=", runs) || ParseOption(argv[i], "--seed=", seed)) continue;
    if (!Replay(argv[i])) return 1;
  }
  for (uint64_t run = 0; run < runs; ++run) {
    std::mt19937_64 random(seed + run);
    std::vector<uint8_t> bytes(random() % kLongestInput);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%llu generated inputs passed\n", static_cast<unsigned long long>(runs));
  return 0;
}
