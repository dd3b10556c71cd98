#include "fabric/tqpair.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace headrace::fabric {
namespace {

constexpr uint32_t kTtagAt = 10;
constexpr uint32_t kCommandCidAt = 10;  // 8 and the CID's place in the SQE
// A tag of C2HData that is not the command's last: nothing is released by it.
constexpr uint16_t kNoRelease = 0xFFFF;

PduRules rules_of(const TargetQpairOptions& options) {
  PduRules rules;
  rules.side = Side::kController;
  rules.established = options.established;
  rules.hdgst = options.established && (options.dgst & kDgstHeader);
  rules.ddgst = options.established && (options.dgst & kDgstData);
  rules.alignment = 4;  // our ICResp asks for CPDA 0
  rules.capsule_data_max = options.capsule_data_max;
  rules.data_max = options.maxh2cdata;
  return rules;
}

PduFormat format_of(uint8_t dgst, uint8_t hpda) {
  return {(dgst & kDgstHeader) != 0, (dgst & kDgstData) != 0, (hpda + 1u) * 4};
}

}  // namespace

TargetQpair::TargetQpair(const TargetQpairOptions& options)
    : options_(options),
      format_(format_of(options.dgst, options.hpda)),
      state_(options.established ? State::kReady : State::kOpening),
      receiver_(this, rules_of(options)),
      live_(std::make_unique<std::bitset<65536>>()) {
  assert(options.data_pdu_max >= 4 && options.data_pdu_max % 4 == 0);
}

void TargetQpair::lost() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  drop_all();
}

void TargetQpair::take_commands(std::vector<TargetCommand>* commands) {
  std::move(commands_.begin(), commands_.end(), std::back_inserter(*commands));
  commands_.clear();
}

void TargetQpair::take_released(std::vector<uint16_t>* cids) {
  cids->insert(cids->end(), released_.begin(), released_.end());
  released_.clear();
}

// -- answers --------------------------------------------------------------------------------------

// With flow control the host hears how far its queue was read; without, the field is reserved.
uint16_t TargetQpair::sqhd() const {
  if (!options_.sq_flow_control) return 0;
  return static_cast<uint16_t>(commands_taken_ % std::max<uint16_t>(options_.entries, 2));
}

void TargetQpair::answer(uint16_t cid, uint16_t status, uint64_t result) {
  if (state_ != State::kReady) return;
  finish(cid);
  respond(cid, status, result);
}

void TargetQpair::respond(uint16_t cid, uint16_t status, uint64_t result) {
  const auto field = static_cast<uint16_t>(status << 1);
  out_.append(write_capsule_resp(Cqe{result, sqhd(), 0, cid, field}, format_));
}

void TargetQpair::answer_data(uint16_t cid, std::span<const std::byte> data, uint64_t result) {
  assert(!data.empty() && data.size() % 4 == 0 && data.size() <= UINT32_MAX);
  if (state_ != State::kReady) {
    released_.push_back(cid);
    return;
  }
  // SUCCESS stands for a completion whose result is 0.
  const bool short_end = !options_.sq_flow_control && result == 0;
  for (size_t at = 0; at < data.size();) {
    const auto part = data.subspan(at, std::min<size_t>(options_.data_pdu_max, data.size() - at));
    const bool last = at + part.size() == data.size();
    const auto flags = static_cast<uint8_t>(last ? kFlagLast | (short_end ? kFlagSuccess : 0) : 0);
    out_.append(write_c2h_data(cid, static_cast<uint32_t>(at), static_cast<uint32_t>(part.size()),
                               flags, format_));
    out_.borrow(part, last ? cid : kNoRelease);
    if (format_.ddgst) out_.append(data_digest(part));
    at += part.size();
  }
  // The CID stays live until the payload has gone: a host that reuses it earlier is at fault, and
  // would have two payloads borrowed under one CID.
  if (!short_end) respond(cid, kSuccess, result);
}

