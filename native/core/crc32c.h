// CRC-32C (Castagnoli), the checksum of every sample, section and page.
//
// Uses AVX-512 carry-less multiplication, SSE4.2 or the ARMv8 CRC extension where the processor has
// it, a table otherwise; the choice is made once. `crc32c_copy` computes while it copies: one pass
// over memory instead of two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace headrace {

// Continues from `crc` (the value of an earlier call, or 0).
uint32_t crc32c(uint32_t crc, const std::byte* data, size_t size);
inline uint32_t crc32c(std::span<const std::byte> data) {
  return crc32c(0, data.data(), data.size());
}

// Copies `size` bytes from `from` to `to` and returns the checksum of what was written.
uint32_t crc32c_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size);

// The ways of computing it, the fastest first and the table walk last. The first that the processor
// has is used; tests ask for the others: each must be right where a slower machine will choose it.
struct Crc32cPath {
  const char* name;   // "avx512", "sse4.2", "armv8" or "table"
  bool (*present)();  // whether this processor has it
  uint32_t (*read)(uint32_t crc, const std::byte* data, size_t size);
  uint32_t (*copy)(uint32_t crc, std::byte* to, const std::byte* from, size_t size);
};
std::span<const Crc32cPath> crc32c_paths();

// The name of the first.
const char* crc32c_implementation();

}  // namespace headrace
