#include "fabric/qpair.h"

#include <algorithm>
#include <cassert>

namespace headrace::fabric {
namespace {

constexpr uint32_t kCccidAt = 8, kSqhdAt = 16, kCidAt = 20, kStatusAt = 22;
constexpr uint32_t kDataOffsetAt = 12, kDataLengthAt = 16, kFlagsAt = 1;

PduRules rules_of(const QpairOptions& options) {
  PduRules rules;
  rules.side = Side::kHost;
  rules.established = options.established;
  rules.hdgst = options.established && (options.dgst & kDgstHeader);
  rules.ddgst = options.established && (options.dgst & kDgstData);
  rules.alignment = 4;  // our ICReq asks for HPDA 0
  rules.data_max = options.data_max;
  return rules;
}

PduFormat format_of(uint8_t dgst, uint8_t cpda) {
  return {(dgst & kDgstHeader) != 0, (dgst & kDgstData) != 0, (cpda + 1u) * 4};
}

// The part of a command's memory that `length` bytes from `offset` go to.
DataPlace place_within(const DataPlace& whole, uint32_t offset, uint32_t length) {
  const size_t begin = std::max<size_t>(offset, whole.skip);
  const size_t end = std::min<size_t>(offset + size_t{length}, whole.skip + whole.dest.size());
  if (begin >= end) return {};
  return {begin - offset, whole.dest.subspan(begin - whole.skip, end - begin)};
}

}  // namespace

Qpair::Qpair(const QpairOptions& options)
    : options_(options),
      format_(format_of(options.dgst, options.cpda)),
      state_(options.established ? State::kReady : State::kOpening),
      receiver_(this, rules_of(options)),
      slots_(std::max<uint16_t>(options.entries, 2) - 1u) {
  for (size_t cid = 0; cid < slots_.size(); ++cid) free_.push_back(static_cast<uint16_t>(cid));
  if (!options.established) {
    const ICReq pdu = make_icreq(0, options.dgst, 0);
    out_.append(std::as_bytes(std::span(&pdu, 1)));
  }
}

bool Qpair::submit(const Command& command) {
  assert(command.data_bytes <= options_.data_max);
  assert(command.capsule_data.size() <= options_.capsule_data_max);
  assert(command.place.skip + command.place.dest.size() <= command.data_bytes);
  if (room() == 0) return false;
  const uint16_t cid = take_cid();
  slots_[cid] = {Slot::State::kLive, false,        command.data_bytes, 0,
                 command.place,      command.user, command.deadline_ns};
  ++live_;
  Sqe sqe = command.sqe;
  sqe.cid = cid;
  const auto data_bytes = static_cast<uint32_t>(command.capsule_data.size());
  out_.append(write_capsule_cmd(sqe, data_bytes, format_));
  if (data_bytes > 0) {
    out_.append(command.capsule_data);
    if (format_.ddgst) out_.append(data_digest(command.capsule_data));
  }
  return true;
}

void Qpair::lost() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  out_.clear(&released_);
  lose_commands();
}

void Qpair::expire(int64_t now_ns) {
  if (live_ == 0) return;
  for (size_t cid = 0; cid < slots_.size(); ++cid) {
    Slot& slot = slots_[cid];
    if (slot.state != Slot::State::kLive || slot.deadline_ns > now_ns) continue;
    completions_.push_back({slot.user, Outcome::kTimedOut, 0, 0});
    slot.state = Slot::State::kOverdue;
    slot.place = {};
    if (cid == cid_now_) receiver_.forget_place();
    --live_;
    ++overdue_;
  }
}

int64_t Qpair::next_deadline_ns() const {
  int64_t next = INT64_MAX;
  if (live_ == 0) return next;
  for (const Slot& slot : slots_) {
    if (slot.state == Slot::State::kLive) next = std::min(next, slot.deadline_ns);
  }
  return next;
}

void Qpair::take_completions(std::vector<Completion>* completions) {
  completions->insert(completions->end(), completions_.begin(), completions_.end());
  completions_.clear();
}

// -- PDUs -----------------------------------------------------------------------------------------

Fault Qpair::on_header(const PduLayout& layout, std::span<const std::byte> header,
                       DataPlace* place) {
  switch (layout.type) {
    case PduType::kICResp:
      return handle_icresp(wire_cast<ICResp>(header));
    case PduType::kC2HData:
      return handle_c2h_data(wire_cast<DataPdu>(header), layout, place);
    case PduType::kCapsuleResp:
      return handle_capsule_resp(wire_cast<CapsuleResp>(header).cqe);
    case PduType::kC2HTermReq:
      notice_ = read_term_req(header);
      return {FatalStatus::kSequenceError, 0, "the controller ended the connection"};
    default:
      return {FatalStatus::kSequenceError, 0, "R2T: this host sends no data"};
  }
}

