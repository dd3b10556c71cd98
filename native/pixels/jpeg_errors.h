// JpegErrors: what libjpeg finds wrong with a file, for whoever decodes or rewrites one.
#pragma once

#include <csetjmp>
#include <cstdio>

// Their headers need those above.
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

namespace headrace::pixels {

struct JpegErrors {
  jpeg_error_mgr base;            // first: libjpeg knows no more
  std::jmp_buf escape;            // where errors jump to
  bool damaged, warned;           // libjpeg goes on after damage, with grey or repeated pixels
  char message[JMSG_LENGTH_MAX];  // of the first damage or error; or empty
  jpeg_progress_mgr progress;

  // Sets all up; returns what libjpeg takes.
  jpeg_error_mgr* init();
  void clear() { damaged = warned = false, message[0] = 0; }
  // Jumps; what was found before stays the message.
  [[noreturn]] static void give_up(j_common_ptr common);
};

}  // namespace headrace::pixels
