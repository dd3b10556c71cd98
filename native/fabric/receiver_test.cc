// The receiver: every PDU split at every byte gives the same headers, data and faults; direct
// placement and copying agree; memory beyond a place is not touched.
#include "fabric/receiver.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "testing/pdu_bytes.h"

using namespace headrace::fabric;
using namespace headrace::testing;

namespace {

// Places each C2HData's data at DATAO of one memory, and writes down what it is told.
class Recorder final : public PduSink {
 public:
  explicit Recorder(size_t bytes) : memory(bytes) {}

  Fault on_header(const PduLayout& layout, std::span<const std::byte> header,
                  DataPlace* place) override {
    log += name_of(layout.type) + std::string(" ") + std::to_string(header.size()) + ";";
    if (layout.type == PduType::kC2HData) {
      const auto pdu = wire_cast<DataPdu>(header);
      if (pdu.cccid == 0xDEAD) return invalid_field(8, "refused by the sink");
      *place = {skip, std::span(memory).subspan(pdu.datao, pdu.datal - skip - behind)};
    }
    return {};
  }
  Fault on_end(const PduLayout&, bool intact) override {
    log += intact ? "whole;" : "damaged;";
    return {};
  }

  Bytes memory;
  std::string log;
  size_t skip = 0;
  size_t behind = 0;
};

PduRules host_rules(const PduFormat& format) {
  PduRules r;
  r.hdgst = format.hdgst;
  r.ddgst = format.ddgst;
  r.alignment = format.alignment;
  r.data_max = 65536;
  return r;
}

// C2HData, CapsuleResp, C2HData, R2T, CapsuleResp: all that a host may see.
Bytes stream(const PduFormat& format) {
  const Bytes data = pattern(96);
  return whole(write_c2h_data(1, 0, 96, 0, format), data, format) +
         whole(write_capsule_resp({}, format), {}, format) +
         whole(write_c2h_data(2, 96, 32, kFlagLast, format), pattern(32, 2), format) +
         Bytes(Bytes() + write_r2t(1, 2, 0, 64, format)) +
         whole(write_capsule_resp({}, format), {}, format);
}

// Hands bytes over as a socket would: into what `want` names, in reads of at most `chunk()`.
template <class Chunk>
Fault pour(Receiver* receiver, std::span<const std::byte> bytes, Chunk chunk) {
  Fault fault;
  while (!bytes.empty()) {
    size_t left = std::min<size_t>(bytes.size(), chunk());
    size_t count = 0;
    for (const std::span<std::byte> part : receiver->want()) {
      const size_t step = std::min(left, part.size());
      std::copy_n(bytes.begin(), step, part.begin());
      bytes = bytes.subspan(step);
      left -= step;
      count += step;
    }
    fault = receiver->advance(count);
  }
  return fault;
}

}  // namespace

TEST_CASE("every PDU split at every byte") {
  for (const PduFormat& format : {PduFormat{}, PduFormat{true, false, 4}, PduFormat{false, true, 4},
                                  PduFormat{true, true, 64}}) {
    const Bytes bytes = stream(format);
    Recorder once(128);
    Receiver all(&once, host_rules(format));
    REQUIRE(!all.feed(bytes));
    CHECK(all.between_pdus());
    CHECK(once.memory == pattern(96) + pattern(32, 2));
    for (size_t split = 0; split <= bytes.size(); ++split) {
      for (const bool copied : {true, false}) {
        Recorder twice(128);
        Receiver receiver(&twice, host_rules(format));
        const auto rest = std::span(bytes).subspan(split);
        if (copied) {
          REQUIRE(!receiver.feed(std::span(bytes).first(split)));
          REQUIRE(!receiver.feed(rest));
        } else {
          REQUIRE(!pour(&receiver, std::span(bytes).first(split), [] { return SIZE_MAX; }));
          REQUIRE(!pour(&receiver, rest, [] { return SIZE_MAX; }));
        }
        REQUIRE(twice.log == once.log);
        REQUIRE(twice.memory == once.memory);
      }
    }
  }
}

