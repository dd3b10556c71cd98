// Column: unsigned integers of 1 to 8 bytes each, read in place from a checked file.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/checked_file.h"

namespace headrace {

// The low `width` bytes of the eight at `p`. The format pads columns, so the load stays inside.
inline uint64_t load_uint(const std::byte* p, unsigned width) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return width == 8 ? value : value & ((uint64_t{1} << (8 * width)) - 1);
}

struct Column {
  const CheckedFile* file = nullptr;
  uint64_t offset = 0;
  uint64_t count = 0;
  unsigned width = 0;

  explicit operator bool() const { return file != nullptr; }
  // REQUIRES: i < count.
  uint64_t operator[](uint64_t i) const {
    return load_uint(file->at(offset + i * width, 8), width);
  }
  void prefetch(uint64_t i) const { __builtin_prefetch(file->data() + offset + i * width); }
};

}  // namespace headrace
