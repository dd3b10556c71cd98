#include "io/remote_reads.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace headrace::io {
namespace {

using std::chrono::nanoseconds;

// How often a wait looks whether the reader closes.
constexpr auto kLookAround = std::chrono::milliseconds(20);

// New requests are handed over when an eighth of the places is free again: a call into the engine
// may have to take the interpreter's lock.
constexpr size_t kShare = 8;

}  // namespace

RemoteReads::RemoteReads(std::shared_ptr<RemoteEngine> engine, const Catalog& catalog,
                         const EngineOptions& options, double deadline_s)
    : engine_(std::move(engine)),
      catalog_(catalog),
      own_depth_(std::max(1u, options.queue_depth)),
      in_flight_(options.in_flight ? options.in_flight : std::make_shared<InFlight>()),
      deadline_s_(std::clamp(deadline_s, 0.0, 1e9)),
      name_(engine_->name()) {}

void RemoteReads::read(std::span<Read> reads, const OnDone& on_done) {
  inbox_ = std::make_shared<RemoteInbox>();
  batches_.clear();
  started_.assign(reads.size(), {});
  answered_.assign(reads.size(), false);
  begun_ = open_ = 0;
  try {
    read_all(reads, on_done);
  } catch (...) {
    // Requests hold their memory for as long as anybody may write to it.
    for (const auto& batch : batches_) batch->abandon();
    in_flight_->release(static_cast<unsigned>(open_));
    throw;
  }
}

void RemoteReads::read_all(std::span<Read> reads, const OnDone& on_done) {
  const auto deadline = RemoteInbox::Clock::now() + std::chrono::duration_cast<nanoseconds>(
                                                        std::chrono::duration<double>(deadline_s_));
  while (begun_ < reads.size() || open_ > 0) {
    if (in_flight_->closed()) return give_up(reads, ECANCELED, on_done);
    const auto now = RemoteInbox::Clock::now();
    if (now >= deadline) return give_up(reads, ETIMEDOUT, on_done);
    const auto until = std::min(deadline, now + kLookAround);
    const size_t depth = in_flight_->depth(own_depth_);
    const size_t free = depth > open_ ? depth - open_ : 0;
    const size_t wanted = std::min(reads.size() - begun_, free);
    if (wanted > 0 && (open_ == 0 || free * kShare >= depth)) {
      const auto most = static_cast<unsigned>(wanted);
      const unsigned places =
          open_ == 0 ? in_flight_->acquire_until(most, until) : in_flight_->try_acquire(most);
      start(reads, begun_, places);
    }
    if (open_ > 0) take(reads, until, on_done);
  }
}

void RemoteReads::start(std::span<Read> reads, size_t first, size_t count) {
  if (count == 0) return;
  open_ += count;
  std::vector<RemoteRequest> requests;
  std::vector<std::string> paths;
  for (Read& read : reads.subspan(first, count)) {
    read.error = 0;
    read.done = 0;
    requests.push_back({read.volume, read.offset, read.length, read.dest});
    paths.push_back(catalog_.volume(read.volume).path());
  }
  const auto now = InFlight::Clock::now();
  unsigned others = in_flight_->taken() - static_cast<unsigned>(count);
  for (Read& read : reads.subspan(first, count)) read.others = others++;
  std::fill_n(started_.begin() + static_cast<std::ptrdiff_t>(first), count, now);
  batches_.push_back(std::make_shared<RemoteRequests>(std::move(requests), std::move(paths),
                                                      memory_, inbox_, first));
  begun_ += count;
  engine_->read(batches_.back());
}

// Reports what has arrived; waits for the first until `deadline`.
size_t RemoteReads::take(std::span<Read> reads, RemoteInbox::Clock::time_point deadline,
                         const OnDone& on_done) {
  const std::vector<RemoteResult> results = inbox_->take(deadline);
  const auto now = InFlight::Clock::now();
  std::vector<int64_t> took_ns;
  uint64_t bytes = 0;
  for (const RemoteResult& result : results) {
    Read& read = reads[result.number];
    read.took_ns = (now - started_[result.number]) / nanoseconds(1);
    took_ns.push_back(read.took_ns);
    bytes += result.bytes;
  }
  in_flight_->finished(took_ns, bytes);
  open_ -= results.size();
  for (const RemoteResult& result : results) {
    Read& read = reads[result.number];
    answered_[result.number] = true;
    read.error = result.error;
    read.done = result.bytes;
    on_done(read);
  }
  return results.size();
}

void RemoteReads::give_up(std::span<Read> reads, int error, const OnDone& on_done) {
  for (const auto& batch : batches_) batch->abandon();
  while (open_ > 0 && take(reads, RemoteInbox::Clock::time_point::min(), on_done) > 0) {
  }
  in_flight_->release(static_cast<unsigned>(std::exchange(open_, 0)));
  for (size_t i = 0; i < reads.size(); ++i) {
    if (answered_[i]) continue;
    reads[i].error = error;
    reads[i].done = 0;
    on_done(reads[i]);
  }
}

}  // namespace headrace::io
