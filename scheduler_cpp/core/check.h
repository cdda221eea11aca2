// Broken-invariant reporting.
//
// Invariants:
// - A check guards a promise this library makes to itself. Input of a user is validated before it gets here, with
//   ordinary exceptions, so a failed check is always a defect of the program.
// - Debug builds (NDEBUG undefined) print the failure and abort. Release builds throw InternalError, so that a serving
//   process can report the defect. State is then unspecified: the scheduler must be discarded.
// - Destructors use TOKENSPEED_FATAL, which aborts in every build.
//
// Thread safety: stateless.

#ifndef TOKENSPEED_CORE_CHECK_H_
#define TOKENSPEED_CORE_CHECK_H_

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tokenspeed {

// Thrown by release builds in place of aborting. Never thrown for bad user input.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Reports a broken invariant: aborts in debug builds, throws InternalError in release builds.
[[noreturn]] void ReportBrokenInvariant(const char* file, int line, const char* condition, const std::string& message);

// Prints and aborts, in every build.
[[noreturn]] void AbortOnBrokenInvariant(const char* file, int line, const char* condition, const std::string& message);

// Narrows a 64-bit intermediate result; a value outside int32 is a broken invariant.
int32_t CheckedInt32(int64_t value);

}  // namespace tokenspeed

#define TOKENSPEED_CHECK(condition, message)                                          \
  do {                                                                                \
    if (!(condition)) [[unlikely]] {                                                  \
      ::tokenspeed::ReportBrokenInvariant(__FILE__, __LINE__, #condition, (message)); \
    }                                                                                 \
  } while (false)

#define TOKENSPEED_FATAL(condition, message)                                           \
  do {                                                                                 \
    if (!(condition)) [[unlikely]] {                                                   \
      ::tokenspeed::AbortOnBrokenInvariant(__FILE__, __LINE__, #condition, (message)); \
    }                                                                                  \
  } while (false)

#endif  // TOKENSPEED_CORE_CHECK_H_
