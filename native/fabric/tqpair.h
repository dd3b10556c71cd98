// TargetQpair: the controller's side of one NVMe/TCP queue pair as a state machine. Bytes in,
// commands out; answers in, bytes out.
//
// The counterpart of Qpair: knows no sockets, clocks or threads, nor what commands mean. It never
// asks a host for data (no R2T), so that every H2CData is a fatal fault: what the namespaces take
// is read, or comes in the capsule. It belongs to one thread.
//
// Invariants:
//   - at most entries - 1 commands are live, each with a CID of its own; one that is answered with
//     data is live until the data has gone
//   - memory taken for a host is bounded by entries * capsule_data_max, whatever it sends
//   - payload that an answer borrows is released exactly once: when it has gone, or at the end
//   - after a fatal fault nothing is taken in, one TermReq goes out, and the connection is to close
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fabric/outgoing.h"
#include "fabric/receiver.h"

namespace headrace::fabric {

struct TargetQpairOptions {
  uint16_t entries = 128;             // of the submission queue: SQSIZE + 1
  bool established = true;            // false: ICReq comes first
  uint8_t dgst = 0;                   // agreed; before ICReq: what we take
  uint8_t hpda = 0;                   // as ICReq said it; used when established
  bool sq_flow_control = true;        // false was agreed in Connect: reads end with SUCCESS
  uint32_t capsule_data_max = 0;      // IOCCSZ * 16 - 64; 8192 for an admin queue
  uint32_t maxh2cdata = 128 << 10;    // said in ICResp; nothing is ever asked for
  uint32_t data_pdu_max = 128 << 10;  // of C2HData, a multiple of 4
};

struct TargetCommand {
  Sqe sqe;
  std::vector<std::byte> capsule_data;
};

class TargetQpair final : private PduSink {
 public:
  enum class State : uint8_t {
    kOpening,  // waits for ICReq
    kReady,
    kTerminating,  // close when `outgoing` is empty, or soon anyway
    kClosed,
  };

  explicit TargetQpair(const TargetQpairOptions& options);

  State state() const { return state_; }
  size_t live() const { return live_count_; }

  std::array<std::span<std::byte>, 2> want() { return receiver_.want(); }
  void advance(size_t count) { taken(receiver_.advance(count)); }
  void feed(std::span<const std::byte> bytes) { taken(receiver_.feed(bytes)); }
  // The peer closed, or the socket failed.
  void lost();

  // Commands since the last call. Each is to be answered once, in any order, with the CID of its
  // sqe. One whose data was damaged under way has been answered already.
  void take_commands(std::vector<TargetCommand>* commands);

  void answer(uint16_t cid, uint16_t status, uint64_t result = 0);
  // Success, with data. `data` is borrowed until `take_released` names the CID; its size is a
  // multiple of 4, and not 0.
  void answer_data(uint16_t cid, std::span<const std::byte> data, uint64_t result = 0);

  // The same for data in a file, of at most data_pdu_max bytes. `crc`: of them, where
  // `data_digests`.
  void answer_file(uint16_t cid, const FileRange& data, uint32_t crc);
  bool data_digests() const { return format_.ddgst; }

  size_t outgoing(std::span<iovec> parts) const { return out_.gather(parts); }
  // The first bytes to go, if they lie in a file; then `outgoing` has no part.
  FileRange outgoing_file() const { return out_.file(); }
  size_t outgoing_bytes() const { return out_.bytes(); }
  void sent(size_t count);
  void take_released(std::vector<uint16_t>* cids);

  const Fault& fault() const { return fault_; }
  const std::optional<TermNotice>& notice() const { return notice_; }
  uint64_t digest_errors() const { return digest_errors_; }
  const TargetQpairOptions& options() const { return options_; }

 private:
  Fault on_header(const PduLayout& layout, std::span<const std::byte> header,
                  DataPlace* place) override;
  Fault on_end(const PduLayout& layout, bool intact) override;
  Fault handle_icreq(const ICReq& pdu);
  Fault handle_capsule_cmd(const Sqe& sqe, const PduLayout& layout, DataPlace* place);
  void respond(uint16_t cid, uint16_t status, uint64_t result);
  void release_gone();
  void finish(uint16_t cid);
  uint16_t sqhd() const;
  void taken(const Fault& fault);
  void drop_all();

  TargetQpairOptions options_;
  PduFormat format_;
  State state_;
  Receiver receiver_;
  Outgoing out_;
  std::unique_ptr<std::bitset<65536>> live_;  // by CID
  size_t live_count_ = 0;
  uint64_t commands_taken_ = 0;
  TargetCommand coming_;
  std::vector<TargetCommand> commands_;
  std::vector<uint16_t> released_;
  std::vector<uint16_t> parts_gone_;
  Fault fault_;
  std::optional<TermNotice> notice_;
  uint64_t digest_errors_ = 0;
};

}  // namespace headrace::fabric
