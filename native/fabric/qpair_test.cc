// The host's queue pair against a controller that is written down byte by byte: one case for each
// mistake that a controller can make, and one for each promise to who drives it.
#include "fabric/qpair.h"

#include <doctest/doctest.h>

#include <memory>
#include <set>

#include "testing/pdu_bytes.h"

using namespace headrace::fabric;
using namespace headrace::testing;

namespace {

constexpr uint8_t kBoth = kDgstHeader | kDgstData;

// A qpair, the format of what it receives, and what came of its commands.
struct Host {
  explicit Host(QpairOptions options = {}) : qpair(options) {
    format = {(options.dgst & kDgstHeader) != 0, (options.dgst & kDgstData) != 0, 4};
  }

  // A read into memory of its own; its CID is the number of reads before.
  Bytes& read(uint32_t bytes, uint64_t user = 0, int64_t deadline_ns = INT64_MAX) {
    memory.push_back(std::make_unique<Bytes>(bytes));
    Command command{read_command(1, 0, 1, bytes), {}, bytes, {}, user, deadline_ns};
    command.place.dest = *memory.back();
    REQUIRE(qpair.submit(command));
    return *memory.back();
  }
  void data(uint16_t cid, uint32_t at, const Bytes& bytes, uint8_t flags) {
    const auto size = static_cast<uint32_t>(bytes.size());
    qpair.feed(whole(write_c2h_data(cid, at, size, flags, format), bytes, format));
  }
  void respond(uint16_t cid, uint16_t status = 0, uint64_t result = 0, uint16_t sqhd = 0) {
    const Cqe cqe{result, sqhd, 0, cid, static_cast<uint16_t>(status << 1)};
    qpair.feed(whole(write_capsule_resp(cqe, format), {}, format));
  }
  std::vector<Completion> completions() {
    std::vector<Completion> c;
    qpair.take_completions(&c);
    return c;
  }
  Bytes sent() {
    Bytes bytes;
    iovec parts[8];
    while (const size_t used = qpair.outgoing(parts)) {
      size_t count = 0;
      for (size_t i = 0; i < used; ++i) {
        const auto* begin = static_cast<const std::byte*>(parts[i].iov_base);
        bytes.insert(bytes.end(), begin, begin + parts[i].iov_len);
        count += parts[i].iov_len;
      }
      qpair.sent(count);
    }
    return bytes;
  }
  // The connection ends by our TermReq that names this field; all that was live is lost.
  void check_fatal(FatalStatus status, uint32_t info, size_t live) {
    CHECK(qpair.state() == Qpair::State::kTerminating);
    CHECK(qpair.fault().status == status);
    CHECK(qpair.fault().info == info);
    const auto ended = completions();
    CHECK(ended.size() == live);
    for (const Completion& c : ended) CHECK(c.outcome == Outcome::kLost);
    const Bytes out = sent();
    REQUIRE(out.size() >= sizeof(TermReq));
    const size_t commands = out.size() - wire_cast<CommonHeader>(tail_pdu(out)).plen;
    const auto term = std::span(out).subspan(commands);
    CHECK(wire_cast<CommonHeader>(term).type == static_cast<uint8_t>(PduType::kH2CTermReq));
    CHECK(read_term_req(term).status == status);
    CHECK(read_term_req(term).info == info);
    CHECK(qpair.room() == 0);
    CHECK_FALSE(qpair.submit({}));
  }
  // The last PDU of a stream of whole ones.
  static std::span<const std::byte> tail_pdu(const Bytes& out) {
    std::span<const std::byte> rest = out;
    while (true) {
      const uint32_t plen = wire_cast<CommonHeader>(rest).plen;
      if (plen >= rest.size()) return rest;
      rest = rest.subspan(plen);
    }
  }

  Qpair qpair;
  PduFormat format;
  std::vector<std::unique_ptr<Bytes>> memory;
};

}  // namespace

// -- what it does ---------------------------------------------------------------------------------

TEST_CASE("many reads go out together, each with a CID of its own") {
  Host host;
  for (int i = 0; i < 20; ++i) host.read(512);
  iovec parts[4];
  CHECK(host.qpair.outgoing(parts) == 1);  // one piece, one write
  const Bytes out = host.sent();
  CHECK(out.size() == 20 * 72);
  std::set<uint16_t> cids;
  for (int i = 0; i < 20; ++i) {
    const auto sqe = wire_cast<CapsuleCmd>(std::span(out).subspan(i * 72)).sqe;
    CHECK(sqe.opcode == 2);
    CHECK(sqe.sgl_length == 512);
    cids.insert(sqe.cid);
  }
  CHECK(cids.size() == 20);
}