void TargetQpair::answer_file(uint16_t cid, const FileRange& data, uint32_t crc) {
  assert(data.bytes > 0 && data.bytes % 4 == 0 && data.bytes <= options_.data_pdu_max);
  if (state_ != State::kReady) {
    released_.push_back(cid);
    return;
  }
  const bool short_end = !options_.sq_flow_control;
  const auto flags = static_cast<uint8_t>(kFlagLast | (short_end ? kFlagSuccess : 0));
  out_.append(write_c2h_data(cid, 0, static_cast<uint32_t>(data.bytes), flags, format_));
  out_.borrow(data, cid);
  if (format_.ddgst) out_.append(std::as_bytes(std::span(&crc, 1)));
  if (!short_end) respond(cid, kSuccess, 0);
}

void TargetQpair::finish(uint16_t cid) {
  assert(live_->test(cid));
  live_->reset(cid);
  --live_count_;
}

void TargetQpair::sent(size_t count) {
  parts_gone_.clear();
  out_.sent(count, &parts_gone_);
  release_gone();
}

void TargetQpair::release_gone() {
  for (const uint16_t cid : parts_gone_) {
    if (cid == kNoRelease) continue;
    finish(cid);
    released_.push_back(cid);
  }
}

// -- PDUs -----------------------------------------------------------------------------------------

Fault TargetQpair::on_header(const PduLayout& layout, std::span<const std::byte> header,
                             DataPlace* place) {
  switch (layout.type) {
    case PduType::kICReq:
      return handle_icreq(wire_cast<ICReq>(header));
    case PduType::kCapsuleCmd:
      return handle_capsule_cmd(wire_cast<CapsuleCmd>(header).sqe, layout, place);
    case PduType::kH2CTermReq:
      notice_ = read_term_req(header);
      return {FatalStatus::kSequenceError, 0, "the host ended the connection"};
    default:
      return invalid_field(kTtagAt, "TTAG of an H2CData that nobody asked for");
  }
}

Fault TargetQpair::handle_icreq(const ICReq& pdu) {
  if (const Fault fault = check_icreq(pdu)) return fault;
  options_.established = true;
  options_.dgst &= pdu.dgst;
  options_.hpda = pdu.hpda;
  format_ = format_of(options_.dgst, options_.hpda);
  receiver_.set_rules(rules_of(options_));
  const ICResp answer = make_icresp(0, options_.dgst, options_.maxh2cdata);
  out_.append(std::as_bytes(std::span(&answer, 1)));
  state_ = State::kReady;
  return {};
}

Fault TargetQpair::handle_capsule_cmd(const Sqe& sqe, const PduLayout& layout, DataPlace* place) {
  if (live_count_ + 1u >= std::max<uint16_t>(options_.entries, 2)) {
    return {FatalStatus::kSequenceError, 0, "more commands than the queue holds"};
  }
  if (sqe.cid == kNoRelease) return invalid_field(kCommandCidAt, "CID FFFFh");
  if (live_->test(sqe.cid)) return invalid_field(kCommandCidAt, "CID of a live command");
  live_->set(sqe.cid);
  ++live_count_;
  ++commands_taken_;
  coming_.sqe = sqe;
  coming_.capsule_data.resize(layout.data_bytes);
  place->dest = coming_.capsule_data;
  return {};
}

Fault TargetQpair::on_end(const PduLayout& layout, bool intact) {
  if (layout.type != PduType::kCapsuleCmd) return {};
  if (intact) {
    commands_.push_back(std::exchange(coming_, {}));
  } else {
    ++digest_errors_;
    answer(coming_.sqe.cid, kTransientTransportError);
  }
  return {};
}

// -- the end --------------------------------------------------------------------------------------

void TargetQpair::taken(const Fault& fault) {
  if (!fault || state_ == State::kTerminating || state_ == State::kClosed) return;
  fault_ = fault;
  state_ = State::kTerminating;
  if (notice_) {
    drop_all();  // nobody listens
  } else {
    out_.append(write_term_req(Side::kController, fault, receiver_.header()));
  }
  commands_.clear();
}

void TargetQpair::drop_all() {
  parts_gone_.clear();
  out_.clear(&parts_gone_);
  release_gone();
  commands_.clear();
  receiver_.forget_place();
}

}  // namespace headrace::fabric
