#include "fabric/failover.h"

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

namespace headrace::fabric {
namespace {

using io::RemoteInbox;
using io::RemoteRequest;
using io::RemoteRequests;
using io::RemoteResult;

using Places = std::shared_ptr<const std::vector<std::string>>;

// One read of somebody's batch, and how far down its places it is.
struct Asked {
  std::shared_ptr<RemoteRequests> batch;
  size_t number = 0;
  Places places;
  size_t place = 0;  // places->size(): `last`
};

}  // namespace

// What results need, on whatever thread they arrive: it outlives the Failover, but not what it
// reads from, which `close` takes away first. So the engine's own thread never ends the engine.
class Failover::State : public std::enable_shared_from_this<State> {
 public:
  State(io::RemoteEngine* engine, std::shared_ptr<io::RemoteEngine> last)
      : engine_(engine), last_(std::move(last)) {}
  ~State() {
    if (thread_.joinable()) thread_.detach();  // it holds us: it is this very thread
  }

  void add_volume(const std::string& path, std::vector<std::string> places) {
    const std::lock_guard lock(mutex_);
    volumes_[path] = std::make_shared<const std::vector<std::string>>(std::move(places));
  }
  void read(const std::shared_ptr<RemoteRequests>& requests);
  void settle(std::vector<Asked>* asked, std::span<const RemoteResult> results);
  void turn(unsigned reads_in_flight) {
    if (!enter()) return;
    engine_->turn(reads_in_flight);
    leave();
  }
  void close();
  FailoverFigures figures() const;

 private:
  class Inbox;

  // The engine may be called between these. No mutex is held meanwhile: what fails at once comes
  // back on the same thread, and is asked for elsewhere.
  bool enter();
  void leave();
  bool served(const Asked& asked, const RemoteResult& result);
  bool move_on(Asked* asked, const RemoteResult& result);
  void ask(std::vector<Asked> asked);
  void ask_last(std::vector<Asked> asked);
  std::shared_ptr<RemoteRequests> batch_of(std::vector<Asked> asked);
  void run();

  std::mutex mutex_;
  std::condition_variable idle_;
  unsigned calls_ = 0;  // into the engine, now
  bool closing_ = false;
  io::RemoteEngine* const engine_;
  std::unordered_map<std::string, Places> volumes_;

  const std::shared_ptr<io::RemoteEngine> last_;
  std::mutex waiting_mutex_;
  std::condition_variable arrived_;
  std::vector<Asked> waiting_;  // for `last`
  std::thread thread_;
  bool closed_ = false;

  struct Counters {
    std::atomic<uint64_t> reads, bytes, reads_elsewhere, bytes_elsewhere, reads_last, bytes_last,
        unwritten, failed;
  } counters_{};
};

// Results of a batch that was handed on, one for each of `asked`.
class Failover::State::Inbox final : public RemoteInbox {
 public:
  Inbox(std::shared_ptr<State> state, std::vector<Asked> asked)
      : state_(std::move(state)), asked_(std::move(asked)) {}
  using RemoteInbox::put;
  void put(std::span<const RemoteResult> results) override { state_->settle(&asked_, results); }

