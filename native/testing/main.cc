// The tests' main function, and doctest itself: compiled once for all of them.

#define DOCTEST_CONFIG_IMPLEMENT  // as doctest's first half was read already, precompiled
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
