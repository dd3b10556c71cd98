// Commands and completions as they lie in capsules (NVM Express Base Specification 2.0,
// sections 3.3 and 4; NVMe over Fabrics in section 6): the 64 and 16 bytes, and the numbers that we
// use.
#pragma once

#include <cstdint>

namespace headrace::fabric {

struct Sqe {
  uint8_t opcode = 0;
  uint8_t flags = 0;  // PSDT 01b in bits 7:6: one SGL descriptor
  uint16_t cid = 0;
  uint32_t nsid = 0;  // of a Fabrics command: FCTYPE in its low byte
  uint64_t cdw2 = 0;
  uint64_t mptr = 0;
  uint64_t sgl_address = 0;
  uint32_t sgl_length = 0;
  uint8_t sgl_reserved[3] = {};
  uint8_t sgl_type = 0;
  uint32_t cdw10 = 0;
  uint32_t cdw11 = 0;
  uint32_t cdw12 = 0;
  uint32_t cdw13 = 0;
  uint32_t cdw14 = 0;
  uint32_t cdw15 = 0;
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
  uint64_t result = 0;
  uint16_t sqhd = 0;
  uint16_t sqid = 0;  // reserved in Fabrics
  uint16_t cid = 0;
  uint16_t status = 0;  // bit 0 is the phase tag, reserved in Fabrics
};
static_assert(sizeof(Cqe) == 16);

inline constexpr uint8_t kSglFlags = 0x40;
inline constexpr uint8_t kSglTransport = 0x5A;  // transport data block: the data comes in PDUs
inline constexpr uint8_t kSglInCapsule = 0x01;  // data block by offset: the data is in the capsule

enum class Opcode : uint8_t {
  kFlush = 0x00,
  kWrite = 0x01,
  kRead = 0x02,
  kWriteUncorrectable = 0x04,
  kCompare = 0x05,
  kWriteZeroes = 0x08,
  kDatasetManagement = 0x09,
  kVerify = 0x0C,
  kFabrics = 0x7F,
};

// Status as it stands in a completion without the phase: SC in bits 7:0, SCT in 10:8, DNR bit 14.
inline constexpr uint16_t kSuccess = 0;
inline constexpr uint16_t kInvalidOpcode = 0x001;
inline constexpr uint16_t kInvalidField = 0x002;
inline constexpr uint16_t kDataTransferError = 0x004;
inline constexpr uint16_t kInternalError = 0x006;
inline constexpr uint16_t kInvalidNamespace = 0x00B;
inline constexpr uint16_t kSglLengthInvalid = 0x00F;
inline constexpr uint16_t kSglTypeInvalid = 0x011;
inline constexpr uint16_t kSglOffsetInvalid = 0x016;
inline constexpr uint16_t kNamespaceWriteProtected = 0x020;
inline constexpr uint16_t kTransientTransportError = 0x022;
inline constexpr uint16_t kLbaOutOfRange = 0x080;
inline constexpr uint16_t kUnrecoveredReadError = 0x281;
inline constexpr uint16_t kUnwrittenBlock = 0x287;  // Deallocated or Unwritten Logical Block
inline constexpr uint16_t kDoNotRetry = 0x4000;

inline Sqe read_command(uint32_t nsid, uint64_t slba, uint32_t blocks, uint32_t bytes) {
  Sqe sqe;
  sqe.opcode = static_cast<uint8_t>(Opcode::kRead);
  sqe.flags = kSglFlags;
  sqe.nsid = nsid;
  sqe.sgl_length = bytes;
  sqe.sgl_type = kSglTransport;
  sqe.cdw10 = static_cast<uint32_t>(slba);
  sqe.cdw11 = static_cast<uint32_t>(slba >> 32);
  sqe.cdw12 = blocks - 1;
  return sqe;
}

inline uint64_t slba_of(const Sqe& sqe) {
  return sqe.cdw10 | static_cast<uint64_t>(sqe.cdw11) << 32;
}
inline uint32_t blocks_of(const Sqe& sqe) { return (sqe.cdw12 & 0xFFFF) + 1; }

}  // namespace headrace::fabric
