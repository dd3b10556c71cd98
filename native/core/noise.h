// Noise: bytes for generated files that no disk can compress or deduplicate, at memory speed.
//
// A pool of random words is XORed with a 64-bit key for each block of each file. A byte is a pure
// function of the pool, the file's key and its position; no two blocks are alike. The pool stays in
// a core's cache, so that a byte costs one store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

class Noise {
 public:
  // Of the pool, and of what one key covers: fits into a core's L2 cache.
  static constexpr size_t kBlockBytes = 1 << 20;

  // REQUIRES kBlockBytes / 8 words.
  explicit Noise(std::span<const uint64_t> words);

  // The bytes of the file `key` from `position` on.
  void fill(uint64_t key, uint64_t position, std::span<std::byte> out) const;

 private:
  std::vector<std::byte> pool_;
};

}  // namespace headrace
