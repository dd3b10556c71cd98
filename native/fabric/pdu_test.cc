// PDUs against bytes written down from the specification's figures (digests by a bitwise CRC of
// another language), and each rule of `check_common` against the one mistake that breaks it.
#include "fabric/pdu.h"

#include <doctest/doctest.h>

#include "testing/pdu_bytes.h"

using namespace headrace::fabric;
using namespace headrace::testing;

namespace {

constexpr PduFormat kPlain{};
constexpr PduFormat kDigests{true, true, 4};

PduRules rules(Side side, const PduFormat& format = kPlain) {
  PduRules r;
  r.side = side;
  r.hdgst = format.hdgst;
  r.ddgst = format.ddgst;
  r.capsule_data_max = 8192;
  r.data_max = 65536;
  return r;
}

Sqe sample_sqe() {
  Sqe sqe = read_command(1, 0x123456789, 8, 4096);
  sqe.cid = 0x1234;
  return sqe;
}

struct Judged {
  Fault fault;
  PduLayout layout;
};

Judged judge(const Bytes& bytes, const PduRules& r) {
  Judged j;
  j.fault = check_common(wire_cast<CommonHeader>(bytes), r, &j.layout);
  return j;
}

void refused(const Bytes& bytes, const PduRules& r, FatalStatus status, uint32_t info) {
  const Judged j = judge(bytes, r);
  CHECK(j.fault.status == status);
  CHECK(j.fault.info == info);
}

Bytes sample_c2h(const PduFormat& format) {
  const Bytes data = pattern(512);
  return whole(write_c2h_data(7, 0, 512, kFlagLast, format), data, format);
}

Bytes sample_cmd(const PduFormat& format, uint32_t data_bytes = 0) {
  return whole(write_capsule_cmd(sample_sqe(), data_bytes, format), pattern(data_bytes), format);
}

}  // namespace

// -- golden bytes ---------------------------------------------------------------------------------

TEST_CASE("ICReq as figure 12 has it") {
  Bytes golden = from_hex("00 00 80 00 80000000 0000 02 03 05000000");
  golden.resize(128);
  CHECK(bytes_of(make_icreq(2, kDgstHeader | kDgstData, 5)) == golden);
}

TEST_CASE("ICResp as figure 14 has it") {
  Bytes golden = from_hex("01 00 80 00 80000000 0000 01 02 00000200");
  golden.resize(128);
  CHECK(bytes_of(make_icresp(1, kDgstData, 0x20000)) == golden);
}

TEST_CASE("a Read's CapsuleCmd, without and with a header digest") {
  const Bytes plain = from_hex(
      "04 00 48 00 48000000 02 40 3412 01000000 0000000000000000 0000000000000000 0000000000000000"
      "00100000 000000 5a 89674523 01000000 07000000 00000000 00000000 00000000");
  CHECK(sample_cmd(kPlain) == plain);
  Bytes digest = with(with<uint8_t>(plain, 1, kFlagHdgst), 4, uint32_t{76}) + from_hex("897106bc");
  CHECK(sample_cmd(kDigests) == digest);
}

TEST_CASE("CapsuleResp with a header digest") {
  const Cqe cqe{0, 5, 0, 0x1234, 0};
  CHECK(whole(write_capsule_resp(cqe, kDigests), {}, kDigests) ==
        from_hex("05 01 18 00 1c000000 0000000000000000 0500 0000 3412 0000 13568c9b"));
}

TEST_CASE("C2HData with both digests") {
  Bytes data;
  for (int i = 0; i < 16; ++i) data.push_back(static_cast<std::byte>(i));
  CHECK(whole(write_c2h_data(0x1234, 4096, 16, kFlagLast, kDigests), data, kDigests) ==
        from_hex("07 07 18 1c 30000000 3412 0000 00100000 10000000 00000000 b3d85155"
                 "000102030405060708090a0b0c0d0e0f eb08c9d9"));
}

TEST_CASE("H2CData is padded to CPDA") {
  const PduFormat format{true, true, 32};
  const HeaderBytes header = write_h2c_data(0x1234, 0x55, 0, 8, kFlagLast, format);
  CHECK(Bytes() + header ==
        from_hex("06 07 18 20 2c000000 3412 5500 00000000 08000000 00000000 164edb5a 00000000"));
}

TEST_CASE("R2T with a header digest") {
  CHECK(Bytes() + write_r2t(0x1234, 0x55, 512, 1024, kDigests) ==
        from_hex("09 01 18 00 1c000000 3412 5500 00020000 00040000 00000000 e7c54c6c"));
}