 private:
  const std::shared_ptr<State> state_;
  std::vector<Asked> asked_;
};

void Failover::State::read(const std::shared_ptr<RemoteRequests>& requests) {
  std::vector<Asked> good;
  std::vector<Asked> last;
  for (size_t i = 0; i < requests->requests().size(); ++i) {
    Places places;
    {
      const std::lock_guard lock(mutex_);
      const auto it = volumes_.find(requests->path(i));
      if (it != volumes_.end()) places = it->second;
    }
    if (places == nullptr) {
      ++counters_.failed;
      requests->finish(i, 0, ENOENT);
      continue;
    }
    Asked asked{requests, i, std::move(places), 0};
    (asked.places->empty() ? last : good).push_back(std::move(asked));
  }
  if (!good.empty()) ask(std::move(good));
  if (!last.empty()) ask_last(std::move(last));
}

std::shared_ptr<RemoteRequests> Failover::State::batch_of(std::vector<Asked> asked) {
  std::vector<RemoteRequest> requests;
  std::vector<std::string> paths;
  // The batches that the bytes go to keep their memory, each as long as it is asked for.
  std::vector<std::shared_ptr<const void>> memory;
  for (const Asked& each : asked) {
    requests.push_back(each.batch->requests()[each.number]);
    paths.push_back(each.place < each.places->size() ? (*each.places)[each.place]
                                                     : each.batch->path(each.number));
    if (memory.empty() || memory.back() != each.batch) memory.push_back(each.batch);
  }
  auto inbox = std::make_shared<Inbox>(shared_from_this(), std::move(asked));
  auto kept = std::make_shared<const std::vector<std::shared_ptr<const void>>>(std::move(memory));
  return std::make_shared<RemoteRequests>(std::move(requests), std::move(paths), std::move(kept),
                                          std::move(inbox), 0);
}

bool Failover::State::enter() {
  const std::lock_guard lock(mutex_);
  if (closing_) return false;
  ++calls_;
  return true;
}

void Failover::State::leave() {
  const std::lock_guard lock(mutex_);
  if (--calls_ == 0) idle_.notify_all();
}

void Failover::State::ask(std::vector<Asked> asked) {
  const auto batch = batch_of(std::move(asked));
  if (enter()) {
    engine_->read(batch);
    leave();
    return;
  }
  for (size_t i = 0; i < batch->requests().size(); ++i) batch->finish(i, 0, ECANCELED);
}

// What places answered: done, or on to the next one. Each of `asked` comes once.
void Failover::State::settle(std::vector<Asked>* asked, std::span<const RemoteResult> results) {
  std::vector<Asked> again;
  std::vector<Asked> last;
  std::shared_ptr<RemoteRequests> batch;  // of the results that are told together
  std::vector<RemoteResult> told;
  const auto tell = [&] {
    if (!told.empty()) batch->finish_many(told);
    told.clear();
  };
  for (const RemoteResult& result : results) {
    Asked each = std::move((*asked)[result.number]);
    if (!served(each, result) && move_on(&each, result)) {
      (each.place < each.places->size() ? again : last).push_back(std::move(each));
      continue;
    }
    if (batch != each.batch) tell();
    batch = each.batch;
    told.push_back({each.number, result.bytes, result.error});
  }
  tell();
  if (!again.empty()) ask(std::move(again));
  if (!last.empty()) ask_last(std::move(last));
}

// Counts a read that a place, or `last`, has served.
bool Failover::State::served(const Asked& asked, const RemoteResult& result) {
  if (result.error != 0) return false;
  const bool last = asked.place >= asked.places->size();
  // Copies are alike: one that ends early is not the volume that was meant.
  if (!last && result.bytes < asked.batch->requests()[asked.number].length) return false;
  auto& reads = last              ? counters_.reads_last
                : asked.place > 0 ? counters_.reads_elsewhere
                                  : counters_.reads;
  auto& bytes = last              ? counters_.bytes_last
                : asked.place > 0 ? counters_.bytes_elsewhere
                                  : counters_.bytes;
  ++reads;
  bytes += result.bytes;
  return true;
}

// Whether another place is to be asked, which `asked` then names.
bool Failover::State::move_on(Asked* asked, const RemoteResult& result) {
  if (result.error == ENODATA) ++counters_.unwritten;
  const size_t next = asked->place + 1;
  const bool more =
      next < asked->places->size() || (next == asked->places->size() && last_ != nullptr);
  if (!more || result.error == ECANCELED || !asked->batch->open(asked->number)) {
    ++counters_.failed;
    return false;
  }
  asked->place = next;
  return true;
}

// `last` may be slow to take a batch (it may be Python's): a thread of its own hands over, and what
// has come meanwhile goes together.
void Failover::State::ask_last(std::vector<Asked> asked) {
  {
    const std::lock_guard lock(waiting_mutex_);
    if (!closed_ && last_ != nullptr) {
      std::move(asked.begin(), asked.end(), std::back_inserter(waiting_));
      asked.clear();
      if (!thread_.joinable()) {
        thread_ = std::thread([state = shared_from_this()] { state->run(); });
      }
    }
  }
  arrived_.notify_one();
  for (const Asked& each : asked) {
    ++counters_.failed;
    each.batch->finish(each.number, 0, last_ == nullptr ? ENODATA : ECANCELED);
  }
}

void Failover::State::run() {
  while (true) {
    std::vector<Asked> asked;
    {
      std::unique_lock lock(waiting_mutex_);
      arrived_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      asked.swap(waiting_);
      if (closed_) {
        lock.unlock();
        for (const Asked& each : asked) each.batch->finish(each.number, 0, ECANCELED);
        return;
      }
    }
    last_->read(batch_of(std::move(asked)));
  }
}

void Failover::State::close() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    idle_.wait(lock, [&] { return calls_ == 0; });
  }
  std::thread thread;
  {
    const std::lock_guard lock(waiting_mutex_);
    closed_ = true;
    thread.swap(thread_);
  }
  arrived_.notify_all();
  if (!thread.joinable()) return;
  // `last` may have let go of us on that very thread.
  thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

FailoverFigures Failover::State::figures() const {
  return {counters_.reads,           counters_.bytes,      counters_.reads_elsewhere,
          counters_.bytes_elsewhere, counters_.reads_last, counters_.bytes_last,
          counters_.unwritten,       counters_.failed};
}

Failover::Failover(std::shared_ptr<io::RemoteEngine> engine, std::shared_ptr<io::RemoteEngine> last)
    : engine_(std::move(engine)), state_(std::make_shared<State>(engine_.get(), std::move(last))) {}
Failover::~Failover() { state_->close(); }

void Failover::add_volume(const std::string& path, std::vector<std::string> places) {
  state_->add_volume(path, std::move(places));
}
void Failover::read(std::shared_ptr<RemoteRequests> requests) { state_->read(requests); }
void Failover::turn(unsigned reads_in_flight) { state_->turn(reads_in_flight); }
void Failover::close() { state_->close(); }
FailoverFigures Failover::figures() const { return state_->figures(); }

}  // namespace headrace::fabric
