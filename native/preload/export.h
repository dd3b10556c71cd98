// How a preloaded library defines what other programs find under a symbol of the C library's.
#pragma once

// By a name of ours and the symbol's as its label: the C library's headers declare theirs with
// other types, as macros or as builtins.
#define HEADRACE_EXPORT(result, symbol, ...)                                               \
  __attribute__((visibility("default"))) extern result shim_##symbol(__VA_ARGS__) __asm__( \
      #symbol);                                                                            \
  result shim_##symbol(__VA_ARGS__)
