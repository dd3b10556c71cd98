#include "core/crc32c.h"

#include <doctest/doctest.h>

#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

using headrace::crc32c;

namespace {
std::vector<std::byte> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// What the kernel says that every processor has, between spaces.
std::string processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) return line + " ";
  }
  return " ";
}
}  // namespace

TEST_CASE("the standard's test vectors") {  // RFC 3720, B.4
  std::vector<std::byte> zeros(32, std::byte{0});
  CHECK(crc32c(zeros) == 0x8a9136aa);
  std::vector<std::byte> ones(32, std::byte{0xff});
  CHECK(crc32c(ones) == 0x62a8ab43);
  const char* digits = "123456789";
  CHECK(crc32c(0, reinterpret_cast<const std::byte*>(digits), 9) == 0xe3069283);
}

TEST_CASE("the fastest that the processor has is chosen, and each slower one is there too") {
  const std::string flags = processor_flags();
  std::vector<std::string> expected;
#if defined(__x86_64__)
  const auto has = [&](const char* flag) {
    return flags.find(std::string(" ") + flag + " ") != std::string::npos;
  };
  if (has("sse4_2")) {
    if (has("avx512f") && has("avx512bw") && has("vpclmulqdq")) expected.push_back("avx512");
    expected.push_back("sse4.2");
  }
#elif defined(__aarch64__)
  if (flags.find(" crc32 ") != std::string::npos) expected.push_back("armv8");
#endif
  expected.push_back("table");
  std::vector<std::string> names;
  for (const auto& path : headrace::crc32c_paths()) {
    if (path.present()) names.push_back(path.name);
  }
  CHECK(names == expected);
  CHECK(headrace::crc32c_implementation() == expected.front());
}

TEST_CASE("every implementation equals the table walk, at every size and alignment") {
  const auto bytes = random_bytes(20000, 1);
  const auto& table = headrace::crc32c_paths().back();
  for (const auto& path : headrace::crc32c_paths()) {
    if (!path.present()) continue;
    CAPTURE(path.name);
    std::vector<std::byte> to(bytes.size());
    for (size_t size = 0; size < 3000; size += (size < 1100 ? 1 : 37)) {
      for (const size_t start : {0, 1, 7, 63}) {
        const uint32_t expected = table.read(5, bytes.data() + start, size);
        REQUIRE(path.read(5, bytes.data() + start, size) == expected);
        std::fill_n(to.begin(), size + 1, std::byte{0xab});
        REQUIRE(path.copy(5, to.data(), bytes.data() + start, size) == expected);
        REQUIRE(std::memcmp(to.data(), bytes.data() + start, size) == 0);
        REQUIRE(to[size] == std::byte{0xab});
      }
    }
    REQUIRE(path.read(0, bytes.data(), bytes.size()) == table.read(0, bytes.data(), bytes.size()));
  }
}

TEST_CASE("a checksum can be continued") {
  const auto bytes = random_bytes(5000, 2);
  for (const size_t cut : {0, 1, 255, 256, 4999, 5000}) {
    CHECK(crc32c(crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut) ==
          crc32c(bytes));
  }
}

TEST_CASE("copying writes exactly the bytes and the same checksum") {
  const auto bytes = random_bytes(50000, 3);
  for (const size_t size : {0, 1, 8, 63, 64, 255, 256, 257, 1000, 8191, 40000}) {
    std::vector<std::byte> to(size + 16, std::byte{0xab});
    CHECK(headrace::crc32c_copy(9, to.data() + 8, bytes.data() + 3, size) ==
          crc32c(9, bytes.data() + 3, size));
    CHECK(std::memcmp(to.data() + 8, bytes.data() + 3, size) == 0);
    for (size_t i = 0; i < 8; ++i) {
      CHECK(to[i] == std::byte{0xab});
      CHECK(to[size + 8 + i] == std::byte{0xab});
    }
  }
}

TEST_CASE("large copies to a cache line, which are streamed, are right too") {
  const auto bytes = random_bytes(200000, 4);
  std::vector<std::byte> memory(200000 + 64);
  const size_t shift = 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  for (const size_t size : {32768, 32769, 100001, 199000}) {
    CHECK(headrace::crc32c_copy(0, memory.data() + shift, bytes.data() + 5, size) ==
          crc32c(0, bytes.data() + 5, size));
    CHECK(std::memcmp(memory.data() + shift, bytes.data() + 5, size) == 0);
  }
}
