// Fuzzes both queue pairs with what a hostile peer may send: raw bytes, and PDUs that are
// well-formed (digests included) with fields of the input's choice, between submissions, deadlines
// and answers.
//
// Promises: every command completes once, its memory is not touched afterwards (it is freed: ASan),
// live commands stay within the queue, payload is released once, and after a fault nothing happens.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "fabric/qpair.h"
#include "fabric/tqpair.h"
#include "testing/pdu_bytes.h"

namespace {

using namespace headrace::fabric;
using headrace::testing::Bytes;
using headrace::testing::pattern;
using headrace::testing::whole;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  uint32_t take(unsigned count) {
    uint32_t value = 0;
    for (; count > 0 && left_ > 0; --count, --left_) value = value << 8 | *data_++;
    return value;
  }
  std::span<const std::byte> bytes(size_t count) {
    count = std::min(count, left_);
    const auto span = std::as_bytes(std::span(data_, count));
    data_ += count;
    left_ -= count;
    return span;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

size_t file_bytes(const TargetQpair& qpair) { return qpair.outgoing_file().bytes; }
size_t file_bytes(const Qpair&) { return 0; }

void drop_output(auto* qpair) {
  iovec parts[5];
  const size_t used = qpair->outgoing(parts);
  size_t count = file_bytes(*qpair);
  require(count == 0 || used == 0, "a file's bytes are sent alone");
  for (size_t i = 0; i < used; ++i) count += parts[i].iov_len;
  qpair->sent(count);
}

void fuzz_host(Input in, uint32_t how) {
  QpairOptions options;
  options.entries = static_cast<uint16_t>(2 + in.take(1) % 12);
  options.established = (how & 1) == 0;
  options.dgst = how >> 1 & 3;
  options.sq_flow_control = how & 8;
  options.data_max = 4096;
  Qpair qpair(options);
  const PduFormat format{(options.dgst & 1) != 0, (options.dgst & 2) != 0, 4};
  std::map<uint64_t, std::unique_ptr<Bytes>> open;
  uint64_t users = 0;
  int64_t now = 0;

  const auto reap = [&] {
    std::vector<Completion> done;
    qpair.take_completions(&done);
    for (const Completion& c : done) require(open.erase(c.user) == 1, "a command completes once");
    require(qpair.live() == open.size(), "live commands are those without a completion");
    require(qpair.live() + qpair.overdue() < options.entries, "the queue bounds live commands");
  };
  while (!in.empty()) {
    switch (in.take(1) % 8) {
      case 0: {
        const uint32_t bytes = in.take(2) % 1025 * 4;
        const uint32_t skip = bytes == 0 ? 0 : in.take(2) % bytes;
        auto dest = std::make_unique<Bytes>((bytes - skip) / (1 + in.take(1) % 2));
        Command command{
            read_command(1, 0, 1, bytes), {}, bytes, {skip, *dest}, ++users, now + in.take(1)};
        if (qpair.submit(command)) open.emplace(users, std::move(dest));
        break;
      }
      case 1:
        qpair.feed(in.bytes(in.take(1)));
        break;
      case 2: {
        const auto cid = static_cast<uint16_t>(in.take(1) % (options.entries + 1));
        const uint32_t at = in.take(2);
        const uint32_t size = 4 + in.take(1) % 200 * 4;
        const auto flags = static_cast<uint8_t>(in.take(1) % 4 << 2);
        Bytes pdu = whole(write_c2h_data(cid, at, size, flags, format), pattern(size), format);
        if (in.take(1) % 8 == 0) pdu.back() ^= std::byte{1};
        const size_t cut = in.take(2) % (pdu.size() + 1);
        qpair.feed(std::span(pdu).first(cut));
        reap();
        if (in.take(1) % 4 == 0) qpair.expire(now += 100);
        reap();
        qpair.feed(std::span(pdu).subspan(cut));
        break;
      }
      case 3: {
        const Cqe cqe{in.take(1), static_cast<uint16_t>(in.take(1) % 16), 0,
                      static_cast<uint16_t>(in.take(1) % (options.entries + 1)),
                      static_cast<uint16_t>(in.take(2))};
        qpair.feed(whole(write_capsule_resp(cqe, format), {}, format));
        break;
      }
      case 4:
        qpair.expire(now += in.take(1));
        break;
      case 5:
        drop_output(&qpair);
        break;
      case 6:
        qpair.feed(headrace::testing::bytes_of(make_icresp(
            static_cast<uint8_t>(in.take(1) % 33), static_cast<uint8_t>(in.take(1) % 4), 4096)));
        break;
      default:
        if (in.take(1) == 0) qpair.lost();
    }
    reap();
    if (qpair.state() >= Qpair::State::kTerminating) {
      require(open.empty() && qpair.room() == 0, "a fault ends every command");
    }
  }
  qpair.lost();
  reap();
  require(open.empty(), "the end of the connection ends every command");
}

void fuzz_target(Input in, uint32_t how) {
  TargetQpairOptions options;
  options.entries = static_cast<uint16_t>(2 + in.take(1) % 12);
  options.established = (how & 1) == 0;
  options.dgst = how >> 1 & 3;
  options.sq_flow_control = how & 8;
  options.capsule_data_max = 256;
  options.data_pdu_max = 64;
  TargetQpair qpair(options);
  const PduFormat format{(options.dgst & 1) != 0, (options.dgst & 2) != 0, 4};
  std::map<uint16_t, std::unique_ptr<Bytes>> borrowed;
  std::vector<TargetCommand> waiting;

  const auto settle = [&] {
    std::vector<uint16_t> released;
    qpair.take_released(&released);
    for (const uint16_t cid : released) require(borrowed.erase(cid) == 1, "released once");
    qpair.take_commands(&waiting);
    require(qpair.live() < options.entries, "the queue bounds live commands");
    for (const TargetCommand& c : waiting) {
      require(c.capsule_data.size() <= options.capsule_data_max, "memory is bounded");
    }
  };
  while (!in.empty()) {
    switch (in.take(1) % 7) {
      case 0:
        qpair.feed(in.bytes(in.take(1)));
        break;
      case 1: {
        Sqe sqe = read_command(1, in.take(1), 1, 512);
        sqe.cid = static_cast<uint16_t>(in.take(1) % 16);
        const uint32_t size = in.take(1) % 66 * 4;
        Bytes pdu = whole(write_capsule_cmd(sqe, size, format), pattern(size), format);
        if (in.take(1) % 8 == 0) pdu.back() ^= std::byte{1};
        const size_t cut = in.take(2) % (pdu.size() + 1);
        qpair.feed(std::span(pdu).first(cut));
        settle();
        qpair.feed(std::span(pdu).subspan(cut));
        break;
      }
      case 2:
        if (!waiting.empty()) {
          qpair.answer(waiting.back().sqe.cid, static_cast<uint16_t>(in.take(2) & 0x7FFF));
          waiting.pop_back();
        }
        break;
      case 3:
        if (!waiting.empty()) {
          const uint16_t cid = waiting.front().sqe.cid;
          waiting.erase(waiting.begin());
          auto data = std::make_unique<Bytes>(4 + in.take(1) * 4);
          const std::span<const std::byte> span = *data;
          require(borrowed.emplace(cid, std::move(data)).second, "a CID is live once");
          const uint32_t kind = in.take(1);
          if (kind & 2 && span.size() <= options.data_pdu_max) {
            qpair.answer_file(cid, {1000, kind, span.size()}, kind);
          } else {
            qpair.answer_data(cid, span, kind & 1);
          }
        }
        break;
      case 4:
        drop_output(&qpair);
        break;
      case 5:
        qpair.feed(headrace::testing::bytes_of(make_icreq(static_cast<uint8_t>(in.take(1) % 33),
                                                          static_cast<uint8_t>(in.take(1) % 5),
                                                          in.take(1))));
        break;
      default:
        if (in.take(1) == 0) qpair.lost();
    }
    settle();
  }
  qpair.lost();
  settle();
  require(borrowed.empty(), "the end of the connection releases everything");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const uint32_t how = in.take(1);
  how & 16 ? fuzz_host(in, how) : fuzz_target(in, how);
  return 0;
}
