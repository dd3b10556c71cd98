#include "fabric/host.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/sha.h"

namespace headrace::fabric {
namespace {

// Opcodes and types of Fabrics and admin commands that we send.
constexpr uint8_t kFabrics = 0x7F, kIdentify = 0x06, kSetFeatures = 0x09, kKeepAlive = 0x18;
constexpr uint32_t kPropertySet = 0x00, kConnect = 0x01, kPropertyGet = 0x04;
constexpr uint32_t kNumberOfQueues = 0x07;
constexpr uint32_t kCap = 0x00, kCc = 0x14, kCsts = 0x1C;
constexpr uint32_t kCcEnable = 1 | 6 << 16 | 4 << 20;  // and entries of 64 and 16 bytes
constexpr uint32_t kCcShutdown = 1 << 14;
constexpr uint32_t kReady = 1, kFatal = 2;
constexpr uint16_t kAnyController = 0xFFFF, kNoFlowControl = 0xFFFF;
constexpr uint16_t kAdminEntries = 32;
constexpr uint32_t kCattrNoFlowControl = 1 << 2;
constexpr uint32_t kTransferMax = 1 << 20;

struct ConnectData {
  uint8_t hostid[16] = {};
  uint16_t cntlid = 0;
  uint8_t reserved[238] = {};
  char subnqn[256] = {};
  char hostnqn[256] = {};
  uint8_t reserved_end[256] = {};
};
static_assert(sizeof(ConnectData) == 1024);

template <class T>
T field(std::span<const std::byte> data, size_t offset) {
  T value;
  std::memcpy(&value, data.data() + offset, sizeof value);
  return value;
}

void copy_name(const std::string& name, char (&to)[256]) {
  std::memcpy(to, name.data(), std::min(name.size(), sizeof to - 1));
}

// A version 5 UUID (RFC 4122) in the name space of object identifiers.
std::array<uint8_t, 16> uuid5(const std::string& name) {
  constexpr uint8_t kNamespaceOid[16] = {0x6b, 0xa7, 0xb8, 0x12, 0x9d, 0xad, 0x11, 0xd1,
                                         0x80, 0xb4, 0x00, 0xc0, 0x4f, 0xd4, 0x30, 0xc8};
  std::string text(reinterpret_cast<const char*>(kNamespaceOid), sizeof kNamespaceOid);
  text += name;
  const auto digest = sha1(std::as_bytes(std::span(text.data(), text.size())));
  std::array<uint8_t, 16> out;
  std::copy_n(digest.begin(), out.size(), out.begin());
  out[6] = static_cast<uint8_t>((out[6] & 0x0F) | 0x50);
  out[8] = static_cast<uint8_t>((out[8] & 0x3F) | 0x80);
  return out;
}

std::string uuid_text(const std::array<uint8_t, 16>& uuid) {
  const std::string digits = hex_of(uuid);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    text += digits[i];
  }
  return text;
}

}  // namespace

HostIdentity HostIdentity::of_machine() {
  std::string seed;
  std::ifstream("/etc/machine-id") >> seed;
  if (seed.empty()) {
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    seed = name;
  }
  // Not the machine-id itself: systemd asks that it stays on the machine.
  const auto own = uuid5("headrace host " + seed);
  return {"nqn.2014-08.org.nvmexpress:uuid:" + uuid_text(own), own};
}

ControlQueue::Options Host::queue_options(bool admin) const {
  return {address_.host, address_.port, admin, options_.dgst, options_.timeout_s, options_.stop_fd};
}

Host::Host(const FabricAddress& address, const HostOptions& options)
    : address_(address), options_(options) {
  admin_ = std::make_unique<ControlQueue>(queue_options(true));
  const Completion connected = connect(admin_.get(), 0, kAdminEntries);
  cntlid_ = static_cast<uint16_t>(connected.result);
  if ((connected.result >> 16 & 0xFFFF) != 0) {
    throw HostError(admin_->name() +
                        " asks for DH-HMAC-CHAP authentication, which this library does not speak. "
                        "Allow this host without a key, or read through headrace for Python.",
                    0, true);
  }
  enable();
  const auto controller = identify(1, 0);
  const auto mdts = field<uint8_t>(controller, 77);
  maxcmd_ = field<uint16_t>(controller, 514);
  transfer_max_ = mdts == 0 || mdts > 8 ? kTransferMax : std::min(kTransferMax, 4096u << mdts);
}

Completion Host::connect(ControlQueue* queue, uint16_t qid, uint16_t entries) {
  Sqe sqe;
  sqe.opcode = kFabrics;
  sqe.nsid = kConnect;
  sqe.cdw10 = uint32_t{qid} << 16;
  sqe.cdw11 = (entries - 1u) | (qid == 0 ? 0 : kCattrNoFlowControl << 16);
  sqe.cdw12 = qid == 0 ? options_.kato_ms : 0;
  ConnectData data;
  std::copy(options_.identity.id.begin(), options_.identity.id.end(), data.hostid);
  data.cntlid = qid == 0 ? kAnyController : cntlid_;
  copy_name(address_.subnqn, data.subnqn);
  copy_name(options_.identity.nqn, data.hostnqn);
  return queue->command(sqe, std::as_bytes(std::span(&data, 1)), {},
                        "Connect to " + address_.subnqn + " as " + options_.identity.nqn);
}

