// The PDUs of NVMe/TCP (NVM Express TCP Transport Specification 1.0, section 3.6): their wire
// structs, the rules that a received one must keep, and how ours are written.
//
// Nothing here holds state or allocates for what a peer says: `check_common` judges the first 8
// bytes before anything else of the PDU is taken in, and what it lets through tells where header,
// padding, data and digest end. Checks of single fields follow when the header is complete. Each
// returns a Fault that names the field, ready for the TermReq that answers it.
//
// Reserved bytes are not looked at, as the specification asks; reserved flags are refused.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fabric/command.h"

namespace headrace::fabric {

enum class PduType : uint8_t {
  kICReq = 0x00,
  kICResp = 0x01,
  kH2CTermReq = 0x02,
  kC2HTermReq = 0x03,
  kCapsuleCmd = 0x04,
  kCapsuleResp = 0x05,
  kH2CData = 0x06,
  kC2HData = 0x07,
  kR2T = 0x09,
};
const char* name_of(PduType type);

inline constexpr uint8_t kFlagHdgst = 1 << 0;
inline constexpr uint8_t kFlagDdgst = 1 << 1;
inline constexpr uint8_t kFlagLast = 1 << 2;
inline constexpr uint8_t kFlagSuccess = 1 << 3;

inline constexpr uint8_t kDgstHeader = 1 << 0;  // DGST of ICReq and ICResp
inline constexpr uint8_t kDgstData = 1 << 1;

inline constexpr size_t kCommonBytes = 8;
inline constexpr size_t kDigestBytes = 4;
inline constexpr size_t kTermBytesMax = 152;  // 24, and 128 of the PDU that was at fault
inline constexpr size_t kHeaderBytesMax = kTermBytesMax;
inline constexpr uint32_t kMaxH2CDataMin = 4096;  // the least that a controller may say

// -- wire structs: little-endian, as they lie in memory -------------------------------------------

static_assert(std::endian::native == std::endian::little);

struct CommonHeader {
  uint8_t type;
  uint8_t flags;
  uint8_t hlen;
  uint8_t pdo;
  uint32_t plen;
};

struct ICReq {
  CommonHeader common;
  uint16_t pfv;
  uint8_t hpda;  // dwords, less one
  uint8_t dgst;
  uint32_t maxr2t;  // less one
  uint8_t reserved[112];
};

struct ICResp {
  CommonHeader common;
  uint16_t pfv;
  uint8_t cpda;  // dwords, less one
  uint8_t dgst;
  uint32_t maxh2cdata;
  uint8_t reserved[112];
};

struct TermReq {
  CommonHeader common;
  uint16_t fes;
  uint16_t fei_low;
  uint16_t fei_high;
  uint8_t reserved[10];
};

struct CapsuleCmd {
  CommonHeader common;
  Sqe sqe;
};

struct CapsuleResp {
  CommonHeader common;
  Cqe cqe;
};

struct DataPdu {  // H2CData, C2HData (no ttag)
  CommonHeader common;
  uint16_t cccid;
  uint16_t ttag;
  uint32_t datao;
  uint32_t datal;
  uint32_t reserved;
};

struct R2T {
  CommonHeader common;
  uint16_t cccid;
  uint16_t ttag;
  uint32_t r2to;
  uint32_t r2tl;
  uint32_t reserved;
};

static_assert(sizeof(CommonHeader) == 8 && sizeof(ICReq) == 128 && sizeof(ICResp) == 128);
static_assert(sizeof(TermReq) == 24 && sizeof(CapsuleCmd) == 72 && sizeof(CapsuleResp) == 24);
static_assert(sizeof(DataPdu) == 24 && sizeof(R2T) == 24);

template <class T>
T wire_cast(std::span<const std::byte> bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// -- what is wrong with a PDU ---------------------------------------------------------------------

// Fatal Error Status of a TermReq (figures 18 and 21 of the specification).
enum class FatalStatus : uint16_t {
  kNone = 0,
  kInvalidHeaderField = 1,
  kSequenceError = 2,
  kHeaderDigest = 3,
  kOutOfRange = 4,
  kLimitExceeded = 5,  // R2T limit (said by a host), data transfer limit (said by a controller)
  kUnsupportedParameter = 6,
};
const char* name_of(FatalStatus status);

struct [[nodiscard]] Fault {
  FatalStatus status = FatalStatus::kNone;
  uint32_t info = 0;      // Fatal Error Information: a byte offset, or the header digest found
  const char* what = "";  // for our own log, a literal

  explicit operator bool() const { return status != FatalStatus::kNone; }
};

inline Fault invalid_field(uint32_t offset, const char* what) {
  return {FatalStatus::kInvalidHeaderField, offset, what};
}

// -- receiving ------------------------------------------------------------------------------------

enum class Side : uint8_t { kHost, kController };

// What a receiver takes. `data_bytes_max` bounds the data of one PDU: IOCCSZ for in-capsule data,
// MAXH2CDATA for H2CData, the largest transfer for C2HData.
struct PduRules {
  Side side = Side::kHost;  // the receiver's
  bool established = true;  // false: ICReq or ICResp comes first
  bool hdgst = false;
  bool ddgst = false;
  uint32_t alignment =
      4;  // of data in received PDUs: (HPDA + 1) * 4 at a host, CPDA's at a controller
  uint32_t capsule_data_max = 0;
  uint32_t data_max = 0;
};

// Where the parts of a PDU end: header (with its digest), padding, data, data digest.
struct PduLayout {
  PduType type = PduType::kICReq;
  uint8_t flags = 0;
  uint8_t hlen = 0;
  bool hdgst = false;
  bool ddgst = false;
  uint32_t header_bytes = 0;  // HLEN and header digest; all of a TermReq
  uint32_t pad_bytes = 0;
  uint32_t data_bytes = 0;
};

// Type, HLEN, FLAGS, PLEN, PDO, in this order, each before the next is believed.
Fault check_common(const CommonHeader& common, const PduRules& rules, PduLayout* layout);
// `header` is HLEN bytes and the digest.
Fault check_header_digest(std::span<const std::byte> header, const PduLayout& layout);

Fault check_icreq(const ICReq& pdu);
// `offered`: the digests of our ICReq.
Fault check_icresp(const ICResp& pdu, uint8_t offered);
// DATAO, DATAL and LAST against PLEN and each other. What the command allows is the caller's.
Fault check_data(const DataPdu& pdu, const PduLayout& layout);
Fault check_r2t(const R2T& pdu);

// What a peer's TermReq says.
struct TermNotice {
  FatalStatus status = FatalStatus::kNone;
  uint32_t info = 0;
};
TermNotice read_term_req(std::span<const std::byte> header);

// -- writing --------------------------------------------------------------------------------------

// What the receiver of our PDUs asked for.
struct PduFormat {
  bool hdgst = false;
  bool ddgst = false;
  uint32_t alignment = 4;
};

ICReq make_icreq(uint8_t hpda, uint8_t dgst, uint32_t maxr2t);
ICResp make_icresp(uint8_t cpda, uint8_t dgst, uint32_t maxh2cdata);

// Header, digest and padding of a PDU; its data (and `data_digest`, where `format.ddgst`) follow.
// The common header is filled in.
struct HeaderBytes {
  std::array<std::byte, kHeaderBytesMax> bytes;  // a TermReq is longer than any padded header
  size_t size = 0;

  operator std::span<const std::byte>() const { return {bytes.data(), size}; }
};
HeaderBytes write_capsule_cmd(const Sqe& sqe, uint32_t data_bytes, const PduFormat& format);
HeaderBytes write_capsule_resp(const Cqe& cqe, const PduFormat& format);
HeaderBytes write_c2h_data(uint16_t cccid, uint32_t datao, uint32_t datal, uint8_t flags,
                           const PduFormat& format);
HeaderBytes write_h2c_data(uint16_t cccid, uint16_t ttag, uint32_t datao, uint32_t datal,
                           uint8_t flags, const PduFormat& format);
HeaderBytes write_r2t(uint16_t cccid, uint16_t ttag, uint32_t r2to, uint32_t r2tl,
                      const PduFormat& format);
// `from` is who sends it; `header` the beginning of the PDU that was at fault.
HeaderBytes write_term_req(Side from, const Fault& fault, std::span<const std::byte> header);

std::array<std::byte, kDigestBytes> data_digest(std::span<const std::byte> data);

}  // namespace headrace::fabric
