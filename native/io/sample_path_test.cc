#include "io/sample_path.h"

#include <doctest/doctest.h>

using headrace::io::stays_below;
using namespace std::string_view_literals;

TEST_CASE("ordinary names stay below their tree") {
  for (const auto name : {"a"sv, "a/b.png"sv, ".hidden"sv, "..a/b"sv, "a../b.."sv, "a//b"sv}) {
    CHECK(stays_below(name));
  }
}

TEST_CASE("names that lead elsewhere are refused") {
  for (const auto name :
       {""sv, "/etc/passwd"sv, ".."sv, "../a"sv, "a/../b"sv, "a/.."sv, "a\0b"sv}) {
    CHECK_FALSE(stays_below(name));
  }
}
