// Copies of every size and alignment are copies.
#include "core/copy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

using namespace headrace;

TEST_CASE("what is copied for later is what was there, and nothing beside it") {
  std::mt19937 random(1);
  std::vector<std::byte> from(200'000);
  for (std::byte& b : from) b = static_cast<std::byte>(random());
  constexpr std::byte kUntouched{0xA5};
  for (const size_t size : {0, 1, 63, 64, 4095, 32'767, 32'768, 32'769, 36'864, 40'960, 40'961,
                            65'536, 110'007, 131'072}) {
    for (const size_t source : {0, 1, 24, 64}) {
      for (const size_t target : {0, 1, 16, 64}) {
        std::vector<std::byte> memory(size + 256, kUntouched);
        const auto address = reinterpret_cast<uintptr_t>(memory.data());
        std::byte* to = memory.data() + (64 - address % 64) % 64 + target;
        copy_for_later(to, from.data() + source, size);
        copies_done();
        CHECK(std::equal(to, to + size, from.data() + source));
        CHECK(std::all_of(memory.data(), to, [](std::byte b) { return b == kUntouched; }));
        CHECK(std::all_of(to + size, memory.data() + memory.size(),
                          [](std::byte b) { return b == kUntouched; }));
      }
    }
  }
}
