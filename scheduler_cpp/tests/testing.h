// A test framework of one page: TEST bodies register themselves, EXPECT_* record failures, RunAllTests reports them.
//
// A failed expectation does not end its test; REQUIRE does. EXPECT_FATAL runs its statement in a child process and
// expects it to break an invariant, whichever way the build reports that. The executable returns the number of failed
// tests, at most 1.

#ifndef TOKENSPEED_TESTS_TESTING_H_
#define TOKENSPEED_TESTS_TESTING_H_

#include <sys/wait.h>
#include <unistd.h>

#include <concepts>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/check.h"

namespace tokenspeed::testing {

struct Test {
  std::string name;
  void (*body)();
};

inline std::vector<Test>& Registry() {
  static std::vector<Test> tests;
  return tests;
}

inline bool Register(const char* name, void (*body)()) {
  Registry().push_back({name, body});
  return true;
}

inline int& FailureCount() {
  static int failures = 0;
  return failures;
}

inline void Fail(const char* file, int line, const std::string& what) {
  ++FailureCount();
  std::cerr << file << ":" << line << ": " << what << "\n";
}

// Thrown by REQUIRE to leave a test that cannot go on.
struct Unmet : std::exception {};

template <typename T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

template <typename T>
void Print(std::ostream& out, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<int64_t>(value);
  } else if constexpr (sizeof(T) == 1 && std::integral<T>) {
    out << static_cast<int>(value);
  } else if constexpr (Printable<T>) {
    out << value;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) {
      Print(out, *value);
    } else {
      out << "nothing";
    }
  } else if constexpr (requires { value.begin(); }) {
    out << "[";
    const char* separator = "";
    for (const auto& item : value) {
      out << separator;
      Print(out, item);
      separator = ", ";
    }
    out << "]";
  } else {
    out << "(unprintable)";
  }
}

template <typename A, typename B>
void ExpectEqual(const A& actual, const B& expected, const char* text, const char* file, int line) {
  if (actual == expected) return;
  std::ostringstream what;
  what << text << ": got ";
  Print(what, actual);
  what << ", expected ";
  Print(what, expected);
  Fail(file, line, what.str());
}

inline bool BreaksInvariant(const std::function<void()>& statement) {
  constexpr int kThrew = 77;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::fclose(stderr);
    try {
      statement();
    } catch (const InternalError&) {
      _exit(kThrew);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) || (WIFEXITED(status) && WEXITSTATUS(status) == kThrew);
}

inline int RunAllTests() {
  int failed = 0;
  for (const Test& test : Registry()) {
    const int before = FailureCount();
    try {
      test.body();
    } catch (const Unmet&) {
    } catch (const std::exception& error) {
      Fail(__FILE__, __LINE__, std::string("unexpected exception: ") + error.what());
    }
    const bool passed = FailureCount() == before;
    failed += passed ? 0 : 1;
    std::cout << (passed ? "ok      " : "FAILED  ") << test.name << "\n";
  }
  std::cout << Registry().size() << " tests, " << failed << " failed\n";
  return failed > 0 ? 1 : 0;
}

}  // namespace tokenspeed::testing

#define TEST(name)                                                                              \
  static void Test_##name();                                                                    \
  static const bool registered_##name = ::tokenspeed::testing::Register(#name, &Test_##name);   \
  static void Test_##name()

#define EXPECT_TRUE(condition) \
  ((condition) ? void() : ::tokenspeed::testing::Fail(__FILE__, __LINE__, "expected: " #condition))
#define EXPECT_FALSE(condition) EXPECT_TRUE(!(condition))
#define EXPECT_EQ(actual, ...) \
  ::tokenspeed::testing::ExpectEqual(actual, __VA_ARGS__, #actual, __FILE__, __LINE__)
#define EXPECT_FATAL(...) EXPECT_TRUE(::tokenspeed::testing::BreaksInvariant([&] { __VA_ARGS__; }))
#define EXPECT_THROW(exception, ...)                                                                     \
  do {                                                                                                   \
    bool thrown = false;                                                                                 \
    try {                                                                                                \
      __VA_ARGS__;                                                                                       \
    } catch (const exception&) {                                                                         \
      thrown = true;                                                                                     \
    }                                                                                                    \
    if (!thrown) ::tokenspeed::testing::Fail(__FILE__, __LINE__, "expected " #exception " from " #__VA_ARGS__); \
  } while (false)
#define REQUIRE(condition)                                                             \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      ::tokenspeed::testing::Fail(__FILE__, __LINE__, "required: " #condition);        \
      throw ::tokenspeed::testing::Unmet();                                            \
    }                                                                                  \
  } while (false)

#define TOKENSPEED_TEST_MAIN() \
  int main() { return ::tokenspeed::testing::RunAllTests(); }

#endif  // TOKENSPEED_TESTS_TESTING_H_
