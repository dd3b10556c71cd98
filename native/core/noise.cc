#include "core/noise.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

namespace headrace {
namespace {

static_assert(std::endian::native == std::endian::little, "keys are laid over bytes, lowest first");

// SplitMix64's finalizer: a bijection of 64-bit numbers that leaves no pattern.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
  value = (value ^ value >> 27) * 0x94d049bb133111eb;
  return value ^ value >> 31;
}

void xor_words(std::byte* out, const std::byte* from, size_t words, uint64_t key) {
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, sizeof word);
    word ^= key;
    std::memcpy(out + 8 * i, &word, sizeof word);
  }
}

}  // namespace

Noise::Noise(std::span<const uint64_t> words) : pool_(kBlockBytes) {
  assert(words.size_bytes() == kBlockBytes);
  std::memcpy(pool_.data(), words.data(), kBlockBytes);
}

void Noise::fill(uint64_t key, uint64_t position, std::span<std::byte> out) const {
  while (!out.empty()) {
    const size_t at = position % kBlockBytes;
    const size_t piece = std::min(out.size(), kBlockBytes - at);
    const uint64_t block = mix(key ^ position / kBlockBytes);
    const uint64_t turned = std::rotr(block, static_cast<int>(8 * (position % 8)));
    xor_words(out.data(), pool_.data() + at, piece / 8, turned);
    for (size_t i = piece / 8 * 8; i < piece; ++i) {
      out[i] = pool_[at + i] ^ static_cast<std::byte>(turned >> (8 * (i % 8)));
    }
    out = out.subspan(piece);
    position += piece;
  }
}

}  // namespace headrace
