// The controller's queue pair against a host that is written down byte by byte: one case for each
// mistake that a host can make, and one for each promise to who drives it.
#include "fabric/tqpair.h"

#include <doctest/doctest.h>

#include "testing/pdu_bytes.h"

using namespace headrace::fabric;
using namespace headrace::testing;

namespace {

constexpr uint8_t kBoth = kDgstHeader | kDgstData;

struct Target {
  explicit Target(TargetQpairOptions options = {}) : qpair(options) {
    format = {(options.dgst & kDgstHeader) != 0, (options.dgst & kDgstData) != 0, 4};
  }

  void command(uint16_t cid, const Bytes& data = {}) {
    Sqe sqe = read_command(1, 8, 1, 512);
    sqe.cid = cid;
    const auto size = static_cast<uint32_t>(data.size());
    qpair.feed(whole(write_capsule_cmd(sqe, size, format), data, format));
  }
  std::vector<TargetCommand> commands() {
    std::vector<TargetCommand> c;
    qpair.take_commands(&c);
    return c;
  }
  std::vector<uint16_t> released() {
    std::vector<uint16_t> r;
    qpair.take_released(&r);
    return r;
  }
  Bytes sent(size_t at_most = SIZE_MAX) {
    Bytes bytes;
    iovec parts[3];
    while (bytes.size() < at_most) {
      const size_t used = qpair.outgoing(parts);
      if (used == 0) break;
      size_t count = 0;
      for (size_t i = 0; i < used && bytes.size() < at_most; ++i) {
        const auto* begin = static_cast<const std::byte*>(parts[i].iov_base);
        const size_t step = std::min(parts[i].iov_len, at_most - bytes.size());
        bytes.insert(bytes.end(), begin, begin + step);
        count += step;
      }
      qpair.sent(count);
    }
    return bytes;
  }
  // The connection ends by our TermReq that names this field.
  void check_fatal(FatalStatus status, uint32_t info) {
    CHECK(qpair.state() == TargetQpair::State::kTerminating);
    CHECK(qpair.fault().status == status);
    CHECK(qpair.fault().info == info);
    CHECK(commands().empty());
    const Bytes out = sent();
    REQUIRE(out.size() >= sizeof(TermReq));
    CHECK(wire_cast<CommonHeader>(out).type == static_cast<uint8_t>(PduType::kC2HTermReq));
    CHECK(read_term_req(out).status == status);
    CHECK(read_term_req(out).info == info);
    command(100);
    CHECK(commands().empty());
  }

  TargetQpair qpair;
  PduFormat format;
};

}  // namespace

TEST_CASE("ICReq is answered with the digests that both want") {
  for (const uint8_t asked : {uint8_t{0}, kDgstHeader, kDgstData, kBoth}) {
    Target target({.established = false, .dgst = kDgstHeader, .maxh2cdata = 8192});
    target.qpair.feed(bytes_of(make_icreq(0, asked, 0)));
    CHECK(target.sent() ==
          bytes_of(make_icresp(0, static_cast<uint8_t>(asked & kDgstHeader), 8192)));
    CHECK(target.qpair.state() == TargetQpair::State::kReady);
  }
}

TEST_CASE("data is padded to what HPDA asks") {
  Target target({.established = false, .dgst = kBoth});
  target.qpair.feed(bytes_of(make_icreq(31, kBoth, 0)));
  target.sent();
  target.format = {true, true, 4};
  target.command(1);
  const Bytes data = pattern(512);
  target.qpair.answer_data(1, data);
  const PduFormat wide{true, true, 128};
  CHECK(target.sent() == whole(write_c2h_data(1, 0, 512, kFlagLast, wide), data, wide) +
                             write_capsule_resp(Cqe{0, 1, 0, 1, 0}, wide));
}

TEST_CASE("a read's answer: data in PDUs of at most data_pdu_max, then the completion") {
  Target target({.data_pdu_max = 512});
  target.command(9);
  REQUIRE(target.commands().size() == 1);
  const Bytes data = pattern(1200);
  target.qpair.answer_data(9, data);
  const auto part = [&](size_t from, size_t to) {
    return Bytes(data.begin() + from, data.begin() + to);
  };
  CHECK(target.sent() ==
        whole(write_c2h_data(9, 0, 512, 0, {}), part(0, 512), {}) +
            whole(write_c2h_data(9, 512, 512, 0, {}), part(512, 1024), {}) +
            whole(write_c2h_data(9, 1024, 176, kFlagLast, {}), part(1024, 1200), {}) +
            write_capsule_resp(Cqe{0, 1, 0, 9, 0}, {}));
  CHECK(target.released() == std::vector<uint16_t>{9});
  CHECK(target.qpair.live() == 0);
}

