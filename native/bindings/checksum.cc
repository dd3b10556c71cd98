// Checksum bindings: whole buffers and the page checksums of a directory, the GIL free meanwhile.
#include "bindings/checksum.h"

#include <nanobind/ndarray.h>

#include <vector>

#include "bindings/gil.h"
#include "core/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

uint32_t checksum(const Bytes& data, uint32_t value) {
  return crc32c(value, reinterpret_cast<const std::byte*>(data.data()), data.size());
}

// One checksum per `block_bytes` of `data`; the last block may be short.
nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>> checksum_blocks(const Bytes& data,
                                                              uint64_t block_bytes) {
  if (block_bytes == 0) throw nb::value_error("block_bytes is 0, expected at least 1");
  const size_t count = (data.size() + block_bytes - 1) / block_bytes;
  auto* values = new uint32_t[count];
  {
    const WithoutGil released;
    const auto* begin = reinterpret_cast<const std::byte*>(data.data());
    for (size_t i = 0; i < count; ++i) {
      const size_t start = i * block_bytes;
      values[i] = crc32c(0, begin + start, std::min<size_t>(block_bytes, data.size() - start));
    }
  }
  nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<uint32_t*>(p); });
  return {values, {count}, owner};
}

}  // namespace

void register_checksum(nb::module_& m) {
  m.def("crc32c", &checksum, "data"_a, "value"_a = 0, nb::call_guard<WithoutGil>(),
        "CRC-32C of a one-dimensional uint8 array, continued from `value`.");
  m.def("crc32c_blocks", &checksum_blocks, "data"_a, "block_bytes"_a,
        "CRC-32C of each block of `block_bytes` bytes; the last block may be short.");
  m.attr("crc32c_implementation") = crc32c_implementation();
}

}  // namespace headrace::bindings
