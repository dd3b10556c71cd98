// Receiver: bytes of one connection in, PDUs out.
//
// Knows where a PDU's parts end (pdu.h) and nothing of commands: a PduSink judges each header, says
// where its data goes, and hears when the data is complete. Data goes to its place directly: `want`
// names the rest of the current data and a staging area for what follows, for one readv; `advance`
// says how many bytes came.
//
// Memory is the staging area and one header, whatever a peer says. After a fault nothing more is
// taken: every later byte is ignored.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fabric/pdu.h"

namespace headrace::fabric {

// Where the data of a PDU goes: `skip` bytes nowhere, then to `dest`, the rest nowhere.
struct DataPlace {
  size_t skip = 0;
  std::span<std::byte> dest;
};

class PduSink {
 public:
  virtual ~PduSink() = default;
  // A header whose lengths and digest are right. `place` is used if the PDU has data.
  virtual Fault on_header(const PduLayout& layout, std::span<const std::byte> header,
                          DataPlace* place) = 0;
  // The PDU is complete. `intact` is false when its data digest is wrong.
  virtual Fault on_end(const PduLayout& layout, bool intact) = 0;
};

class Receiver {
 public:
  Receiver(PduSink* sink, const PduRules& rules);
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // Where the next bytes should be put, in this order; the first may be empty. Valid until the next
  // call of anything.
  std::array<std::span<std::byte>, 2> want();
  // `count` bytes were put there.
  Fault advance(size_t count);
  // The same for bytes that lie elsewhere.
  Fault feed(std::span<const std::byte> bytes);

  // The rest of the current PDU's data goes nowhere: its memory is no longer ours.
  void forget_place() { place_ = {}; }

  // From the next PDU on; the sink calls it in `on_header` or `on_end`.
  void set_rules(const PduRules& rules) { rules_ = rules; }
  const PduRules& rules() const { return rules_; }

  // The current PDU's header as far as it came: for the echo in a TermReq.
  std::span<const std::byte> header() const { return {header_.data(), header_filled_}; }
  // Whether the last PDU has come whole: an end of stream here is no truncation.
  bool between_pdus() const { return part_ == Part::kCommon && header_filled_ == 0; }

 private:
  enum class Part : uint8_t { kCommon, kHeader, kPad, kData, kDigest, kDead };

  size_t consume(std::span<const std::byte> bytes);
  void collect_header(std::span<const std::byte> bytes, size_t until);
  size_t take_data(std::span<const std::byte> bytes);
  void took_data(size_t count);
  void common_done();
  void header_done();
  void end(bool intact);
  void fail(const Fault& fault);
  std::span<std::byte> direct() const;

  PduSink* const sink_;
  PduRules rules_;
  Part part_ = Part::kCommon;
  Fault fault_;
  PduLayout layout_;
  std::array<std::byte, kHeaderBytesMax> header_{};
  size_t header_filled_ = 0;
  DataPlace place_;
  size_t part_done_ = 0;  // bytes of the current padding, data or digest
  uint32_t crc_ = 0;
  std::array<std::byte, kDigestBytes> digest_{};
  size_t staging_window_;
  std::unique_ptr<std::byte[]> staging_;
};

}  // namespace headrace::fabric
