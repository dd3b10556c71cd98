// Runs a function in a forked child, for tests of signals and forks. A child that hangs is ended by
// SIGALRM, which the test then sees as the way it ended.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace headrace::testing {

struct ChildEnd {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
};

// The child's exit code is what `body` returns; it runs no destructors of the parent's objects.
template <class F>
ChildEnd in_child(F&& body, unsigned seconds_max = 10) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds_max);
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    _exit(code);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ChildEnd end;
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

}  // namespace headrace::testing