TEST_CASE("data in several PDUs, and of several commands in turn") {
  for (const uint8_t dgst : {uint8_t{0}, kDgstHeader, kDgstData, kBoth}) {
    Host host({.dgst = dgst});
    const Bytes a = pattern(1024, 1), b = pattern(512, 2);
    const Bytes& to_a = host.read(1024, 10);
    const Bytes& to_b = host.read(512, 11);
    host.data(0, 0, Bytes(a.begin(), a.begin() + 512), 0);
    host.data(1, 0, b, kFlagLast);
    host.data(0, 512, Bytes(a.begin() + 512, a.end()), kFlagLast);
    CHECK(host.completions().empty());
    host.respond(1);
    host.respond(0, 0, 77);
    const auto done = host.completions();
    REQUIRE(done.size() == 2);
    CHECK(done[0].user == 11);
    CHECK(done[1].user == 10);
    CHECK(done[1].result == 77);
    CHECK(done[1].status == kSuccess);
    CHECK(to_a == a);
    CHECK(to_b == b);
    CHECK(host.qpair.live() == 0);
  }
}

TEST_CASE("bytes before and behind the wanted ones go nowhere, over PDUs") {
  const Bytes all = pattern(1536);
  for (const size_t skip : {0u, 3u, 511u, 512u, 700u, 1400u}) {
    for (const size_t size : {0u, 1u, 100u, 136u}) {
      Host host({.dgst = kBoth});
      Bytes dest(size);
      Command command{read_command(1, 0, 3, 1536), {}, 1536, {skip, dest}, 5};
      REQUIRE(host.qpair.submit(command));
      for (uint32_t at = 0; at < 1536; at += 512) {
        host.data(0, at, Bytes(all.begin() + at, all.begin() + at + 512),
                  at == 1024 ? kFlagLast : 0);
      }
      host.respond(0);
      CHECK(host.completions().size() == 1);
      CHECK(dest == Bytes(all.begin() + skip, all.begin() + skip + size));
    }
  }
}

TEST_CASE("SUCCESS completes a command where flow control is off") {
  Host host({.sq_flow_control = false});
  const Bytes& dest = host.read(512, 3);
  host.data(0, 0, pattern(512), kFlagLast | kFlagSuccess);
  const auto done = host.completions();
  REQUIRE(done.size() == 1);
  CHECK(done[0].status == kSuccess);
  CHECK(dest == pattern(512));
}

TEST_CASE("an error's status reaches the caller, also after half of the data") {
  Host host;
  host.read(1024, 3);
  host.data(0, 0, pattern(512), 0);
  host.respond(0, kUnrecoveredReadError | kDoNotRetry);
  const auto done = host.completions();
  REQUIRE(done.size() == 1);
  CHECK(done[0].status == (kUnrecoveredReadError | kDoNotRetry));
  CHECK(host.qpair.state() == Qpair::State::kReady);
}

TEST_CASE("at most entries - 1 commands are live, and a CID comes back last") {
  Host host({.entries = 4});
  for (int i = 0; i < 3; ++i) host.read(4);
  CHECK(host.qpair.room() == 0);
  CHECK_FALSE(host.qpair.submit({}));
  host.respond(1, kInternalError);
  host.respond(2, kInternalError);
  CHECK(host.qpair.room() == 2);
  host.sent();
  host.read(4);
  host.read(4);
  const Bytes out = host.sent();
  CHECK(wire_cast<CapsuleCmd>(out).sqe.cid == 1);
  CHECK(wire_cast<CapsuleCmd>(std::span(out).subspan(72)).sqe.cid == 2);
}

TEST_CASE("ICReq goes first, and ICResp settles digests and alignment") {
  Host host({.established = false, .dgst = kBoth, .capsule_data_max = 64});
  CHECK(host.sent() == bytes_of(make_icreq(0, kBoth, 0)));
  CHECK(host.qpair.room() == 0);
  host.qpair.feed(bytes_of(make_icresp(7, kDgstHeader, 4096)));
  REQUIRE(host.qpair.state() == Qpair::State::kReady);
  const Bytes data = pattern(64);
  REQUIRE(host.qpair.submit({Sqe{}, data, 0, {}, 0}));
  const PduFormat format{true, false, 32};
  CHECK(host.sent() == whole(write_capsule_cmd(Sqe{}, 64, format), data, format));
}

// -- faults that one command pays for -------------------------------------------------------------