TEST_CASE("TermReq of both sides, with the PDU that was at fault") {
  const Fault fault{FatalStatus::kHeaderDigest, 0x11223344, ""};
  const Bytes echo = from_hex("05 01 18 00 1c000000");
  CHECK(Bytes() + write_term_req(Side::kHost, fault, echo) ==
        from_hex("02 00 18 00 20000000 0300 4433 2211 00000000000000000000") + echo);
  CHECK(Bytes() + write_term_req(Side::kController, invalid_field(4, ""), {}) ==
        from_hex("03 00 18 00 18000000 0100 0400 0000 00000000000000000000"));
}

TEST_CASE("a TermReq echoes at most 128 bytes, and is read back") {
  const Bytes echo = pattern(400);
  const Bytes bytes =
      Bytes() + write_term_req(Side::kHost, {FatalStatus::kOutOfRange, 12, ""}, echo);
  CHECK(bytes.size() == kTermBytesMax);
  CHECK(!judge(bytes, rules(Side::kController, kDigests)).fault);
  const TermNotice notice = read_term_req(bytes);
  CHECK(notice.status == FatalStatus::kOutOfRange);
  CHECK(notice.info == 12);
}

// -- what is written is accepted, and its layout is right -----------------------------------------

TEST_CASE("all that we write passes, whatever the digests and the alignment") {
  for (const bool hdgst : {false, true}) {
    for (const bool ddgst : {false, true}) {
      for (const uint32_t alignment : {4u, 32u, 128u}) {
        const PduFormat format{hdgst, ddgst, alignment};
        PduRules to_host = rules(Side::kHost, format);
        PduRules to_controller = rules(Side::kController, format);
        to_host.alignment = to_controller.alignment = alignment;
        const struct {
          Bytes bytes;
          const PduRules& r;
          uint32_t data;
        } all[] = {
            {sample_cmd(format), to_controller, 0},
            {sample_cmd(format, 1024), to_controller, 1024},
            {whole(write_capsule_resp({}, format), {}, format), to_host, 0},
            {sample_c2h(format), to_host, 512},
            {whole(write_h2c_data(1, 2, 0, 512, 0, format), pattern(512), format), to_controller,
             512},
            {whole(write_r2t(1, 2, 0, 512, format), {}, format), to_host, 0},
        };
        for (const auto& each : all) {
          const Judged j = judge(each.bytes, each.r);
          CAPTURE(name_of(j.layout.type));
          REQUIRE(!j.fault);
          CHECK(j.layout.data_bytes == each.data);
          CHECK(j.layout.header_bytes + j.layout.pad_bytes + j.layout.data_bytes +
                    (j.layout.ddgst ? 4 : 0) ==
                each.bytes.size());
          CHECK(!check_header_digest(std::span(each.bytes).first(j.layout.header_bytes), j.layout));
        }
      }
    }
  }
}

// -- one mistake each -----------------------------------------------------------------------------

TEST_CASE("type: unknown numbers") {
  for (int type = 0; type < 256; ++type) {
    if (type <= 7 || type == 9) continue;
    refused(with(sample_c2h(kPlain), 0, static_cast<uint8_t>(type)), rules(Side::kHost),
            FatalStatus::kInvalidHeaderField, 0);
  }
}

TEST_CASE("type: of the other direction") {
  refused(sample_cmd(kPlain), rules(Side::kHost), FatalStatus::kInvalidHeaderField, 0);
  refused(sample_c2h(kPlain), rules(Side::kController), FatalStatus::kInvalidHeaderField, 0);
}

TEST_CASE("order: ICReq a second time") {
  refused(bytes_of(make_icreq(0, 0, 0)), rules(Side::kController), FatalStatus::kSequenceError, 0);
}

TEST_CASE("order: ICResp a second time") {
  refused(bytes_of(make_icresp(0, 0, 4096)), rules(Side::kHost), FatalStatus::kSequenceError, 0);
}

TEST_CASE("order: something else before ICReq or ICResp") {
  PduRules controller = rules(Side::kController);
  PduRules host = rules(Side::kHost);
  controller.established = host.established = false;
  refused(sample_cmd(kPlain), controller, FatalStatus::kSequenceError, 0);
  refused(sample_c2h(kPlain), host, FatalStatus::kSequenceError, 0);
}

TEST_CASE("hlen: every value but the type's own") {
  for (int hlen = 0; hlen < 256; ++hlen) {
    if (hlen != 24) {
      refused(with(sample_c2h(kDigests), 2, static_cast<uint8_t>(hlen)),
              rules(Side::kHost, kDigests), FatalStatus::kInvalidHeaderField, 2);
    }
    if (hlen != 72) {
      refused(with(sample_cmd(kDigests), 2, static_cast<uint8_t>(hlen)),
              rules(Side::kController, kDigests), FatalStatus::kInvalidHeaderField, 2);
    }
  }
}

