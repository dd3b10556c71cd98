#include "fabric/pdu.h"

#include <algorithm>

#include "core/crc32c.h"

namespace headrace::fabric {
namespace {

constexpr uint32_t kTypeAt = 0, kFlagsAt = 1, kHlenAt = 2, kPdoAt = 3, kPlenAt = 4;
constexpr uint32_t kPfvAt = 8, kPdaAt = 10, kDgstAt = 11, kMaxH2CDataAt = 12;
constexpr uint32_t kOffsetAt = 12, kLengthAt = 16;
constexpr uint8_t kPdaMax = 31;
constexpr size_t kTermEchoMax = kTermBytesMax - sizeof(TermReq);

// What is fixed for a type.
struct Kind {
  Side receiver;
  uint8_t hlen;
  uint8_t flags;  // that it may carry
  bool digested;  // by HDGST
  bool has_data;  // always
  bool may_have_data;
};

constexpr Kind kKinds[] = {
    {Side::kController, 128, 0, false, false, false},                                // ICReq
    {Side::kHost, 128, 0, false, false, false},                                      // ICResp
    {Side::kController, 24, 0, false, false, false},                                 // H2CTermReq
    {Side::kHost, 24, 0, false, false, false},                                       // C2HTermReq
    {Side::kController, 72, kFlagHdgst | kFlagDdgst, true, false, true},             // CapsuleCmd
    {Side::kHost, 24, kFlagHdgst, true, false, false},                               // CapsuleResp
    {Side::kController, 24, kFlagHdgst | kFlagDdgst | kFlagLast, true, true, true},  // H2CData
    {Side::kHost, 24, kFlagHdgst | kFlagDdgst | kFlagLast | kFlagSuccess, true, true,
     true},                                             // C2HData
    {Side::kHost, 0, 0, false, false, false},           // 0x08: no PDU
    {Side::kHost, 24, kFlagHdgst, true, false, false},  // R2T
};

bool opens(PduType type) { return type == PduType::kICReq || type == PduType::kICResp; }
bool terminates(PduType type) {
  return type == PduType::kH2CTermReq || type == PduType::kC2HTermReq;
}

// A TermReq counts as all header: it is read whole, and has no digest.
Fault check_term_length(const CommonHeader& common, PduLayout* layout) {
  if (common.plen < sizeof(TermReq)) return invalid_field(kPlenAt, "PLEN is below HLEN");
  if (common.plen > kTermBytesMax) return invalid_field(kPlenAt, "PLEN of a TermReq exceeds 152");
  if (common.pdo != 0) return invalid_field(kPdoAt, "PDO of a PDU without data is not 0");
  layout->header_bytes = common.plen;
  return {};
}

Fault check_lengths(const CommonHeader& common, const PduRules& rules, const Kind& kind,
                    PduLayout* layout) {
  const uint32_t header = layout->header_bytes;
  if (common.plen < header) return invalid_field(kPlenAt, "PLEN is below HLEN and digest");
  if (common.plen == header) {
    if (kind.has_data) return invalid_field(kPlenAt, "PLEN leaves no data");
    if (common.pdo != 0) return invalid_field(kPdoAt, "PDO of a PDU without data is not 0");
    if (layout->flags & kFlagDdgst) {
      return invalid_field(kFlagsAt, "DDGSTF is set on a PDU without data");
    }
    layout->ddgst = false;
    return {};
  }
  if (!kind.may_have_data) return invalid_field(kPlenAt, "PLEN exceeds HLEN and digest");
  const uint32_t max =
      layout->type == PduType::kCapsuleCmd ? rules.capsule_data_max : rules.data_max;
  const uint32_t trailer = rules.ddgst ? kDigestBytes : 0;
  // PDO is a byte: no more than 255 before the data.
  if (common.plen > 255ull + max + trailer) return invalid_field(kPlenAt, "PLEN exceeds the limit");
  if (static_cast<bool>(layout->flags & kFlagDdgst) != rules.ddgst) {
    return invalid_field(kFlagsAt, "DDGSTF differs from what was negotiated");
  }
  if (common.pdo < header) return invalid_field(kPdoAt, "PDO lies within the header");
  if (common.pdo % rules.alignment != 0) return invalid_field(kPdoAt, "PDO is not aligned");
  if (common.pdo + trailer >= common.plen) return invalid_field(kPdoAt, "PDO lies beyond the data");
  layout->ddgst = rules.ddgst;
  layout->pad_bytes = common.pdo - header;
  layout->data_bytes = common.plen - common.pdo - trailer;
  if (layout->data_bytes > max) return invalid_field(kPlenAt, "PLEN exceeds the limit");
  return {};
}

CommonHeader common_header(PduType type, uint8_t flags, size_t hlen, size_t pdo, size_t plen) {
  return {static_cast<uint8_t>(type), flags, static_cast<uint8_t>(hlen), static_cast<uint8_t>(pdo),
          static_cast<uint32_t>(plen)};
}

// Fills in the common header; appends header digest and padding.
template <class T>
HeaderBytes write_header(PduType type, uint8_t flags, T pdu, uint32_t data_bytes,
                         const PduFormat& format) {
  size_t end = sizeof(T) + (format.hdgst ? kDigestBytes : 0);
  size_t plen = end;
  size_t pdo = 0;
  if (format.hdgst) flags |= kFlagHdgst;
  if (data_bytes > 0) {
    pdo = (end + format.alignment - 1) / format.alignment * format.alignment;
    if (format.ddgst) flags |= kFlagDdgst;
    plen = pdo + data_bytes + (format.ddgst ? kDigestBytes : 0);
    end = pdo;
  }
  pdu.common = common_header(type, flags, sizeof(T), pdo, plen);
  HeaderBytes out;
  out.size = end;
  std::fill_n(out.bytes.begin(), end, std::byte{0});
  std::memcpy(out.bytes.data(), &pdu, sizeof(T));
  if (format.hdgst) {
    const uint32_t crc = crc32c({out.bytes.data(), sizeof(T)});
    std::memcpy(out.bytes.data() + sizeof(T), &crc, kDigestBytes);
  }
  return out;
}

}  // namespace

const char* name_of(PduType type) {
  switch (type) {
    case PduType::kICReq:
      return "ICReq";
    case PduType::kICResp:
      return "ICResp";
    case PduType::kH2CTermReq:
      return "H2CTermReq";
    case PduType::kC2HTermReq:
      return "C2HTermReq";
    case PduType::kCapsuleCmd:
      return "CapsuleCmd";
    case PduType::kCapsuleResp:
      return "CapsuleResp";
    case PduType::kH2CData:
      return "H2CData";
    case PduType::kC2HData:
      return "C2HData";
    case PduType::kR2T:
      return "R2T";
  }
  return "unknown PDU";
}

const char* name_of(FatalStatus status) {
  switch (status) {
    case FatalStatus::kNone:
      return "no error";
    case FatalStatus::kInvalidHeaderField:
      return "Invalid PDU Header Field";
    case FatalStatus::kSequenceError:
      return "PDU Sequence Error";
    case FatalStatus::kHeaderDigest:
      return "Header Digest Error";
    case FatalStatus::kOutOfRange:
      return "Data Transfer Out of Range";
    case FatalStatus::kLimitExceeded:
      return "Limit Exceeded";
    case FatalStatus::kUnsupportedParameter:
      return "Unsupported Parameter";
  }
  return "unknown error";
}

Fault check_common(const CommonHeader& common, const PduRules& rules, PduLayout* layout) {
  if (common.type >= std::size(kKinds) || kKinds[common.type].hlen == 0) {
    return invalid_field(kTypeAt, "unknown PDU type");
  }
  const Kind& kind = kKinds[common.type];
  const auto type = static_cast<PduType>(common.type);
  if (kind.receiver != rules.side) return invalid_field(kTypeAt, "PDU type of the other direction");
  if (!terminates(type) && opens(type) == rules.established) {
    return {FatalStatus::kSequenceError, 0,
            rules.established ? "a second ICReq or ICResp" : "the first PDU is no ICReq or ICResp"};
  }
  if (common.hlen != kind.hlen) return invalid_field(kHlenAt, "HLEN is not that of the type");
  if (common.flags & ~kind.flags) return invalid_field(kFlagsAt, "a flag that the type has not");
  const bool hdgst = kind.digested && rules.hdgst;
  if (static_cast<bool>(common.flags & kFlagHdgst) != hdgst) {
    return invalid_field(kFlagsAt, "HDGSTF differs from what was negotiated");
  }
  if ((common.flags & kFlagSuccess) && !(common.flags & kFlagLast)) {
    return invalid_field(kFlagsAt, "SUCCESS without LAST_PDU");
  }
  *layout = {};
  layout->type = type;
  layout->flags = common.flags;
  layout->hlen = common.hlen;
  layout->hdgst = hdgst;
  layout->header_bytes = common.hlen + (hdgst ? kDigestBytes : 0);
  return terminates(type) ? check_term_length(common, layout)
                          : check_lengths(common, rules, kind, layout);
}

Fault check_header_digest(std::span<const std::byte> header, const PduLayout& layout) {
  if (!layout.hdgst) return {};
  const auto found = wire_cast<uint32_t>(header.subspan(layout.hlen));
  if (crc32c(header.first(layout.hlen)) == found) return {};
  return {FatalStatus::kHeaderDigest, found, "the header digest is wrong"};
}

Fault check_icreq(const ICReq& pdu) {
  if (pdu.pfv != 0) return {FatalStatus::kUnsupportedParameter, kPfvAt, "PFV is not 0"};
  if (pdu.hpda > kPdaMax) return invalid_field(kPdaAt, "HPDA exceeds 31");
  if (pdu.dgst & ~(kDgstHeader | kDgstData)) return invalid_field(kDgstAt, "a reserved DGST bit");
  return {};
}

Fault check_icresp(const ICResp& pdu, uint8_t offered) {
  if (pdu.pfv != 0) return {FatalStatus::kUnsupportedParameter, kPfvAt, "PFV is not 0"};
  if (pdu.cpda > kPdaMax) return invalid_field(kPdaAt, "CPDA exceeds 31");
  if (pdu.dgst & ~offered) return invalid_field(kDgstAt, "a digest that was not offered");
  if (pdu.maxh2cdata < kMaxH2CDataMin || pdu.maxh2cdata % 4 != 0) {
    return invalid_field(kMaxH2CDataAt, "MAXH2CDATA is below 4096 or no multiple of 4");
  }
  return {};
}

Fault check_data(const DataPdu& pdu, const PduLayout& layout) {
  if (pdu.datal != layout.data_bytes) return invalid_field(kLengthAt, "DATAL differs from PLEN");
  if (pdu.datal % 4 != 0) return invalid_field(kLengthAt, "DATAL is no multiple of 4");
  if (pdu.datao % 4 != 0) return invalid_field(kOffsetAt, "DATAO is no multiple of 4");
  if (pdu.datao > UINT32_MAX - pdu.datal) {
    return {FatalStatus::kOutOfRange, kOffsetAt, "DATAO and DATAL exceed 2^32"};
  }
  return {};
}

Fault check_r2t(const R2T& pdu) {
  if (pdu.r2tl == 0 || pdu.r2tl % 4 != 0) {
    return invalid_field(kLengthAt, "R2TL is 0 or no multiple of 4");
  }
  if (pdu.r2to % 4 != 0) return invalid_field(kOffsetAt, "R2TO is no multiple of 4");
  if (pdu.r2to > UINT32_MAX - pdu.r2tl) {
    return {FatalStatus::kOutOfRange, kOffsetAt, "R2TO and R2TL exceed 2^32"};
  }
  return {};
}

TermNotice read_term_req(std::span<const std::byte> header) {
  const auto pdu = wire_cast<TermReq>(header);
  return {static_cast<FatalStatus>(pdu.fes), pdu.fei_low | static_cast<uint32_t>(pdu.fei_high)
                                                               << 16};
}

ICReq make_icreq(uint8_t hpda, uint8_t dgst, uint32_t maxr2t) {
  ICReq pdu{};
  pdu.common = common_header(PduType::kICReq, 0, sizeof(pdu), 0, sizeof(pdu));
  pdu.hpda = hpda;
  pdu.dgst = dgst;
  pdu.maxr2t = maxr2t;
  return pdu;
}

ICResp make_icresp(uint8_t cpda, uint8_t dgst, uint32_t maxh2cdata) {
  ICResp pdu{};
  pdu.common = common_header(PduType::kICResp, 0, sizeof(pdu), 0, sizeof(pdu));
  pdu.cpda = cpda;
  pdu.dgst = dgst;
  pdu.maxh2cdata = maxh2cdata;
  return pdu;
}

HeaderBytes write_capsule_cmd(const Sqe& sqe, uint32_t data_bytes, const PduFormat& format) {
  return write_header(PduType::kCapsuleCmd, 0, CapsuleCmd{{}, sqe}, data_bytes, format);
}

HeaderBytes write_capsule_resp(const Cqe& cqe, const PduFormat& format) {
  return write_header(PduType::kCapsuleResp, 0, CapsuleResp{{}, cqe}, 0, format);
}

HeaderBytes write_c2h_data(uint16_t cccid, uint32_t datao, uint32_t datal, uint8_t flags,
                           const PduFormat& format) {
  return write_header(PduType::kC2HData, flags, DataPdu{{}, cccid, 0, datao, datal, 0}, datal,
                      format);
}

HeaderBytes write_h2c_data(uint16_t cccid, uint16_t ttag, uint32_t datao, uint32_t datal,
                           uint8_t flags, const PduFormat& format) {
  return write_header(PduType::kH2CData, flags, DataPdu{{}, cccid, ttag, datao, datal, 0}, datal,
                      format);
}

HeaderBytes write_r2t(uint16_t cccid, uint16_t ttag, uint32_t r2to, uint32_t r2tl,
                      const PduFormat& format) {
  return write_header(PduType::kR2T, 0, R2T{{}, cccid, ttag, r2to, r2tl, 0}, 0, format);
}

HeaderBytes write_term_req(Side from, const Fault& fault, std::span<const std::byte> header) {
  TermReq pdu{};
  const size_t echo = std::min(header.size(), kTermEchoMax);
  const PduType type = from == Side::kHost ? PduType::kH2CTermReq : PduType::kC2HTermReq;
  pdu.common = common_header(type, 0, sizeof(pdu), 0, sizeof(pdu) + echo);
  pdu.fes = static_cast<uint16_t>(fault.status);
  pdu.fei_low = static_cast<uint16_t>(fault.info);
  pdu.fei_high = static_cast<uint16_t>(fault.info >> 16);
  HeaderBytes out;
  out.size = sizeof(pdu) + echo;
  std::memcpy(out.bytes.data(), &pdu, sizeof(pdu));
  std::copy_n(header.begin(), echo, out.bytes.begin() + sizeof(pdu));
  return out;
}

std::array<std::byte, kDigestBytes> data_digest(std::span<const std::byte> data) {
  return std::bit_cast<std::array<std::byte, kDigestBytes>>(crc32c(data));
}

}  // namespace headrace::fabric