TEST_CASE("without flow control the last data carries SUCCESS, unless there is a result") {
  Target target({.sq_flow_control = false});
  target.command(1);
  target.command(2);
  const Bytes data = pattern(4);
  target.qpair.answer_data(1, data);
  target.qpair.answer_data(2, data, 5);
  CHECK(target.sent() == whole(write_c2h_data(1, 0, 4, kFlagLast | kFlagSuccess, {}), data, {}) +
                             whole(write_c2h_data(2, 0, 4, kFlagLast, {}), data, {}) +
                             write_capsule_resp(Cqe{5, 0, 0, 2, 0}, {}));
}

TEST_CASE("payload is released when its last byte has gone, not before") {
  Target target({.data_pdu_max = 512});
  target.command(3);
  const Bytes data = pattern(1024);
  target.qpair.answer_data(3, data);
  target.sent(24 + 512 + 24 + 511);
  CHECK(target.released().empty());
  target.sent(1);
  CHECK(target.released() == std::vector<uint16_t>{3});
}

TEST_CASE("payload is released when the connection is lost, and when it comes too late") {
  Target target;
  target.command(3);
  target.command(4);
  const Bytes data = pattern(512);
  target.qpair.answer_data(3, data);
  target.sent(30);
  target.qpair.lost();
  CHECK(target.released() == std::vector<uint16_t>{3});
  target.qpair.answer_data(4, data);
  CHECK(target.released() == std::vector<uint16_t>{4});
  CHECK(target.qpair.outgoing_bytes() == 0);
}

TEST_CASE("in-capsule data comes with its command") {
  for (const uint8_t dgst : {uint8_t{0}, kBoth}) {
    Target target({.dgst = dgst, .capsule_data_max = 1024});
    target.command(5, pattern(1024));
    const auto commands = target.commands();
    REQUIRE(commands.size() == 1);
    CHECK(commands[0].sqe.cid == 5);
    CHECK(commands[0].capsule_data == pattern(1024));
  }
}

TEST_CASE("ddgst_mismatch: the command is answered as retryable, and not delivered") {
  Target target({.dgst = kDgstData, .capsule_data_max = 1024});
  Sqe sqe;
  sqe.cid = 5;
  Bytes bad = whole(write_capsule_cmd(sqe, 64, target.format), pattern(64), target.format);
  bad[100] ^= std::byte{1};
  target.qpair.feed(bad);
  target.command(6);
  CHECK(target.commands().size() == 1);
  CHECK(target.qpair.digest_errors() == 1);
  CHECK(target.sent() ==
        Bytes() + write_capsule_resp(Cqe{0, 1, 0, 5, kTransientTransportError << 1}, {}));
}

TEST_CASE("SQHD runs round the queue") {
  Target target({.entries = 4});
  for (uint16_t i = 0; i < 10; ++i) {
    target.command(i);
    target.qpair.answer(i, kSuccess);
    const Bytes out = target.sent();
    CHECK(wire_cast<CapsuleResp>(out).cqe.sqhd == (i + 1) % 4);
  }
}

// -- faults that end the connection ---------------------------------------------------------------

TEST_CASE("command_before_icreq") {
  Target target({.established = false});
  target.command(1);
  target.check_fatal(FatalStatus::kSequenceError, 0);
}

TEST_CASE("icreq_twice") {
  Target target({.established = false});
  target.qpair.feed(bytes_of(make_icreq(0, 0, 0)));
  target.sent();
  target.qpair.feed(bytes_of(make_icreq(0, 0, 0)));
  target.check_fatal(FatalStatus::kSequenceError, 0);
}

TEST_CASE("icreq_wrong_pfv") {
  Target target({.established = false});
  target.qpair.feed(with(bytes_of(make_icreq(0, 0, 0)), 8, uint16_t{2}));
  target.check_fatal(FatalStatus::kUnsupportedParameter, 8);
}

