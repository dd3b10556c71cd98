// A Qpair and a TargetQpair joined in memory: who chooses decides what is read, how the bytes are
// split, in which order commands are answered, which bits flip. Whatever that is:
//
//   - a read that succeeds brought the disk's bytes, and wrote nothing but its memory
//   - every command completes once
//   - payload is released once
//
// Broken promises throw, so that tests and fuzzers share the model.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/crc32c.h"
#include "fabric/qpair.h"
#include "fabric/tqpair.h"
#include "testing/pdu_bytes.h"

namespace headrace::testing {

struct PairOptions {
  uint8_t host_dgst = 0;
  uint8_t target_dgst = 0;
  bool sq_flow_control = true;
  uint16_t entries = 16;
  uint32_t data_pdu_max = 2048;
  bool flips = false;  // choose bits to flip; meaningful with both digests
};

class FabricPair {
 public:
  // `choose(n)` returns 0 .. n-1.
  using Choose = std::function<uint32_t(uint32_t)>;
  static constexpr uint32_t kBlock = 512;
  static constexpr uint32_t kBlocks = 64;
  static constexpr uint32_t kReadMax = 16;
  static constexpr int kDiskFd = 1000;  // the disk as a file: never touched as one

  FabricPair(const PairOptions& options, Choose choose)
      : options_(options),
        choose_(std::move(choose)),
        disk_(pattern(kBlock * kBlocks)),
        host_({.entries = options.entries,
               .established = false,
               .dgst = options.host_dgst,
               .sq_flow_control = options.sq_flow_control,
               .data_max = kReadMax * kBlock,
               .capsule_data_max = 64}),
        target_({.entries = options.entries,
                 .established = false,
                 .dgst = options.target_dgst,
                 .sq_flow_control = options.sq_flow_control,
                 .capsule_data_max = 64,
                 .data_pdu_max = options.data_pdu_max}) {}

  // One move of somebody.
  void step() {
    switch (choose_(10)) {
      case 0:
      case 1:
        return submit();
      case 2:
      case 3:
        return host_sends();
      case 4:
      case 5:
      case 6:
        return target_sends();
      case 7:
      case 8:
        return answer();
      default:
        now_ns_ += choose_(3);
        host_.expire(now_ns_);
        return reap();
    }
  }

  // Lets everything in flight come to its end.
  void drain() {
    for (int rounds = 0; host_.live() + host_.overdue() > 0 && alive(); ++rounds) {
      require(rounds < 100000, "everything comes to an end");
      host_sends(SIZE_MAX);
      while (!waiting_.empty() && alive()) answer();
      target_sends(SIZE_MAX);
    }
    if (!alive()) end();
    reap();
    require(open_.empty(), "every command completes");
    require(host_.live() == 0 && borrowed_.empty(), "nothing is left");
  }

  bool alive() const {
    return host_.state() <= fabric::Qpair::State::kReady &&
           target_.state() <= fabric::TargetQpair::State::kReady;
  }
  // The connection ends for both.
  void end() {
    host_.lost();
    target_.lost();
    release();
    waiting_.clear();
    require(borrowed_.empty(), "payload is released at the end");
    reap();
  }

  const fabric::Qpair& host() const { return host_; }
  const fabric::TargetQpair& target() const { return target_; }
  uint64_t reads_right() const { return reads_right_; }
  uint64_t refused() const { return refused_; }
  uint64_t flipped() const { return flipped_; }
  uint64_t damaged() const { return damaged_; }