void Host::enable() {
  cap_ = get(kCap, true);
  set(kCc, kCcEnable);
  const double patience_s = std::max(1.0, static_cast<double>(cap_ >> 24 & 0xFF) / 2);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_s);
  while (true) {
    const uint64_t csts = get(kCsts, false);
    if (csts & kReady) return;
    if ((csts & kFatal) || std::chrono::steady_clock::now() > deadline) {
      throw HostError(admin_->name() + ": the controller does not get ready: CSTS is " +
                      std::to_string(csts) + ".");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

uint64_t Host::get(uint32_t offset, bool wide) {
  Sqe sqe;
  sqe.opcode = kFabrics;
  sqe.nsid = kPropertyGet;
  sqe.cdw10 = wide ? 1 : 0;
  sqe.cdw11 = offset;
  return admin_->command(sqe, {}, {}, "Property Get " + std::to_string(offset)).result;
}

void Host::set(uint32_t offset, uint64_t value) {
  Sqe sqe;
  sqe.opcode = kFabrics;
  sqe.nsid = kPropertySet;
  sqe.cdw11 = offset;
  sqe.cdw12 = static_cast<uint32_t>(value);
  sqe.cdw13 = static_cast<uint32_t>(value >> 32);
  admin_->command(sqe, {}, {}, "Property Set " + std::to_string(offset));
}

std::vector<std::byte> Host::identify(uint8_t cns, uint32_t nsid) {
  std::vector<std::byte> data(4096);
  Sqe sqe;
  sqe.opcode = kIdentify;
  sqe.nsid = nsid;
  sqe.cdw10 = cns;
  admin_->command(sqe, {}, data, "Identify " + std::to_string(cns));
  return data;
}

NamespaceGeometry Host::geometry(uint32_t nsid) {
  const auto data = identify(0, nsid);
  const auto blocks = field<uint64_t>(data, 0);
  const auto flbas = field<uint8_t>(data, 26);
  const size_t format = (flbas & 0xFu) | (flbas >> 5 & 3u) << 4;
  const auto metadata = field<uint16_t>(data, 128 + 4 * format);
  const auto shift = field<uint8_t>(data, 128 + 4 * format + 2);
  const std::string where = address_.target() + "?ns=" + std::to_string(nsid);
  if (blocks == 0 || shift < 9 || shift > 20 || blocks > uint64_t{1} << (62 - shift)) {
    throw HostError(where + ": there is no such namespace.", ENOENT);
  }
  if (metadata != 0) {
    throw HostError(
        where + " has " + std::to_string(metadata) + " bytes of metadata a block: not supported.",
        0, true);
  }
  NamespaceGeometry out;
  out.nsid = nsid;
  out.block_bytes = 1u << shift;
  out.blocks = blocks;
  return out;
}

std::vector<ConnectedQueue> Host::open_queues(unsigned count) {
  Sqe sqe;
  sqe.opcode = kSetFeatures;
  sqe.cdw10 = kNumberOfQueues;
  sqe.cdw11 = (count - 1) | (count - 1) << 16;
  const auto granted = admin_->command(sqe, {}, {}, "Set Features, Number of Queues").result;
  count = std::min({count, static_cast<unsigned>(granted & 0xFFFF) + 1,
                    static_cast<unsigned>(granted >> 16 & 0xFFFF) + 1});
  std::vector<ConnectedQueue> queues;
  try {
    for (unsigned qid = 1; qid <= count; ++qid) {
      queues.push_back(open_queue(static_cast<uint16_t>(qid)));
    }
  } catch (...) {
    for (const ConnectedQueue& queue : queues) ::close(queue.fd);
    throw;
  }
  return queues;
}

ConnectedQueue Host::open_queue(uint16_t qid) {
  const unsigned most = static_cast<unsigned>(cap_ & 0xFFFF) + 1;
  const unsigned taken = maxcmd_ == 0 ? 1u << 16 : std::max<unsigned>(2, maxcmd_);
  const auto entries = static_cast<uint16_t>(
      std::max(2u, std::min({static_cast<unsigned>(options_.entries), most, taken})));
  ControlQueue queue(queue_options(false));
  const Completion connected = connect(&queue, qid, entries);
  ConnectedQueue out;
  out.options.entries = entries;
  out.options.dgst = queue.dgst();
  out.options.cpda = queue.cpda();
  out.options.sq_flow_control = connected.sqhd != kNoFlowControl;
  out.options.data_max = kTransferMax;
  out.fd = queue.detach();
  return out;
}

void Host::keep_alive() {
  Sqe sqe;
  sqe.opcode = kKeepAlive;
  admin_->command(sqe, {}, {}, "Keep Alive");
}

void Host::shut_down() noexcept {
  try {
    set(kCc, kCcEnable | kCcShutdown);
  } catch (const HostError&) {
    // It is gone already.
  }
}

}  // namespace headrace::fabric