TEST_CASE("data digest: the command fails with a retryable status, the connection lives") {
  Host host({.dgst = kDgstData});
  host.read(512, 1);
  host.read(512, 2);
  const Bytes data = pattern(512);
  Bytes bad = whole(write_c2h_data(0, 0, 512, kFlagLast, host.format), data, host.format);
  bad[24 + 100] ^= std::byte{0x10};
  host.qpair.feed(bad);
  CHECK(host.completions().empty());  // the CID is the controller's until it answers
  host.respond(0);
  host.data(1, 0, data, kFlagLast);
  host.respond(1);
  const auto done = host.completions();
  REQUIRE(done.size() == 2);
  CHECK(done[0].status == kTransientTransportError);
  CHECK((done[0].status & kDoNotRetry) == 0);
  CHECK(done[1].status == kSuccess);
  CHECK(host.qpair.digest_errors() == 1);
}

TEST_CASE("data digest: with SUCCESS, and of one PDU among several") {
  Host host({.dgst = kDgstData, .sq_flow_control = false});
  host.read(1024, 1);
  Bytes bad = whole(write_c2h_data(0, 0, 512, 0, host.format), pattern(512), host.format);
  bad.back() ^= std::byte{1};
  host.qpair.feed(bad);
  host.data(0, 512, pattern(512), kFlagLast | kFlagSuccess);
  const auto done = host.completions();
  REQUIRE(done.size() == 1);
  CHECK(done[0].status == kTransientTransportError);
}

TEST_CASE("deadline: the command ends, its memory is left alone, its CID stays taken") {
  Host host({.entries = 3});
  Bytes& dest = host.read(512, 1, 1000);
  host.read(512, 2, 2000);
  CHECK(host.qpair.next_deadline_ns() == 1000);
  const Bytes bytes = whole(write_c2h_data(0, 0, 512, kFlagLast, {}), pattern(512), {});
  host.qpair.feed(std::span(bytes).first(24 + 100));
  host.qpair.expire(999);
  CHECK(host.completions().empty());
  host.qpair.expire(1000);
  const auto done = host.completions();
  REQUIRE(done.size() == 1);
  CHECK(done[0].outcome == Outcome::kTimedOut);
  CHECK(done[0].user == 1);
  CHECK(host.qpair.overdue() == 1);
  CHECK(host.qpair.room() == 0);
  CHECK(host.qpair.next_deadline_ns() == 2000);
  const Bytes before = dest;
  host.qpair.feed(std::span(bytes).subspan(24 + 100));
  host.respond(0);
  CHECK(dest == before);
  CHECK(host.completions().empty());
  CHECK(host.qpair.overdue() == 0);
  CHECK(host.qpair.room() == 1);
}

// -- faults that end the connection ---------------------------------------------------------------

TEST_CASE("cccid_unknown") {
  Host host;
  host.read(512);
  host.data(1, 0, pattern(512), kFlagLast);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 8, 1);
}

TEST_CASE("cccid_beyond_queue") {
  Host host({.entries = 4});
  host.read(512);
  host.data(3, 0, pattern(512), kFlagLast);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 8, 1);
}

TEST_CASE("cccid_of_finished_command") {
  Host host;
  host.read(512);
  host.respond(0, kInternalError);
  host.completions();
  host.data(0, 0, pattern(512), kFlagLast);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 8, 0);
}

TEST_CASE("datao_gap") {
  Host host;
  host.read(1024);
  host.data(0, 512, pattern(512), kFlagLast);
  host.check_fatal(FatalStatus::kOutOfRange, 12, 1);
}

TEST_CASE("datao_overlap") {
  Host host;
  host.read(1024);
  host.data(0, 0, pattern(512), 0);
  host.data(0, 256, pattern(512), 0);
  host.check_fatal(FatalStatus::kOutOfRange, 12, 1);
}

TEST_CASE("datal_beyond_command") {
  Host host;
  Bytes& dest = host.read(512);
  host.data(0, 0, pattern(516), kFlagLast);
  host.check_fatal(FatalStatus::kOutOfRange, 16, 1);
  CHECK(dest == Bytes(512));
}

TEST_CASE("data_for_command_without_data") {
  Host host;
  REQUIRE(host.qpair.submit({}));
  host.data(0, 0, pattern(4), kFlagLast);
  host.check_fatal(FatalStatus::kOutOfRange, 16, 1);
}

TEST_CASE("data_after_last") {
  Host host;
  host.read(512);
  host.data(0, 0, pattern(512), kFlagLast);
  host.data(0, 512, pattern(4), kFlagLast);
  host.check_fatal(FatalStatus::kOutOfRange, 16, 1);
}

TEST_CASE("last_too_early") {
  Host host;
  host.read(1024);
  host.data(0, 0, pattern(512), kFlagLast);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 1, 1);
}

