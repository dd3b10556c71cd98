// Bytes of PDUs for tests: hexadecimal text, whole PDUs, and damage at one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/crc32c.h"
#include "fabric/pdu.h"

namespace headrace::testing {

using Bytes = std::vector<std::byte>;

// Hexadecimal digits; anything else is skipped.
inline Bytes from_hex(std::string_view text) {
  std::string digits;
  for (const char c : text) {
    if (std::isxdigit(static_cast<unsigned char>(c))) digits.push_back(c);
  }
  Bytes bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

template <class T>
Bytes bytes_of(const T& pdu) {
  const auto span = std::as_bytes(std::span(&pdu, 1));
  return {span.begin(), span.end()};
}

inline Bytes operator+(Bytes a, std::span<const std::byte> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Header, data, and the digest where there is one.
inline Bytes whole(const fabric::HeaderBytes& header, std::span<const std::byte> data,
                   const fabric::PduFormat& format) {
  Bytes bytes = Bytes() + std::span<const std::byte>(header) + data;
  if (format.ddgst && !data.empty()) bytes = bytes + fabric::data_digest(data);
  return bytes;
}

// A copy with one little-endian field changed. With `hdgst` the header digest is made right again.
template <class T>
Bytes with(Bytes bytes, size_t at, T value, bool hdgst = false) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
  const auto hlen = static_cast<size_t>(bytes[2]);
  if (hdgst && bytes.size() >= hlen + 4) {
    const uint32_t crc = crc32c({bytes.data(), hlen});
    std::memcpy(bytes.data() + hlen, &crc, 4);
  }
  return bytes;
}

inline Bytes pattern(size_t size, uint32_t seed = 1) {
  Bytes bytes(size);
  uint32_t x = seed * 2654435761u + 1;
  for (std::byte& b : bytes) {
    x = x * 1664525u + 1013904223u;
    b = static_cast<std::byte>(x >> 24);
  }
  return bytes;
}

}  // namespace headrace::testing
