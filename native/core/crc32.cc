#include "core/crc32.h"

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

constexpr uint32_t kPolynomial = 0xedb88320;  // reflected 0x04c11db7

// Table k takes a byte over k more bytes of message: eight bytes are looked up at a time.
constexpr size_t kSlices = 8;
constexpr std::array<std::array<uint32_t, 256>, kSlices> make_tables() {
  std::array<std::array<uint32_t, 256>, kSlices> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][i] = crc;
  }
  for (size_t k = 1; k < kSlices; ++k) {
    for (size_t i = 0; i < 256; ++i) {
      const uint32_t before = tables[k - 1][i];
      tables[k][i] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}
constexpr auto kTables = make_tables();

uint32_t walk(uint32_t state, const std::byte* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    state = kTables[0][(state ^ static_cast<uint32_t>(data[i])) & 0xff] ^ (state >> 8);
  }
  return state;
}

[[maybe_unused]] uint32_t sliced(uint32_t state, const std::byte* data, size_t size) {
  for (; size >= kSlices; size -= kSlices, data += kSlices) {
    uint32_t next = 0;
    for (size_t k = 0; k < kSlices; ++k) {
      uint32_t byte = static_cast<uint32_t>(data[k]);
      if (k < 4) byte ^= state >> (8 * k) & 0xff;
      next ^= kTables[kSlices - 1 - k][byte];
    }
    state = next;
  }
  return walk(state, data, size);
}

#if defined(__x86_64__)

// Folds 64 bytes a step in four registers. Method: Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009, with reflected bits; as core/crc32c.cc.
#define HEADRACE_ZIP_TARGET __attribute__((target("pclmul,sse4.1")))

// x^exponent mod P, bits reflected, shifted left once as the reflected product needs.
constexpr uint64_t fold_constant(unsigned exponent) {
  uint32_t value = 0x80000000;  // x^0, reflected
  for (unsigned i = 0; i < exponent; ++i) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
  return uint64_t{value} << 1;
}

// Moves a 128-bit remainder over `kBits` bits of message: lo * x^(D+32) + hi * x^(D-32).
template <unsigned kBits>
HEADRACE_ZIP_TARGET inline __m128i fold(__m128i state, __m128i data) {
  constexpr uint64_t kLow = fold_constant(kBits + 32), kHigh = fold_constant(kBits - 32);
  const __m128i k = _mm_set_epi64x(static_cast<int64_t>(kHigh), static_cast<int64_t>(kLow));
  const __m128i low = _mm_clmulepi64_si128(state, k, 0x00);
  const __m128i high = _mm_clmulepi64_si128(state, k, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

HEADRACE_ZIP_TARGET inline __m128i load(const std::byte* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

constexpr size_t kFoldBytesMin = 64;

HEADRACE_ZIP_TARGET uint32_t fast(uint32_t state, const std::byte* data, size_t size) {
  if (size < kFoldBytesMin) return sliced(state, data, size);
  // The checksum so far enters the message's first four bytes.
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  data += 64;
  size -= 64;
  for (; size >= 64; size -= 64, data += 64) {
    a = fold<512>(a, load(data));
    b = fold<512>(b, load(data + 16));
    c = fold<512>(c, load(data + 32));
    d = fold<512>(d, load(data + 48));
  }
  a = fold<128>(fold<128>(fold<128>(a, b), c), d);
  for (; size >= 16; size -= 16, data += 16) a = fold<128>(a, load(data));
  // 16 bytes stand for the whole message.
  alignas(16) std::byte rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), a);
  return sliced(sliced(0, rest, sizeof rest), data, size);
}

bool have_fast() {
  return __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) uint32_t fast(uint32_t state, const std::byte* data, size_t size) {
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    state = __crc32d(state, word);
  }
  for (; size != 0; --size, ++data) state = __crc32b(state, static_cast<uint8_t>(*data));
  return state;
}

bool have_fast() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

#else

uint32_t fast(uint32_t state, const std::byte* data, size_t size) {
  return sliced(state, data, size);
}
bool have_fast() { return true; }

#endif

const bool kHaveFast = have_fast();

}  // namespace

uint32_t crc32_table(uint32_t crc, const std::byte* data, size_t size) {
  return ~walk(~crc, data, size);
}

uint32_t crc32(uint32_t crc, const std::byte* data, size_t size) {
  return ~(kHaveFast ? fast(~crc, data, size) : sliced(~crc, data, size));
}

}  // namespace headrace