TEST_CASE("flags: reserved ones, and those of other types") {
  for (const int bit : {4, 5, 6, 7}) {
    const auto flags = static_cast<uint8_t>(kFlagLast | 1 << bit);
    refused(with(sample_c2h(kPlain), 1, flags), rules(Side::kHost),
            FatalStatus::kInvalidHeaderField, 1);
  }
  refused(with(sample_cmd(kPlain), 1, kFlagLast), rules(Side::kController),
          FatalStatus::kInvalidHeaderField, 1);
  PduRules opening = rules(Side::kController);
  opening.established = false;
  refused(with(bytes_of(make_icreq(0, 0, 0)), 1, kFlagHdgst), opening,
          FatalStatus::kInvalidHeaderField, 1);
}

TEST_CASE("flags: a header digest that was not agreed, or is missing") {
  refused(sample_cmd(kDigests), rules(Side::kController), FatalStatus::kInvalidHeaderField, 1);
  refused(sample_cmd(kPlain), rules(Side::kController, kDigests), FatalStatus::kInvalidHeaderField,
          1);
}

TEST_CASE("flags: a data digest that was not agreed, or is missing, or of no data") {
  refused(sample_c2h({false, true, 4}), rules(Side::kHost), FatalStatus::kInvalidHeaderField, 1);
  refused(sample_c2h(kPlain), rules(Side::kHost, {false, true, 4}),
          FatalStatus::kInvalidHeaderField, 1);
  refused(with(sample_cmd(kPlain), 1, kFlagDdgst), rules(Side::kController, {false, true, 4}),
          FatalStatus::kInvalidHeaderField, 1);
}

TEST_CASE("flags: SUCCESS without LAST_PDU") {
  refused(with(sample_c2h(kPlain), 1, kFlagSuccess), rules(Side::kHost),
          FatalStatus::kInvalidHeaderField, 1);
}

TEST_CASE("plen: below the header") {
  for (const uint32_t plen : {0u, 7u, 8u, 23u}) {
    refused(with(sample_c2h(kPlain), 4, plen), rules(Side::kHost), FatalStatus::kInvalidHeaderField,
            4);
  }
  refused(with(sample_c2h(kDigests), 4, 27u), rules(Side::kHost, kDigests),
          FatalStatus::kInvalidHeaderField, 4);
}

TEST_CASE("plen: data PDUs without data") {
  refused(with(sample_c2h(kPlain), 4, 24u), rules(Side::kHost), FatalStatus::kInvalidHeaderField,
          4);
}

TEST_CASE("plen: more than the type has") {
  const Bytes resp = whole(write_capsule_resp({}, kPlain), {}, kPlain);
  refused(with(resp, 4, 25u), rules(Side::kHost), FatalStatus::kInvalidHeaderField, 4);
  refused(with(resp, 4, UINT32_MAX), rules(Side::kHost), FatalStatus::kInvalidHeaderField, 4);
}

TEST_CASE("plen: data beyond the limit, by one byte and by all") {
  for (const PduFormat& format : {kPlain, kDigests}) {
    const Bytes most = whole(write_c2h_data(1, 0, 65536, kFlagLast, format), {}, format);
    CHECK(!judge(most, rules(Side::kHost, format)).fault);
    const uint32_t plen = wire_cast<CommonHeader>(most).plen;
    for (const uint32_t more : {plen + 1, plen + 255, plen + 4096, UINT32_MAX}) {
      refused(with(most, 4, more), rules(Side::kHost, format), FatalStatus::kInvalidHeaderField, 4);
    }
  }
}

TEST_CASE("plen: in-capsule data beyond IOCCSZ") {
  PduRules small = rules(Side::kController);
  small.capsule_data_max = 512;
  CHECK(!judge(sample_cmd(kPlain, 512), small).fault);
  refused(sample_cmd(kPlain, 516), small, FatalStatus::kInvalidHeaderField, 4);
  small.capsule_data_max = 0;
  refused(sample_cmd(kPlain, 4), small, FatalStatus::kInvalidHeaderField, 4);
}

TEST_CASE("plen: a TermReq of more than 152 bytes, or less than 24") {
  const Bytes term = Bytes() + write_term_req(Side::kHost, {}, {});
  for (const uint32_t plen : {0u, 23u, 153u, UINT32_MAX}) {
    refused(with(term, 4, plen), rules(Side::kController), FatalStatus::kInvalidHeaderField, 4);
  }
}

TEST_CASE("pdo: within the header") {
  for (const int pdo : {0, 4, 20}) {
    refused(with(sample_c2h(kPlain), 3, static_cast<uint8_t>(pdo)), rules(Side::kHost),
            FatalStatus::kInvalidHeaderField, 3);
  }
  refused(with(sample_c2h(kDigests), 3, uint8_t{24}), rules(Side::kHost, kDigests),
          FatalStatus::kInvalidHeaderField, 3);
}

