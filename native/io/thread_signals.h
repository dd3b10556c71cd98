// The signals of threads of our own.
#pragma once

#include <signal.h>

namespace headrace::io {

// A worker answers no signal but the ones that its own instructions raise.
inline void block_signals() {
  sigset_t all;
  sigfillset(&all);
  for (const int synchronous : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) {
    sigdelset(&all, synchronous);
  }
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace headrace::io