Fault Qpair::handle_icresp(const ICResp& pdu) {
  if (const Fault fault = check_icresp(pdu, options_.dgst)) return fault;
  options_.established = true;
  options_.dgst = pdu.dgst;
  options_.cpda = pdu.cpda;
  format_ = format_of(pdu.dgst, pdu.cpda);
  receiver_.set_rules(rules_of(options_));
  state_ = State::kReady;
  return {};
}

Fault Qpair::handle_c2h_data(const DataPdu& pdu, const PduLayout& layout, DataPlace* place) {
  if (const Fault fault = check_data(pdu, layout)) return fault;
  const Slot* slot = occupied(pdu.cccid);
  if (slot == nullptr) return invalid_field(kCccidAt, "CCCID names no live command");
  if (pdu.datao != slot->received) {
    return {FatalStatus::kOutOfRange, kDataOffsetAt, "DATAO is not where the data before ended"};
  }
  if (pdu.datal > slot->expected - slot->received) {
    return {FatalStatus::kOutOfRange, kDataLengthAt, "more data than the command asks for"};
  }
  const bool ends = slot->received + pdu.datal == slot->expected;
  if (ends != static_cast<bool>(layout.flags & kFlagLast)) {
    return invalid_field(kFlagsAt, "LAST_PDU disagrees with the data that came");
  }
  if ((layout.flags & kFlagSuccess) && options_.sq_flow_control) {
    return invalid_field(kFlagsAt, "SUCCESS while flow control is on");
  }
  cid_now_ = pdu.cccid;
  *place = place_within(slot->place, pdu.datao, pdu.datal);
  return {};
}

Fault Qpair::on_end(const PduLayout& layout, bool intact) {
  if (layout.type != PduType::kC2HData) return {};
  Slot& slot = slots_[cid_now_];
  slot.received += layout.data_bytes;
  if (!intact) {
    slot.damaged = true;
    ++digest_errors_;
  }
  if (layout.flags & kFlagSuccess) complete(cid_now_, kSuccess, 0);
  return {};
}

Fault Qpair::handle_capsule_resp(const Cqe& cqe) {
  const Slot* slot = occupied(cqe.cid);
  if (slot == nullptr) return invalid_field(kCidAt, "CID names no live command");
  if (options_.sq_flow_control && cqe.sqhd > slots_.size()) {
    return invalid_field(kSqhdAt, "SQHD exceeds the queue");
  }
  const auto status = static_cast<uint16_t>(cqe.status >> 1);
  if (status == kSuccess && slot->received < slot->expected) {
    return {FatalStatus::kSequenceError, kStatusAt, "success before all data came"};
  }
  complete(cqe.cid, status, cqe.result, cqe.sqhd);
  return {};
}

// -- commands -------------------------------------------------------------------------------------

Qpair::Slot* Qpair::occupied(uint16_t cid) {
  if (cid >= slots_.size() || slots_[cid].state == Slot::State::kFree) return nullptr;
  return &slots_[cid];
}

uint16_t Qpair::take_cid() {
  const uint16_t cid = free_[free_head_];
  free_head_ = (free_head_ + 1) % free_.size();
  ++free_taken_;
  return cid;
}

void Qpair::free(uint16_t cid) {
  free_[(free_head_ + free_.size() - free_taken_) % free_.size()] = cid;
  --free_taken_;
  slots_[cid] = {};
}

void Qpair::complete(uint16_t cid, uint16_t status, uint64_t result, uint16_t sqhd) {
  const Slot& slot = slots_[cid];
  if (slot.state == Slot::State::kLive) {
    if (slot.damaged && status == kSuccess) status = kTransientTransportError;
    completions_.push_back({slot.user, Outcome::kAnswered, status, result, sqhd});
    --live_;
  } else {
    --overdue_;
  }
  free(cid);
}

// -- the end --------------------------------------------------------------------------------------

void Qpair::taken(const Fault& fault) {
  if (!fault || state_ == State::kTerminating || state_ == State::kClosed) return;
  fault_ = fault;
  state_ = State::kTerminating;
  if (notice_) {
    out_.clear(&released_);  // nobody listens
  } else {
    out_.append(write_term_req(Side::kHost, fault, receiver_.header()));
  }
  lose_commands();
}

void Qpair::lose_commands() {
  for (Slot& slot : slots_) {
    if (slot.state == Slot::State::kLive) {
      completions_.push_back({slot.user, Outcome::kLost, 0, 0});
    }
    slot.state = Slot::State::kFree;
    slot.place = {};
  }
  receiver_.forget_place();
  live_ = overdue_ = 0;
}

}  // namespace headrace::fabric