TEST_CASE("icreq_hpda_beyond_31") {
  Target target({.established = false});
  target.qpair.feed(bytes_of(make_icreq(32, 0, 0)));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 10);
}

TEST_CASE("cid_live") {
  Target target;
  target.command(1);
  target.commands();
  target.command(1);
  target.check_fatal(FatalStatus::kInvalidHeaderField, 10);
}

TEST_CASE("cid_reused_before_its_data_went") {
  Target target;
  target.command(1);
  target.commands();
  const Bytes data = pattern(512);
  target.qpair.answer_data(1, data);
  const Bytes answers = target.sent(24 + 511);
  target.command(1);
  CHECK(target.qpair.fault().info == 10);
  target.sent();
  CHECK(target.released() == std::vector<uint16_t>{1});
}

TEST_CASE("cid_ffff") {
  Target target;
  target.command(0xFFFF);
  target.check_fatal(FatalStatus::kInvalidHeaderField, 10);
}

TEST_CASE("queue_overrun") {
  Target target({.entries = 4});
  for (uint16_t i = 0; i < 3; ++i) target.command(i);
  CHECK(target.commands().size() == 3);
  CHECK(target.qpair.state() == TargetQpair::State::kReady);
  target.command(3);
  target.check_fatal(FatalStatus::kSequenceError, 0);
}

TEST_CASE("capsule_data_beyond_ioccsz") {
  Target target({.capsule_data_max = 64});
  target.command(1, pattern(68));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 4);
}

TEST_CASE("h2c_data_unasked") {
  Target target;
  target.command(1);
  target.commands();
  target.qpair.feed(whole(write_h2c_data(1, 0, 0, 512, kFlagLast, {}), pattern(512), {}));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 10);
}

TEST_CASE("h2c_data_beyond_maxh2cdata") {
  Target target({.maxh2cdata = 4096});
  target.qpair.feed(whole(write_h2c_data(1, 0, 0, 4100, kFlagLast, {}), pattern(4100), {}));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 4);
}

TEST_CASE("pdu_of_the_other_direction") {
  Target target;
  target.qpair.feed(whole(write_c2h_data(1, 0, 512, kFlagLast, {}), pattern(512), {}));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 0);
}

TEST_CASE("hdgst_mismatch") {
  Target target({.dgst = kDgstHeader});
  Bytes bad = Bytes() + write_capsule_cmd(Sqe{}, 0, target.format);
  bad[40] ^= std::byte{1};
  target.qpair.feed(bad);
  target.check_fatal(FatalStatus::kHeaderDigest, wire_cast<uint32_t>(std::span(bad).subspan(72)));
}

TEST_CASE("hlen_255") {
  Target target({.dgst = kDgstHeader});
  target.qpair.feed(from_hex("04 01 ff 00 4c000000"));
  target.check_fatal(FatalStatus::kInvalidHeaderField, 2);
}

TEST_CASE("term_req: nothing is answered, and what it says is kept") {
  Target target;
  target.command(1);
  target.qpair.answer(1, kSuccess);
  target.qpair.feed(Bytes() + write_term_req(Side::kHost, invalid_field(42, ""), {}));
  CHECK(target.qpair.state() == TargetQpair::State::kTerminating);
  CHECK(target.qpair.outgoing_bytes() == 0);
  REQUIRE(target.qpair.notice());
  CHECK(target.qpair.notice()->info == 42);
}

TEST_CASE("the TermReq follows what was promised before, PDU by PDU") {
  Target target;
  target.command(1);
  target.command(2);
  const Bytes data = pattern(512);
  target.qpair.answer_data(1, data);
  const Bytes first = target.sent(100);
  target.command(2);  // live still
  const Bytes rest = target.sent();
  const Bytes answers = whole(write_c2h_data(1, 0, 512, kFlagLast, {}), data, {}) +
                        write_capsule_resp(Cqe{0, 2, 0, 1, 0}, {});
  const Bytes out = first + rest;
  REQUIRE(out.size() == answers.size() + 24 + 72);
  CHECK(Bytes(out.begin(), out.begin() + answers.size()) == answers);
  CHECK(read_term_req(std::span(out).subspan(answers.size())).info == 10);
}
