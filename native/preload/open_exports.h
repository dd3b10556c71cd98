// The open family under all of its names. Whoever includes this, once, at the end of a source, says
// what they do:
//   int open_at(int folder, const char* path, int flags, mode_t mode)
//   FILE* open_stream(const char* path, const char* mode)
//   FILE* reopen_stream(const char* path, const char* mode, FILE* stream)
#pragma once

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/types.h>

#include "preload/export.h"

#define HEADRACE_MODE(flags)                                        \
  mode_t mode = 0;                                                  \
  if (((flags)&O_CREAT) != 0 || ((flags)&O_TMPFILE) == O_TMPFILE) { \
    va_list arguments;                                              \
    va_start(arguments, flags);                                     \
    mode = static_cast<mode_t>(va_arg(arguments, unsigned));        \
    va_end(arguments);                                              \
  }

#define HEADRACE_OPEN(symbol)                                      \
  HEADRACE_EXPORT(int, symbol, const char* path, int flags, ...) { \
    HEADRACE_MODE(flags)                                           \
    return open_at(AT_FDCWD, path, flags, mode);                   \
  }
#define HEADRACE_OPENAT(symbol)                                                \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, int flags, ...) { \
    HEADRACE_MODE(flags)                                                       \
    return open_at(folder, path, flags, mode);                                 \
  }
// What _FORTIFY_SOURCE makes of opens without a mode.
#define HEADRACE_OPEN_2(symbol)                               \
  HEADRACE_EXPORT(int, symbol, const char* path, int flags) { \
    return open_at(AT_FDCWD, path, flags, 0);                 \
  }
#define HEADRACE_OPENAT_2(symbol)                                         \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, int flags) { \
    return open_at(folder, path, flags, 0);                               \
  }
#define HEADRACE_CREAT(symbol)                                          \
  HEADRACE_EXPORT(int, symbol, const char* path, mode_t mode) {         \
    return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); \
  }
#define HEADRACE_FOPEN(symbol)                                         \
  HEADRACE_EXPORT(FILE*, symbol, const char* path, const char* mode) { \
    return open_stream(path, mode);                                    \
  }
#define HEADRACE_FREOPEN(symbol)                                                     \
  HEADRACE_EXPORT(FILE*, symbol, const char* path, const char* mode, FILE* stream) { \
    return reopen_stream(path, mode, stream);                                        \
  }

HEADRACE_OPEN(open)
HEADRACE_OPEN(open64)
HEADRACE_OPEN(__open)
HEADRACE_OPEN(__open64)
HEADRACE_OPENAT(openat)
HEADRACE_OPENAT(openat64)
HEADRACE_OPEN_2(__open_2)
HEADRACE_OPEN_2(__open64_2)
HEADRACE_OPENAT_2(__openat_2)
HEADRACE_OPENAT_2(__openat64_2)
HEADRACE_CREAT(creat)
HEADRACE_CREAT(creat64)
HEADRACE_FOPEN(fopen)
HEADRACE_FOPEN(fopen64)
HEADRACE_FOPEN(_IO_fopen)
HEADRACE_FREOPEN(freopen)
HEADRACE_FREOPEN(freopen64)
