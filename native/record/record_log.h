// The log of this process: found by HEADRACE_RECORD in the environment, made at the first call that
// is worth a slot, left behind after fork and made anew in the child.
//
// Works in threads, in signal handlers and in a child of vfork (which logs nothing: its memory is
// the parent's). A slot that cannot be had at once is counted as lost: the program never waits for
// its log.
#pragma once

#include <cstdint>

#include "record/log_layout.h"

namespace headrace::record {

struct Call {
  Kind kind;
  int fd = -1;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t offset = -1;
  int64_t nbytes = 0;
  uint8_t flags = 0;
  const char* text = nullptr;
};

// Whether anything is to be logged at all.
bool recording();
// False in a child of vfork, whose parent's memory this is.
bool is_own_process();
int64_t now_ns();
// errno is not touched.
void add(const Call& call);
void add_blind();

}  // namespace headrace::record
