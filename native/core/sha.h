// SHA-256 and SHA-1, for names of content and of hosts: small inputs, rarely. Nothing secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace headrace {

std::array<uint8_t, 32> sha256(std::span<const std::byte> data);
// For version 5 UUIDs alone, which are made with it.
std::array<uint8_t, 20> sha1(std::span<const std::byte> data);

// Lower-case hexadecimal digits.
std::string hex_of(std::span<const uint8_t> bytes);

}  // namespace headrace