TEST_CASE("last_missing") {
  Host host;
  host.read(512);
  host.data(0, 0, pattern(512), 0);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 1, 1);
}

TEST_CASE("success_with_flow_control") {
  Host host;
  host.read(512);
  host.data(0, 0, pattern(512), kFlagLast | kFlagSuccess);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 1, 1);
}

TEST_CASE("response_cid_unknown") {
  Host host;
  host.read(512);
  host.respond(9);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 20, 1);
}

TEST_CASE("response_twice") {
  Host host;
  host.read(512);
  host.respond(0, kInternalError);
  host.respond(0, kInternalError);
  CHECK(host.completions().size() == 1);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 20, 0);
}

TEST_CASE("response_before_data") {
  Host host;
  host.read(512);
  host.respond(0, kSuccess);
  host.check_fatal(FatalStatus::kSequenceError, 22, 1);
}

TEST_CASE("sqhd_beyond_queue") {
  Host host({.entries = 8});
  host.read(512);
  host.respond(0, kInternalError, 0, 8);
  host.check_fatal(FatalStatus::kInvalidHeaderField, 16, 1);
}

TEST_CASE("r2t_on_read_only_host") {
  Host host;
  host.read(512);
  host.qpair.feed(Bytes() + write_r2t(0, 1, 0, 512, {}));
  host.check_fatal(FatalStatus::kSequenceError, 0, 1);
}

TEST_CASE("icresp_twice") {
  Host host({.established = false});
  host.qpair.feed(bytes_of(make_icresp(0, 0, 4096)));
  host.read(512);
  host.qpair.feed(bytes_of(make_icresp(0, 0, 4096)));
  host.check_fatal(FatalStatus::kSequenceError, 0, 1);
}

TEST_CASE("icresp_wrong_pfv") {
  Host host({.established = false});
  host.qpair.feed(with(bytes_of(make_icresp(0, 0, 4096)), 8, uint16_t{1}));
  host.check_fatal(FatalStatus::kUnsupportedParameter, 8, 0);
}

TEST_CASE("icresp_digest_not_offered") {
  Host host({.established = false});
  host.qpair.feed(bytes_of(make_icresp(0, kDgstData, 4096)));
  host.check_fatal(FatalStatus::kInvalidHeaderField, 11, 0);
}

TEST_CASE("hdgst_mismatch") {
  Host host({.dgst = kDgstHeader});
  host.read(512);
  Bytes bad = whole(write_capsule_resp(Cqe{}, host.format), {}, host.format);
  bad[9] ^= std::byte{1};
  host.qpair.feed(bad);
  host.check_fatal(FatalStatus::kHeaderDigest, wire_cast<uint32_t>(std::span(bad).subspan(24)), 1);
}

TEST_CASE("hlen_255: nothing is read beyond the common header") {
  Host host({.dgst = kDgstHeader});
  host.read(512);
  host.qpair.feed(from_hex("07 05 ff 1c 1c020000"));
  host.check_fatal(FatalStatus::kInvalidHeaderField, 2, 1);
}

TEST_CASE("term_req: nothing is answered, and what it says is kept") {
  Host host;
  host.read(512);
  host.qpair.feed(Bytes() + write_term_req(Side::kController, invalid_field(42, ""), {}));
  CHECK(host.qpair.state() == Qpair::State::kTerminating);
  CHECK(host.qpair.outgoing_bytes() == 0);
  REQUIRE(host.qpair.notice());
  CHECK(host.qpair.notice()->info == 42);
  CHECK(host.completions().size() == 1);
}

TEST_CASE("after termination nothing is taken in") {
  Host host;
  Bytes& dest = host.read(512);
  host.respond(7);
  host.data(0, 0, pattern(512), kFlagLast);
  host.respond(0);
  CHECK(dest == Bytes(512));
  host.check_fatal(FatalStatus::kInvalidHeaderField, 20, 1);
}

TEST_CASE("a lost connection ends every command once") {
  Host host;
  host.read(512, 1);
  host.read(512, 2, 5);
  host.qpair.expire(5);
  host.qpair.lost();
  host.qpair.lost();
  const auto done = host.completions();
  REQUIRE(done.size() == 2);
  CHECK(done[0].outcome == Outcome::kTimedOut);
  CHECK(done[1].outcome == Outcome::kLost);
  CHECK(done[1].user == 1);
  CHECK(host.qpair.state() == Qpair::State::kClosed);
  CHECK(host.qpair.outgoing_bytes() == 0);
  CHECK(host.qpair.room() == 0);
}
