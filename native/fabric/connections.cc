#include "fabric/connections.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "io/thread_signals.h"

namespace headrace::fabric {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kPauseS = 0.1, kPauseMaxS = 5;

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

bool same(const NamespaceGeometry& a, const NamespaceGeometry& b) {
  return a.block_bytes == b.block_bytes && a.blocks == b.blocks;
}

std::atomic<uint16_t> labels{0};

}  // namespace

// One controller, and the thread that keeps it.
class Connections::Peer {
 public:
  // Connects. Throws HostError.
  Peer(const FabricAddress& address, const ConnectionsOptions& options, Initiator* initiator)
      : address_(address), options_(options), initiator_(initiator) {
    host_ = std::make_unique<Host>(address_, options_.host);
    number_ = initiator_->add_target(host_->transfer_max());
    attach();
    thread_ = std::thread([this] {
      io::block_signals();
      run();
    });
  }
  ~Peer() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    if (host_ != nullptr) host_->shut_down();
  }

  uint64_t number() const { return number_; }
  uint64_t reconnects() const { return reconnects_; }

  // A namespace as it was when it was opened first.
  NamespaceGeometry geometry(uint32_t nsid) {
    const std::lock_guard lock(mutex_);
    if (const auto it = namespaces_.find(nsid); it != namespaces_.end()) return it->second;
    if (host_ == nullptr || lost_) throw HostError(address_.target() + " is gone: " + why_ + ".");
    return namespaces_[nsid] = host_->geometry(nsid);
  }

  void lost(uint16_t label, const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!labels_.contains(label)) return;  // of an earlier association: no news
      lost_ = true;
      why_ = why;
    }
    changed_.notify_all();
  }

 private:
  void attach() {
    const auto queues = host_->open_queues(options_.queues);
    std::set<uint16_t> fresh;
    for (size_t i = 0; i < queues.size(); ++i) fresh.insert(labels++);
    labels_ = fresh;
    auto label = fresh.begin();
    for (const ConnectedQueue& queue : queues) {
      initiator_->attach(number_, *label++, queue.fd, queue.options);
    }
  }

  // Keeps alive what there is, or connects anew; until closing.
  void run() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
      if (lost_ || host_ == nullptr) {
        reconnect(&lock);
        continue;
      }
      const double interval_s = options_.host.kato_ms / 2000.0;
      changed_.wait_for(lock, seconds(interval_s), [&] { return closing_ || lost_; });
      if (closing_ || lost_) continue;
      try {
        host_->keep_alive();
      } catch (const HostError& e) {
        lost_ = true;
        why_ = e.what();
      }
    }
  }

  // With growing pauses. The lock is free while a connection is made.
  void reconnect(std::unique_lock<std::mutex>* lock) {
    host_.reset();
    labels_.clear();
    double pause_s = kPauseS;
    const auto gone_since = Clock::now();
    while (!closing_) {
      lock->unlock();
      auto made = try_once();
      lock->lock();
      if (made == nullptr) why_ = why_now_;
      if (made != nullptr && !closing_) {
        try {
          host_ = std::move(made);
          attach();
          lost_ = false;
          ++reconnects_;
          return;
        } catch (const HostError& e) {
          host_.reset();
          why_ = e.what();
        }
      }
      if (Clock::now() - gone_since > seconds(options_.give_up_s)) {
        initiator_->give_up(number_, EHOSTDOWN);
      }
      changed_.wait_for(*lock, seconds(pause_s), [&] { return closing_; });
      pause_s = std::min(2 * pause_s, kPauseMaxS);
    }
  }

  std::unique_ptr<Host> try_once() {
    try {
      auto host = std::make_unique<Host>(address_, options_.host);
      for (const auto& [nsid, known] : namespaces_) {
        if (!same(host->geometry(nsid), known)) {
          throw HostError("namespace " + std::to_string(nsid) + " is another one now");
        }
      }
      return host;
    } catch (const HostError& e) {
      why_now_ = e.what();
      return nullptr;
    }
  }

  const FabricAddress address_;
  const ConnectionsOptions options_;
  Initiator* const initiator_;
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Host> host_;
  std::map<uint32_t, NamespaceGeometry> namespaces_;
  std::set<uint16_t> labels_;
  std::string why_;
  std::string why_now_;  // the thread's own
  bool lost_ = false;
  bool closing_ = false;
  std::atomic<uint64_t> reconnects_{0};
  std::thread thread_;
};

Connections::Connections(const ConnectionsOptions& options)
    : options_(options), owner_pid_(::getpid()) {
  stop_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (stop_fd_ < 0) throw std::system_error(errno, std::generic_category(), "NVMe/TCP host");
  options_.host.stop_fd = stop_fd_;
  InitiatorOptions reading;
  reading.command_timeout_s = options_.command_timeout_s;
  reading.read_deadline_s = options_.read_deadline_s;
  initiator_ = std::make_shared<Initiator>(reading);
  watcher_ = std::thread([this] {
    io::block_signals();
    watch();
  });
}

Connections::~Connections() {
  if (::getpid() != owner_pid_) {
    // The threads do not exist here, and ending associations is the parent's.
    watcher_.detach();
    for (auto& [target, peer] : peers_) static_cast<void>(peer.release());
    return;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(stop_fd_, &one, sizeof one);
  watcher_.join();
  initiator_->close();
  peers_.clear();
  ::close(stop_fd_);
}

uint64_t Connections::reconnects() const {
  const std::lock_guard lock(mutex_);
  uint64_t out = 0;
  for (const auto& [target, peer] : peers_) out += peer->reconnects();
  return out;
}

Connections::Peer& Connections::peer_of(const FabricAddress& address) {
  auto& peer = peers_[address.target()];
  if (peer == nullptr) {
    try {
      peer = std::make_unique<Peer>(address, options_, initiator_.get());
    } catch (...) {
      peers_.erase(address.target());
      throw;
    }
  }
  return *peer;
}

uint64_t Connections::open(const std::string& url) { return open(url, url); }

uint64_t Connections::open(const std::string& url, const std::string& name) {
  const FabricAddress address = FabricAddress::parse(url);
  const std::lock_guard lock(mutex_);
  Peer& peer = peer_of(address);
  NamespaceGeometry geometry = peer.geometry(address.nsid);
  const uint64_t whole = geometry.blocks * geometry.block_bytes;
  const Window window = address.window.value_or(Window{0, whole});
  if (window.offset > whole || window.bytes > whole - window.offset) {
    throw Error(ErrorKind::kInvalidArgument,
                url + ": the window leaves the namespace of " + std::to_string(whole) + " bytes",
                url);
  }
  geometry.first_byte = window.offset;
  geometry.bytes = window.bytes;
  initiator_->add_volume(name, peer.number(), geometry);
  return window.bytes;
}

// Tells each peer which of its queues ended.
void Connections::watch() {
  while (true) {
    pollfd polled[2] = {{initiator_->lost_event(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    if (::poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[1].revents != 0) return;
    if (polled[0].revents == 0) continue;
    for (const LostQueue& queue : initiator_->take_lost()) {
      const std::lock_guard lock(mutex_);
      for (const auto& [target, peer] : peers_) {
        if (peer->number() == queue.target) peer->lost(queue.label, queue.reason);
      }
    }
  }
}

}  // namespace headrace::fabric
