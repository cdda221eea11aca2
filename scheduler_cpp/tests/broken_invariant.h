// EXPECT_FATAL: runs its statement in a child process and expects it to break an invariant, whichever way the build
// reports that. GoogleTest's own death tests see only those that abort.

#ifndef TOKENSPEED_TESTS_BROKEN_INVARIANT_H_
#define TOKENSPEED_TESTS_BROKEN_INVARIANT_H_

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>

#include "core/check.h"

namespace tokenspeed::testing {

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

}  // namespace tokenspeed::testing

#define EXPECT_FATAL(...) EXPECT_TRUE(::tokenspeed::testing::BreaksInvariant([&] { __VA_ARGS__; }))

#endif  // TOKENSPEED_TESTS_BROKEN_INVARIANT_H_