 private:
  struct Open {
    std::unique_ptr<Bytes> dest;
    size_t disk_at = 0;  // of its first byte
    bool to_fail = false;
  };

  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("broken promise: ") + what);
  }

  void submit() {
    const uint64_t user = ++users_;
    fabric::Command command;
    Open open;
    open.to_fail = choose_(8) == 0;
    Bytes in_capsule;
    if (open.to_fail) {  // a write, refused
      in_capsule = pattern(4 * choose_(17), static_cast<uint32_t>(user));
      command.sqe.opcode = static_cast<uint8_t>(fabric::Opcode::kWrite);
      command.capsule_data = in_capsule;
      open.dest = std::make_unique<Bytes>();
    } else {
      const uint32_t blocks = 1 + choose_(kReadMax);
      const uint32_t slba = choose_(kBlocks - blocks + 1);
      const uint32_t bytes = blocks * kBlock;
      const uint32_t skip = choose_(bytes + 1);
      open.dest = std::make_unique<Bytes>(choose_(bytes - skip + 1));
      open.disk_at = slba * kBlock + skip;
      command.sqe = fabric::read_command(1, slba, blocks, bytes);
      command.data_bytes = bytes;
      command.place = {skip, *open.dest};
    }
    command.user = user;
    command.deadline_ns = choose_(4) == 0 ? now_ns_ + choose_(20) : INT64_MAX;
    const size_t room = host_.room();
    require(host_.submit(command) == (room > 0), "submit takes as many as room says");
    if (room > 0) open_.emplace(user, std::move(open));
  }

  // What a loop would write next: of the disk, where the payload lies in a file.
  size_t gather(const fabric::TargetQpair& from, std::span<iovec> parts) const {
    const fabric::FileRange file = from.outgoing_file();
    if (file.bytes == 0) return from.outgoing(parts);
    require(file.offset + file.bytes <= disk_.size(), "a file's range is the command's");
    parts[0] = {const_cast<std::byte*>(disk_.data() + file.offset), file.bytes};
    return 1;
  }
  static size_t gather(const fabric::Qpair& from, std::span<iovec> parts) {
    return from.outgoing(parts);
  }

  template <class From, class To>
  void move(From* from, To* to, size_t most) {
    iovec parts[3];
    const size_t used = gather(*from, parts);
    size_t left = most;
    size_t count = 0;
    Bytes bytes;
    for (size_t i = 0; i < used && left > 0; ++i) {
      const size_t step = std::min(left, parts[i].iov_len);
      const auto* begin = static_cast<const std::byte*>(parts[i].iov_base);
      bytes.insert(bytes.end(), begin, begin + step);
      left -= step;
      count += step;
    }
    from->sent(count);
    // The handshake has no digest: a bit of it may turn the digests off.
    const bool agreed = host_.state() == fabric::Qpair::State::kReady;
    if (options_.flips && agreed && !bytes.empty() && choose_(40) == 0) {
      bytes[choose_(static_cast<uint32_t>(bytes.size()))] ^= std::byte{1} << choose_(8);
      ++flipped_;
    }
    receive(to, bytes);
  }

  template <class To>
  void receive(To* to, std::span<const std::byte> bytes) {
    if (choose_(2) == 0) {
      to->feed(bytes);
      return;
    }
    while (!bytes.empty()) {
      size_t count = 0;
      for (const std::span<std::byte> part : to->want()) {
        const size_t step = std::min(part.size(), bytes.size());
        std::copy_n(bytes.begin(), step, part.begin());
        bytes = bytes.subspan(step);
        count += step;
      }
      to->advance(count);
    }
  }

  void host_sends(size_t most = 0) {
    move(&host_, &target_, most != 0 ? most : 1 + choose_(400));
    target_.take_commands(&waiting_);
  }
  void target_sends(size_t most = 0) {
    move(&target_, &host_, most != 0 ? most : 1 + choose_(6000));
    release();
    reap();
  }

  // Any of the waiting commands: completions are reordered.
  void answer() {
    if (waiting_.empty()) return;
    const size_t which = choose_(static_cast<uint32_t>(waiting_.size()));
    const fabric::Sqe sqe = waiting_[which].sqe;
    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(which));
    if (sqe.opcode != static_cast<uint8_t>(fabric::Opcode::kRead)) {
      target_.answer(sqe.cid, fabric::kNamespaceWriteProtected | fabric::kDoNotRetry);
      return;
    }
    // A damaged command may ask for anything when there are no digests.
    const uint64_t at = fabric::slba_of(sqe) * kBlock;
    require(at + sqe.sgl_length <= disk_.size(), "only our reads arrive");
    auto data =
        std::make_unique<Bytes>(disk_.begin() + static_cast<ptrdiff_t>(at),
                                disk_.begin() + static_cast<ptrdiff_t>(at + sqe.sgl_length));
    const std::span<const std::byte> span = *data;
    require(borrowed_.emplace(sqe.cid, std::move(data)).second, "a CID is live once");
    if (span.size() <= options_.data_pdu_max && choose_(2) == 0) {
      target_.answer_file(sqe.cid, {kDiskFd, at, span.size()}, crc32c(span));
    } else {
      target_.answer_data(sqe.cid, span);
    }
    release();
  }

  void release() {
    std::vector<uint16_t> cids;
    target_.take_released(&cids);
    for (const uint16_t cid : cids) {
      require(borrowed_.erase(cid) == 1, "payload is released once");
    }
  }

  void reap() {
    std::vector<fabric::Completion> done;
    host_.take_completions(&done);
    for (const fabric::Completion& c : done) {
      const auto it = open_.find(c.user);
      require(it != open_.end(), "a command completes once");
      if (c.outcome == fabric::Outcome::kAnswered) check(it->second, c);
      open_.erase(it);  // frees its memory: whoever writes there now is seen by ASan
    }
  }

  void check(const Open& open, const fabric::Completion& c) {
    if (c.status == fabric::kTransientTransportError) {
      ++damaged_;
      return;
    }
    if (open.to_fail) {
      require(c.status == (fabric::kNamespaceWriteProtected | fabric::kDoNotRetry), "writes fail");
      ++refused_;
      return;
    }
    require(c.status == fabric::kSuccess, "reads succeed");
    require(std::equal(open.dest->begin(), open.dest->end(),
                       disk_.begin() + static_cast<ptrdiff_t>(open.disk_at)),
            "a read brings the disk's bytes");
    ++reads_right_;
  }

  const PairOptions options_;
  const Choose choose_;
  const Bytes disk_;
  fabric::Qpair host_;
  fabric::TargetQpair target_;
  std::map<uint64_t, Open> open_;                        // by user
  std::map<uint16_t, std::unique_ptr<Bytes>> borrowed_;  // by CID
  std::vector<fabric::TargetCommand> waiting_;
  uint64_t users_ = 0;
  int64_t now_ns_ = 0;
  uint64_t reads_right_ = 0, refused_ = 0, flipped_ = 0, damaged_ = 0;
};

}  // namespace headrace::testing