TEST_CASE("one byte at a time, and random pieces") {
  const PduFormat format{true, true, 128};
  const Bytes bytes = stream(format);
  Recorder once(128);
  Receiver all(&once, host_rules(format));
  REQUIRE(!all.feed(bytes));
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Recorder again(128);
    Receiver receiver(&again, host_rules(format));
    REQUIRE(!pour(&receiver, bytes, [&] { return round == 0 ? 1 : 1 + random() % 70; }));
    REQUIRE(again.log == once.log);
    REQUIRE(again.memory == once.memory);
  }
}

TEST_CASE("data before and behind the place goes nowhere, and counts in the digest") {
  const PduFormat format{true, true, 4};
  const Bytes data = pattern(96);
  const Bytes bytes = whole(write_c2h_data(1, 0, 96, kFlagLast, format), data, format);
  for (size_t split = 0; split <= bytes.size(); ++split) {
    Recorder recorder(56);
    recorder.skip = 10;
    recorder.behind = 30;
    Receiver receiver(&recorder, host_rules(format));
    REQUIRE(!pour(&receiver, std::span(bytes).first(split), [] { return SIZE_MAX; }));
    REQUIRE(!pour(&receiver, std::span(bytes).subspan(split), [] { return SIZE_MAX; }));
    REQUIRE(recorder.memory == Bytes(data.begin() + 10, data.begin() + 66));
    REQUIRE(recorder.log == "C2HData 28;whole;");
  }
}

TEST_CASE("a data digest that is wrong is told, and the stream goes on") {
  const PduFormat format{false, true, 4};
  Bytes bytes = stream(format);
  bytes[24 + 50] ^= std::byte{1};
  for (size_t split = 0; split <= bytes.size(); ++split) {
    Recorder recorder(128);
    Receiver receiver(&recorder, host_rules(format));
    REQUIRE(!receiver.feed(std::span(bytes).first(split)));
    REQUIRE(!receiver.feed(std::span(bytes).subspan(split)));
    REQUIRE(recorder.log ==
            "C2HData 24;damaged;CapsuleResp 24;whole;C2HData 24;whole;R2T 24;whole;"
            "CapsuleResp 24;whole;");
  }
}

TEST_CASE("a place that is forgotten in mid-data is not written to") {
  const Bytes data = pattern(96);
  const Bytes bytes = whole(write_c2h_data(1, 0, 96, kFlagLast, {}), data, {});
  Recorder recorder(96);
  Receiver receiver(&recorder, host_rules({}));
  REQUIRE(!receiver.feed(std::span(bytes).first(24 + 40)));
  receiver.forget_place();
  CHECK(receiver.want()[0].empty());
  REQUIRE(!receiver.feed(std::span(bytes).subspan(24 + 40)));
  CHECK(recorder.memory == Bytes(data.begin(), data.begin() + 40) + Bytes(56));
  CHECK(recorder.log == "C2HData 24;whole;");
  CHECK(receiver.between_pdus());
}

TEST_CASE("after a fault every byte is ignored, and the fault stays") {
  const Bytes good = stream({});
  const Bytes bad = with(good, 8, uint16_t{0xDEAD});
  Recorder recorder(128);
  Receiver receiver(&recorder, host_rules({}));
  CHECK(receiver.feed(bad).info == 8);
  CHECK(receiver.feed(good).info == 8);
  CHECK(recorder.log == "C2HData 24;");
  CHECK(Bytes() + receiver.header() == Bytes(bad.begin(), bad.begin() + 24));
}

TEST_CASE("a wrong common header is judged at its eighth byte") {
  const Bytes bad = with(stream({}), 2, uint8_t{255});
  Recorder recorder(128);
  Receiver receiver(&recorder, host_rules({}));
  CHECK(!receiver.feed(std::span(bad).first(7)));
  CHECK(receiver.feed(std::span(bad).subspan(7, 1)).info == 2);
  CHECK(recorder.log.empty());
}

TEST_CASE("a wrong header digest is fatal before the sink hears of the PDU") {
  Bytes bad = stream({true, true, 4});
  bad[12] ^= std::byte{4};
  Recorder recorder(128);
  Receiver receiver(&recorder, host_rules({true, true, 4}));
  CHECK(receiver.feed(bad).status == FatalStatus::kHeaderDigest);
  CHECK(recorder.log.empty());
}
