// Qpair: the host's side of one NVMe/TCP queue pair as a state machine. Bytes in, bytes out,
// completions out.
//
// Knows PDUs, their order and the commands that are live; knows no sockets, clocks or threads: who
// drives it moves the bytes (`want`/`advance`, `outgoing`/`sent`) and tells the time. Commands that
// were submitted go out together, with one write for many. Data that a controller sends goes
// straight to the command's memory, in order, each byte once. It belongs to one thread.
//
// Invariants:
//   - at most entries - 1 commands are live, and no two have the same CID
//   - each submitted command completes exactly once, and its memory is not touched afterwards
//   - a CID is free again when the controller has answered it, not before: not at its deadline
//   - after a fatal fault nothing is taken in, one TermReq goes out, and the connection is to close
//
// A host of read-only namespaces has nothing to send: an R2T is a fatal fault.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fabric/outgoing.h"
#include "fabric/receiver.h"

namespace headrace::fabric {

struct QpairOptions {
  uint16_t entries = 128;         // of the submission queue: SQSIZE + 1
  bool established = true;        // false: it begins with ICReq, and the digests below are an offer
  uint8_t dgst = 0;               // kDgstHeader, kDgstData
  uint8_t cpda = 0;               // as ICResp said it; used when established
  bool sq_flow_control = true;    // false was agreed in Connect: C2HData may carry SUCCESS
  uint32_t data_max = 1 << 20;    // largest transfer of one command: MDTS, or our own limit
  uint32_t capsule_data_max = 0;  // IOCCSZ * 16 - 64; 8192 for Fabrics and admin commands
};

struct Command {
  Sqe sqe;  // the CID is filled in
  std::span<const std::byte> capsule_data;
  uint32_t data_bytes = 0;  // that the controller is to send
  DataPlace place;          // of them
  uint64_t user = 0;
  int64_t deadline_ns = INT64_MAX;
};

enum class Outcome : uint8_t {
  kAnswered,  // by the controller: look at the status
  kTimedOut,  // at the deadline
  kLost,      // the connection ended
};

struct Completion {
  uint64_t user = 0;
  Outcome outcome = Outcome::kAnswered;
  uint16_t status = 0;  // without the phase; kTransientTransportError for a wrong data digest
  uint64_t result = 0;
  uint16_t sqhd = 0;  // of an answer in a capsule; 0xFFFF: flow control is off
};

class Qpair final : private PduSink {
 public:
  enum class State : uint8_t {
    kOpening,  // waits for ICResp
    kReady,
    kTerminating,  // close when `outgoing` is empty, or soon anyway
    kClosed,
  };

  explicit Qpair(const QpairOptions& options);

  State state() const { return state_; }
  // How many commands `submit` takes.
  size_t room() const { return state_ == State::kReady ? free_.size() - free_taken_ : 0; }
  size_t live() const { return live_; }
  // False when there is no room. REQUIRES: data_bytes <= data_max, capsule_data within its limit.
  bool submit(const Command& command);

  std::array<std::span<std::byte>, 2> want() { return receiver_.want(); }
  void advance(size_t count) { taken(receiver_.advance(count)); }
  void feed(std::span<const std::byte> bytes) { taken(receiver_.feed(bytes)); }
  // The peer closed, or the socket failed.
  void lost();

  size_t outgoing(std::span<iovec> parts) const { return out_.gather(parts); }
  size_t outgoing_bytes() const { return out_.bytes(); }
  void sent(size_t count) { out_.sent(count, &released_); }

  // Ends commands whose deadline has come. What arrives for them later goes nowhere.
  void expire(int64_t now_ns);
  // The next deadline of a live command, INT64_MAX without one.
  int64_t next_deadline_ns() const;
  // Commands that ended at their deadline and still hold a CID.
  size_t overdue() const { return overdue_; }

  // Completions since the last call, oldest first.
  void take_completions(std::vector<Completion>* completions);

  // What ended the connection: ours to say, or the peer's words in its TermReq.
  const Fault& fault() const { return fault_; }
  const std::optional<TermNotice>& notice() const { return notice_; }
  uint64_t digest_errors() const { return digest_errors_; }
  const QpairOptions& options() const { return options_; }

 private:
  struct Slot {
    enum class State : uint8_t { kFree, kLive, kOverdue } state = State::kFree;
    bool damaged = false;
    uint32_t expected = 0;
    uint32_t received = 0;
    DataPlace place;
    uint64_t user = 0;
    int64_t deadline_ns = 0;
  };

  Fault on_header(const PduLayout& layout, std::span<const std::byte> header,
                  DataPlace* place) override;
  Fault on_end(const PduLayout& layout, bool intact) override;
  Fault handle_icresp(const ICResp& pdu);
  Fault handle_c2h_data(const DataPdu& pdu, const PduLayout& layout, DataPlace* place);
  Fault handle_capsule_resp(const Cqe& cqe);
  Slot* occupied(uint16_t cid);
  uint16_t take_cid();
  void free(uint16_t cid);
  void complete(uint16_t cid, uint16_t status, uint64_t result, uint16_t sqhd = 0);
  void taken(const Fault& fault);
  void lose_commands();

  QpairOptions options_;
  PduFormat format_;
  State state_;
  Receiver receiver_;
  Outgoing out_;
  std::vector<uint16_t> released_;  // always empty: nothing is borrowed
  std::vector<Slot> slots_;         // by CID
  std::vector<uint16_t> free_;      // a ring: the CID that has been free the longest comes first
  size_t free_head_ = 0;
  size_t free_taken_ = 0;
  size_t live_ = 0;
  size_t overdue_ = 0;
  uint16_t cid_now_ = 0;  // of the C2HData that is coming
  std::vector<Completion> completions_;
  Fault fault_;
  std::optional<TermNotice> notice_;
  uint64_t digest_errors_ = 0;
};

}  // namespace headrace::fabric
