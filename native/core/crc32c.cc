#include "core/crc32c.h"

#include <algorithm>
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

#if defined(__x86_64__)

// Carry-less multiplication folds 256 bytes per step in four 512-bit registers: three to four times
// the speed of the crc instruction, and no join per stripe. Method: Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009, with reflected
// bits.
#define HEADRACE_FOLD_TARGET __attribute__((target("avx512f,avx512bw,vpclmulqdq,sse4.2")))

// x^exponent mod P, bits reflected, shifted left once as the reflected product needs.
constexpr uint64_t fold_constant(unsigned exponent) {
  uint32_t value = 0x80000000;  // x^0, reflected
  for (unsigned i = 0; i < exponent; ++i) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
  return uint64_t{value} << 1;
}

// Moves a 128-bit remainder over `kBits` bits of message: lo * x^(D+32) + hi * x^(D-32).
template <unsigned kBits>
struct Fold {
  static constexpr uint64_t kLow = fold_constant(kBits + 32);
  static constexpr uint64_t kHigh = fold_constant(kBits - 32);
};

template <unsigned kBits>
HEADRACE_FOLD_TARGET inline __m512i fold(__m512i state, __m512i data) {
  const __m512i k = _mm512_set4_epi64(
      static_cast<int64_t>(Fold<kBits>::kHigh), static_cast<int64_t>(Fold<kBits>::kLow),
      static_cast<int64_t>(Fold<kBits>::kHigh), static_cast<int64_t>(Fold<kBits>::kLow));
  const __m512i low = _mm512_clmulepi64_epi128(state, k, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(state, k, 0x11);
  return _mm512_ternarylogic_epi64(low, high, data, 0x96);  // three-way xor
}

// How the bytes are written while they are folded.
enum class Write { kNone, kCached, kStreamed };

template <Write kWrite>
HEADRACE_FOLD_TARGET inline __m512i take([[maybe_unused]] std::byte* to, const std::byte* from,
                                         size_t at = 0) {
  const __m512i data = _mm512_loadu_si512(from + at);
  if constexpr (kWrite == Write::kCached) _mm512_storeu_si512(to + at, data);
  if constexpr (kWrite == Write::kStreamed) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), data);
  }
  return data;
}

constexpr size_t kFoldBytesMin = 256;

// From this size on a copy is streamed past the caches: the destination is a batch of megabytes
// that would evict itself before it is used, and ordinary stores read every line before they write
// it. REQUIRES a destination at a cache line.
constexpr size_t kStreamBytesMin = 32 << 10;

// Bytes that a device has just written are in no cache: asking 2 KiB ahead reads them at 16 GB/s
// instead of 12. (A prefetch behind the end is ignored.)
HEADRACE_FOLD_TARGET inline void prefetch_ahead(const std::byte* from) {
  for (int line = 0; line < 256; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + 2048 + line, _MM_HINT_T0);
  }
}

template <Write kWrite>
HEADRACE_FOLD_TARGET uint32_t folding(uint32_t crc, std::byte* to, const std::byte* from,
                                      size_t size) {
  if (size < kFoldBytesMin) return hardware<kWrite != Write::kNone>(crc, to, from, size);
  const auto advance = [&](size_t bytes) {
    from += bytes;
    if constexpr (kWrite != Write::kNone) to += bytes;
    size -= bytes;
  };
  // The checksum so far enters the message's first four bytes.
  __m512i a = _mm512_xor_si512(take<kWrite>(to, from),
                               _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  __m512i b = take<kWrite>(to, from, 64);
  __m512i c = take<kWrite>(to, from, 128);
  __m512i d = take<kWrite>(to, from, 192);
  advance(256);
  while (size >= 256) {
    if constexpr (kWrite == Write::kNone) prefetch_ahead(from);
    a = fold<2048>(a, take<kWrite>(to, from));
    b = fold<2048>(b, take<kWrite>(to, from, 64));
    c = fold<2048>(c, take<kWrite>(to, from, 128));
    d = fold<2048>(d, take<kWrite>(to, from, 192));
    advance(256);
  }
  a = fold<512>(fold<512>(fold<512>(a, b), c), d);
  while (size >= 64) {
    a = fold<512>(a, take<kWrite>(to, from));
    advance(64);
  }
  // 64 bytes stand for the whole message; the crc instruction finishes them and the tail.
  alignas(64) std::byte rest[64];
  _mm512_store_si512(rest, a);
  uint64_t remainder = 0;
  for (int i = 0; i < 64; i += 8) remainder = crc_word(remainder, load(rest + i));
  return hardware<kWrite != Write::kNone>(~static_cast<uint32_t>(remainder), to, from, size);
}

uint32_t folding_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  if (size < kStreamBytesMin || reinterpret_cast<uintptr_t>(to) % 64 != 0) {
    return folding<Write::kCached>(crc, to, from, size);
  }
  crc = folding<Write::kStreamed>(crc, to, from, size);
  _mm_sfence();  // another thread reads the batch
  return crc;
}
uint32_t folding_read(uint32_t crc, const std::byte* data, size_t size) {
  return folding<Write::kNone>(crc, nullptr, data, size);
}

bool have_folding() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("vpclmulqdq") && have_hardware();
}
constexpr const char* kFoldingName = "avx512";

#else

uint32_t folding_copy(uint32_t, std::byte*, const std::byte*, size_t) { return 0; }
uint32_t folding_read(uint32_t, const std::byte*, size_t) { return 0; }
bool have_folding() { return false; }
constexpr const char* kFoldingName = "";

#endif

uint32_t hardware_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  return hardware<true>(crc, to, from, size);
}
uint32_t hardware_read(uint32_t crc, const std::byte* data, size_t size) {
  return hardware<false>(crc, nullptr, data, size);
}

uint32_t table_read(uint32_t crc, const std::byte* data, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) {
    crc = kTable[(crc ^ static_cast<uint32_t>(data[i])) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}
uint32_t table_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  std::memcpy(to, from, size);
  return table_read(crc, to, size);
}

constexpr std::array<Crc32cPath, 3> kPaths{
    {{kFoldingName, have_folding, folding_read, folding_copy},
     {kHardware, have_hardware, hardware_read, hardware_copy},
     {"table", [] { return true; }, table_read, table_copy}}};
// The table's until the processor was asked: static objects of other files may compute checksums
// before this one is initialised.
constinit size_t g_fastest = 2;
[[maybe_unused]] const size_t g_asked = g_fastest = static_cast<size_t>(
    std::ranges::find_if(kPaths, [](const auto& path) { return path.present(); }) - kPaths.begin());

}  // namespace

std::span<const Crc32cPath> crc32c_paths() { return kPaths; }

uint32_t crc32c(uint32_t crc, const std::byte* data, size_t size) {
  return kPaths[g_fastest].read(crc, data, size);
}

uint32_t crc32c_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  return kPaths[g_fastest].copy(crc, to, from, size);
}

const char* crc32c_implementation() { return kPaths[g_fastest].name; }

}  // namespace headrace
