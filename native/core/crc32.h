// CRC-32 as zip has it (IEEE 802.3), for files that are generated.
//
// Uses carry-less multiplication or the ARMv8 CRC extension where the processor has it, tables
// otherwise; the choice is made once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

// Continues from `crc` (the value of an earlier call, or 0).
uint32_t crc32(uint32_t crc, const std::byte* data, size_t size);

// The plain table walk: the reference that the fast paths are tested against.
uint32_t crc32_table(uint32_t crc, const std::byte* data, size_t size);

}  // namespace headrace
