#include "core/crc32.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using headrace::crc32;

TEST_CASE("the polynomial's check value") {
  const auto* digits = reinterpret_cast<const std::byte*>("123456789");
  CHECK(crc32(0, digits, 9) == 0xcbf43926);
}

TEST_CASE("the fast path equals the table walk, at every size and alignment") {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(70'000);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  for (size_t size = 0; size < 3000; size += (size < 300 ? 1 : 37)) {
    for (const size_t start : {0, 1, 7, 63}) {
      REQUIRE(crc32(5, bytes.data() + start, size) ==
              headrace::crc32_table(5, bytes.data() + start, size));
    }
  }
  REQUIRE(crc32(0, bytes.data(), bytes.size()) ==
          headrace::crc32_table(0, bytes.data(), bytes.size()));
}

TEST_CASE("pieces continue") {
  std::vector<std::byte> bytes(1000, std::byte{0x5a});
  const uint32_t whole = crc32(0, bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 63, 64, 500, 1000}) {
    CHECK(crc32(crc32(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut) == whole);
  }
}