TEST_CASE("pdo: not aligned") {
  refused(with(sample_c2h(kPlain), 3, uint8_t{26}), rules(Side::kHost),
          FatalStatus::kInvalidHeaderField, 3);
  PduRules wide = rules(Side::kHost);
  wide.alignment = 64;
  refused(with(sample_c2h(kPlain), 3, uint8_t{96}), wide, FatalStatus::kInvalidHeaderField, 3);
}

TEST_CASE("pdo: at or beyond the data's end") {
  const Bytes small = whole(write_c2h_data(7, 0, 4, kFlagLast, kPlain), pattern(4), kPlain);
  for (const int pdo : {28, 32, 252}) {
    refused(with(small, 3, static_cast<uint8_t>(pdo)), rules(Side::kHost),
            FatalStatus::kInvalidHeaderField, 3);
  }
}

TEST_CASE("pdo: of a PDU without data") {
  refused(with(sample_cmd(kPlain), 3, uint8_t{72}), rules(Side::kController),
          FatalStatus::kInvalidHeaderField, 3);
  refused(with(Bytes() + write_term_req(Side::kHost, {}, {}), 3, uint8_t{24}),
          rules(Side::kController), FatalStatus::kInvalidHeaderField, 3);
}

TEST_CASE("header digest: any bit of header or digest") {
  const Bytes good = sample_cmd(kDigests);
  const Judged j = judge(good, rules(Side::kController, kDigests));
  REQUIRE(!j.fault);
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const Fault fault = check_header_digest(bad, j.layout);
    REQUIRE(fault.status == FatalStatus::kHeaderDigest);
    REQUIRE(fault.info == wire_cast<uint32_t>(std::span(bad).subspan(72)));
  }
}

TEST_CASE("ICReq: PFV, HPDA, DGST") {
  ICReq pdu = make_icreq(31, 3, UINT32_MAX);
  CHECK(!check_icreq(pdu));
  pdu.pfv = 1;
  CHECK(check_icreq(pdu).status == FatalStatus::kUnsupportedParameter);
  CHECK(check_icreq(pdu).info == 8);
  CHECK(check_icreq(make_icreq(32, 0, 0)).info == 10);
  CHECK(check_icreq(make_icreq(0, 4, 0)).info == 11);
}

TEST_CASE("ICResp: PFV, CPDA, DGST that was not offered, MAXH2CDATA") {
  CHECK(!check_icresp(make_icresp(31, kDgstData, 4096), kDgstHeader | kDgstData));
  ICResp pdu = make_icresp(0, 0, 4096);
  pdu.pfv = 0x100;
  CHECK(check_icresp(pdu, 3).info == 8);
  CHECK(check_icresp(make_icresp(32, 0, 4096), 3).info == 10);
  CHECK(check_icresp(make_icresp(0, kDgstHeader, 4096), kDgstData).info == 11);
  CHECK(check_icresp(make_icresp(0, 0, 4092), 3).info == 12);
  CHECK(check_icresp(make_icresp(0, 0, 4098), 3).info == 12);
}

TEST_CASE("data: DATAL, DATAO, and their sum") {
  PduLayout layout;
  layout.data_bytes = 512;
  const DataPdu good{{}, 1, 0, 4096, 512, 0};
  CHECK(!check_data(good, layout));
  DataPdu bad = good;
  bad.datal = 508;
  CHECK(check_data(bad, layout).info == 16);
  bad = good;
  bad.datao = 4098;
  CHECK(check_data(bad, layout).info == 12);
  bad = good;
  bad.datao = UINT32_MAX - 511 - 4;
  CHECK(!check_data(bad, layout));
  bad.datao = UINT32_MAX - 3;
  CHECK(check_data(bad, layout).status == FatalStatus::kOutOfRange);
  layout.data_bytes = 510;
  bad = good;
  bad.datal = 510;
  CHECK(check_data(bad, layout).info == 16);
}

TEST_CASE("R2T: R2TL, R2TO, and their sum") {
  CHECK(!check_r2t(R2T{{}, 1, 2, 0, 4096, 0}));
  CHECK(check_r2t(R2T{{}, 1, 2, 0, 0, 0}).info == 16);
  CHECK(check_r2t(R2T{{}, 1, 2, 0, 6, 0}).info == 16);
  CHECK(check_r2t(R2T{{}, 1, 2, 2, 4, 0}).info == 12);
  CHECK(check_r2t(R2T{{}, 1, 2, UINT32_MAX - 3, 8, 0}).status == FatalStatus::kOutOfRange);
}
