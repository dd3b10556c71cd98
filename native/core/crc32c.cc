#include "core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected 0x1edc6f41, RFC 3720

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}
constexpr auto kTable = make_table();

// Appending zero bytes to a message is linear in the CRC over GF(2). `Shift` holds that linear map
// for one fixed number of bytes as four tables of 256, so that three independent streams can be
// joined: the crc instruction has a latency of three cycles and a throughput of one.
struct Shift {
  std::array<std::array<uint32_t, 256>, 4> table{};
  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^
           table[3][crc >> 24];
  }
};

constexpr uint32_t multiply(const std::array<uint32_t, 32>& matrix, uint32_t vector) {
  uint32_t sum = 0;
  for (int i = 0; vector != 0; vector >>= 1, ++i) {
    if (vector & 1) sum ^= matrix[i];
  }
  return sum;
}

constexpr Shift make_shift(size_t bytes) {
  std::array<uint32_t, 32> step{};  // one zero bit
  step[0] = kPolynomial;
  for (int i = 1; i < 32; ++i) step[i] = 1u << (i - 1);
  std::array<uint32_t, 32> total{};  // identity
  for (int i = 0; i < 32; ++i) total[i] = 1u << i;
  for (size_t bits = bytes * 8; bits != 0; bits >>= 1) {
    if (bits & 1) {
      std::array<uint32_t, 32> next{};
      for (int i = 0; i < 32; ++i) next[i] = multiply(step, total[i]);
      total = next;
    }
    std::array<uint32_t, 32> square{};
    for (int i = 0; i < 32; ++i) square[i] = multiply(step, step[i]);
    step = square;
  }
  Shift shift;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int k = 0; k < 4; ++k) shift.table[k][byte] = multiply(total, byte << (8 * k));
  }
  return shift;
}

// Long stripes amortise the join; short ones serve samples of a few hundred bytes.
constexpr size_t kLongBytes = 2048;
constexpr size_t kShortBytes = 128;
const Shift kLongShift = make_shift(kLongBytes);
const Shift kShortShift = make_shift(kShortBytes);

uint64_t load(const std::byte* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
void store(std::byte* p, uint64_t value) { std::memcpy(p, &value, sizeof value); }

#if defined(__x86_64__)
#define HEADRACE_CRC_TARGET __attribute__((target("sse4.2")))
HEADRACE_CRC_TARGET inline uint64_t crc_word(uint64_t crc, uint64_t word) {
  return _mm_crc32_u64(crc, word);
}
HEADRACE_CRC_TARGET inline uint32_t crc_byte(uint32_t crc, uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}
bool have_hardware() { return __builtin_cpu_supports("sse4.2") != 0; }
constexpr const char* kHardware = "sse4.2";
#elif defined(__aarch64__)
#define HEADRACE_CRC_TARGET __attribute__((target("+crc")))
HEADRACE_CRC_TARGET inline uint64_t crc_word(uint64_t crc, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}
HEADRACE_CRC_TARGET inline uint32_t crc_byte(uint32_t crc, uint8_t byte) {
  return __crc32cb(crc, byte);
}
bool have_hardware() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char* kHardware = "armv8";
#else
#define HEADRACE_CRC_TARGET
inline uint64_t crc_word(uint64_t crc, uint64_t) { return crc; }
inline uint32_t crc_byte(uint32_t crc, uint8_t) { return crc; }
bool have_hardware() { return false; }
constexpr const char* kHardware = "table";
#endif

// Three stripes of `kStripe` bytes side by side, then joined. Copy is a compile-time choice so that
// the plain checksum has no store in its loop.
template <bool kCopy, size_t kStripe>
HEADRACE_CRC_TARGET inline uint32_t stripes(uint32_t crc, std::byte*& to, const std::byte*& from,
                                            size_t& size, const Shift& shift) {
  while (size >= 3 * kStripe) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStripe; i += 8) {
      const uint64_t x = load(from + i);
      const uint64_t y = load(from + kStripe + i);
      const uint64_t z = load(from + 2 * kStripe + i);
      a = crc_word(a, x);
      b = crc_word(b, y);
      c = crc_word(c, z);
      if constexpr (kCopy) {
        store(to + i, x);
        store(to + kStripe + i, y);
        store(to + 2 * kStripe + i, z);
      }
    }
    crc = shift(shift(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^
          static_cast<uint32_t>(c);
    from += 3 * kStripe;
    if constexpr (kCopy) to += 3 * kStripe;
    size -= 3 * kStripe;
  }
  return crc;
}

template <bool kCopy>
HEADRACE_CRC_TARGET uint32_t hardware(uint32_t crc, std::byte* to, const std::byte* from,
                                      size_t size) {
  crc = ~crc;
  crc = stripes<kCopy, kLongBytes>(crc, to, from, size, kLongShift);
  crc = stripes<kCopy, kShortBytes>(crc, to, from, size, kShortShift);
  for (; size >= 8; size -= 8, from += 8) {
    const uint64_t word = load(from);
    crc = static_cast<uint32_t>(crc_word(crc, word));
    if constexpr (kCopy) {
      store(to, word);
      to += 8;
    }
  }
  for (; size != 0; --size, ++from) {
    crc = crc_byte(crc, static_cast<uint8_t>(*from));
    if constexpr (kCopy) *to++ = *from;
  }
  return ~crc;
}

const bool kHaveHardware = have_hardware();

}  // namespace

uint32_t crc32c_table(uint32_t crc, const std::byte* data, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) {
    crc = kTable[(crc ^ static_cast<uint32_t>(data[i])) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const std::byte* data, size_t size) {
  if (kHaveHardware) return hardware<false>(crc, nullptr, data, size);
  return crc32c_table(crc, data, size);
}

uint32_t crc32c_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  if (kHaveHardware) return hardware<true>(crc, to, from, size);
  std::memcpy(to, from, size);
  return crc32c_table(crc, to, size);
}

const char* crc32c_implementation() { return kHaveHardware ? kHardware : "table"; }

}  // namespace headrace
