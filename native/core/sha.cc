#include "core/sha.h"

#include <bit>
#include <cstring>

namespace headrace {
namespace {

constexpr uint32_t kRounds256[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The message, a one bit, zeros, and the length in bits: both functions pad alike.
std::vector<uint8_t> padded(std::span<const std::byte> data) {
  std::vector<uint8_t> out((data.size() + 9 + 63) / 64 * 64);
  if (!data.empty()) std::memcpy(out.data(), data.data(), data.size());
  out[data.size()] = 0x80;
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (size_t i = 0; i < 8; ++i) out[out.size() - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  return out;
}

uint32_t word_of(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

template <size_t kWords>
std::array<uint8_t, kWords * 4> bytes_of(const std::array<uint32_t, kWords>& words) {
  std::array<uint8_t, kWords * 4> out;
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<uint8_t>(words[i / 4] >> (24 - 8 * (i % 4)));
  }
  return out;
}

void block256(const uint8_t* block, std::array<uint32_t, 8>* state) {
  uint32_t w[64];
  for (size_t i = 0; i < 16; ++i) w[i] = word_of(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  std::array<uint32_t, 8> s = *state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t mixed = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
    const uint32_t t = s[7] + mixed + ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRounds256[i] + w[i];
    const uint32_t u = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                       ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    s = {t + u, s[0], s[1], s[2], s[3] + t, s[4], s[5], s[6]};
  }
  for (size_t i = 0; i < 8; ++i) (*state)[i] += s[i];
}

void block1(const uint8_t* block, std::array<uint32_t, 5>* state) {
  uint32_t w[80];
  for (size_t i = 0; i < 16; ++i) w[i] = word_of(block + 4 * i);
  for (size_t i = 16; i < 80; ++i) w[i] = std::rotl(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
  std::array<uint32_t, 5> s = *state;
  for (size_t i = 0; i < 80; ++i) {
    const uint32_t f = i < 20 ? ((s[1] & s[2]) | (~s[1] & s[3])) + 0x5a827999
                       : i >= 40 && i < 60
                           ? ((s[1] & s[2]) | (s[1] & s[3]) | (s[2] & s[3])) + 0x8f1bbcdc
                           : (s[1] ^ s[2] ^ s[3]) + (i < 40 ? 0x6ed9eba1 : 0xca62c1d6);
    s = {std::rotl(s[0], 5) + f + s[4] + w[i], s[0], std::rotl(s[1], 30), s[2], s[3]};
  }
  for (size_t i = 0; i < 5; ++i) (*state)[i] += s[i];
}

}  // namespace

std::array<uint8_t, 32> sha256(std::span<const std::byte> data) {
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const std::vector<uint8_t> message = padded(data);
  for (size_t at = 0; at < message.size(); at += 64) block256(message.data() + at, &state);
  return bytes_of(state);
}

std::array<uint8_t, 20> sha1(std::span<const std::byte> data) {
  std::array<uint32_t, 5> state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
  const std::vector<uint8_t> message = padded(data);
  for (size_t at = 0; at < message.size(); at += 64) block1(message.data() + at, &state);
  return bytes_of(state);
}

std::string hex_of(std::span<const uint8_t> bytes) {
  std::string out;
  for (const uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

}  // namespace headrace
