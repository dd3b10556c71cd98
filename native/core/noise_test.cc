#include "core/noise.h"

#include <doctest/doctest.h>

#include <random>
#include <set>
#include <vector>

using headrace::Noise;

namespace {

Noise noise_of(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(Noise::kBlockBytes / 8);
  for (auto& word : words) word = random();
  return Noise(words);
}

std::vector<std::byte> bytes_of(const Noise& noise, uint64_t key, uint64_t position, size_t size) {
  std::vector<std::byte> out(size);
  noise.fill(key, position, out);
  return out;
}

}  // namespace

TEST_CASE("a byte depends on key and position alone, wherever a piece begins and ends") {
  const Noise noise = noise_of(1);
  const auto whole = bytes_of(noise, 7, 0, Noise::kBlockBytes + 5000);
  for (const size_t start : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, Noise::kBlockBytes - 3}) {
    for (const size_t size : {0, 1, 7, 8, 9, 63, 4097}) {
      const auto piece = bytes_of(noise, 7, start, size);
      CHECK(std::equal(piece.begin(), piece.end(), whole.begin() + static_cast<long>(start)));
    }
  }
}

TEST_CASE("no block of a file is another's") {
  const Noise noise = noise_of(2);
  std::set<std::vector<std::byte>> seen;
  for (const uint64_t key : {0x123456789abcdef0u, 0x0fedcba987654321u, 0x5555555555555555u}) {
    for (uint64_t block = 0; block < 4; ++block) {
      seen.insert(bytes_of(noise, key, block * Noise::kBlockBytes, 64));
    }
  }
  CHECK(seen.size() == 12);
}
