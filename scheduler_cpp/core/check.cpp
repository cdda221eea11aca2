#include "core/check.h"

#include <cstdio>
#include <cstdlib>
#include <limits>

namespace tokenspeed {
namespace {

std::string Describe(const char* file, int line, const char* condition, const std::string& message) {
  return std::string(file) + ":" + std::to_string(line) + ": broken invariant: " + message + " [" + condition + "]";
}

}  // namespace

void ReportBrokenInvariant(const char* file, int line, const char* condition, const std::string& message) {
#ifdef NDEBUG
  throw InternalError(Describe(file, line, condition, message));
#else
  AbortOnBrokenInvariant(file, line, condition, message);
#endif
}

void AbortOnBrokenInvariant(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s\n", Describe(file, line, condition, message).c_str());
  std::abort();
}

int32_t CheckedInt32(int64_t value) {
  TOKENSPEED_CHECK(value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
                   "a count does not fit 32 bits: " + std::to_string(value));
  return static_cast<int32_t>(value);
}

}  // namespace tokenspeed
