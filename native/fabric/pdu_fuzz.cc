// Fuzzes the receiver with a stream: headers that are let through say the truth about what follows,
// and the same bytes in other pieces are taken the same way.
//
// The first three bytes choose the side, the digests and the alignment.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fabric/receiver.h"
#include "testing/pdu_bytes.h"

namespace {

using namespace headrace::fabric;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

constexpr uint32_t kCapsuleMax = 4096;
constexpr uint32_t kDataMax = 16384;

class Judge final : public PduSink {
 public:
  Fault on_header(const PduLayout& layout, std::span<const std::byte> header,
                  DataPlace* place) override {
    const auto common = wire_cast<CommonHeader>(header);
    require(header.size() == layout.header_bytes, "a header is whole");
    require(uint64_t{layout.header_bytes} + layout.pad_bytes + layout.data_bytes +
                    (layout.ddgst ? kDigestBytes : 0) ==
                common.plen,
            "the parts are the PDU");
    require(layout.data_bytes <= (layout.type == PduType::kCapsuleCmd ? kCapsuleMax : kDataMax),
            "data is bounded");
    seen += std::to_string(common.type) + "," + std::to_string(common.plen) + ";";
    memory.assign(layout.data_bytes, std::byte{0});
    const size_t skip = layout.data_bytes / 3;
    *place = {skip, std::span(memory).subspan(skip, layout.data_bytes / 2)};
    if (layout.type == PduType::kC2HData || layout.type == PduType::kH2CData) {
      if (const Fault fault = check_data(wire_cast<DataPdu>(header), layout)) return fault;
    }
    if (layout.type == PduType::kR2T) return check_r2t(wire_cast<R2T>(header));
    if (layout.type == PduType::kICReq) return check_icreq(wire_cast<ICReq>(header));
    if (layout.type == PduType::kICResp) return check_icresp(wire_cast<ICResp>(header), 1);
    return {};
  }
  Fault on_end(const PduLayout&, bool intact) override {
    seen += intact ? "+" : "-";
    seen.append(reinterpret_cast<const char*>(memory.data()), memory.size());
    return {};
  }
  std::string seen;
  std::vector<std::byte> memory;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  PduRules rules;
  rules.side = data[0] & 1 ? Side::kHost : Side::kController;
  rules.established = (data[0] & 2) == 0;
  rules.hdgst = data[0] & 4;
  rules.ddgst = data[0] & 8;
  rules.alignment = (data[1] % 32 + 1) * 4;
  rules.capsule_data_max = kCapsuleMax;
  rules.data_max = kDataMax;
  const size_t piece = data[2] + 1;
  const auto bytes = std::as_bytes(std::span(data + 3, size - 3));

  Judge whole, pieces;
  Receiver first(&whole, rules), second(&pieces, rules);
  const Fault a = first.feed(bytes);
  Fault b;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    auto rest = bytes.subspan(at, std::min(piece, bytes.size() - at));
    size_t count = 0;
    for (const std::span<std::byte> part : second.want()) {
      const size_t step = std::min(part.size(), rest.size());
      std::copy_n(rest.begin(), step, part.begin());
      rest = rest.subspan(step);
      count += step;
    }
    b = second.advance(count);
  }
  require(a.status == b.status && a.info == b.info, "pieces change no fault");
  require(whole.seen == pieces.seen, "pieces change nothing");
  return 0;
}
