// DecodePool: threads that decode pictures into batches, without the interpreter.
//
// A batch is one job; its pictures are shared out one at a time, those of the oldest job first. The
// number of threads may be changed at any time; a smaller one takes effect as pictures are
// finished. Threads sleep while there is nothing to do, and belong to the process that made the
// pool.
//
// Memory: each job's pixels lie in one recycled buffer, which goes back when its last owner lets
// go.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "io/batch.h"
#include "pixels/decode.h"
#include "pixels/recipe.h"

namespace headrace::pixels {

inline constexpr unsigned kThreadsMax = 1024;

struct DecodeStats {
  double busy_s = 0;  // that threads decoded, added up
  double idle_s = 0;  // that they waited for batches
  uint64_t pictures = 0;
  uint64_t bytes = 0;           // encoded
  uint64_t buffered_bytes = 0;  // pixels being decoded, or decoded and not taken
};

struct DecodeFailure {
  uint64_t sample;  // its place in the batch
  std::string reason;
  bool of_mask;  // the picture was decoded, and its mask was not
};

// What is asked of a pool. REQUIRES recipes that `check` accepts; see Worker::decode.
struct DecodeRequest {
  std::vector<Recipe> recipes{};  // of each sample's outputs, one after the other
  std::shared_ptr<io::Batch> batch{};
  uint64_t part = 0;  // whose bytes are the picture
  uint64_t seed = 0, epoch = 0;
  std::vector<Step> steps{};            // as many of each output
  std::optional<uint64_t> mask_part{};  // whose bytes are the picture's mask
  uint8_t mask_fill = 0;
  // Pictures become what `keep_short` of the one recipe keeps of them, as PPM, and nothing is cut
  // out of them: see DecodeJob::reduced.
  bool reduces = false;
};

class DecodePool;

// One batch. Its results are complete, and may be read without a lock, once it is done.
class DecodeJob : public DecodeRequest, public std::enable_shared_from_this<DecodeJob> {
 public:
  explicit DecodeJob(DecodeRequest request) : DecodeRequest(std::move(request)) {}
  bool done() const { return left_.load(std::memory_order_acquire) == 0; }
  // False: not done after so many seconds.
  bool wait(double seconds) const;

  BufferPtr pixels;
  BufferPtr masks;                              // a byte for each pixel, where there is `mask_part`
  std::vector<std::array<double, 6>> mappings;  // of each sample's last output: Worker::mapping
  std::vector<DecodeFailure> failures;          // by sample
  // Where it `reduces`: the batch with its pictures reduced; those that cannot be decoded here, and
  // where memory is out all, are as they were.
  std::shared_ptr<io::Batch> reduced;
  // Seconds of the steady clock.
  double begun_s = 0, ended_s = 0;
  double busy_s = 0, cpu_s = 0;  // of its pictures, added up

  // Where an output begins in its sample's bytes, and how many those are.
  size_t place(size_t output) const;
  size_t sample_bytes() const { return place(recipes.size()); }
  std::byte* at(uint64_t sample, size_t output = 0) const {
    return pixels->data + sample * sample_bytes() + place(output);
  }
  std::span<const uint8_t> encoded(uint64_t sample, uint64_t of_part) const;
  // What follows a sample's picture, which the worker has just decoded or resized: its mapping and
  // its mask. Says why there is none.
  Reason follow(Worker& worker, uint64_t sample);
  // REQUIRES that it is done: of the batch only its indices are kept, and its bytes are let go of.
  void let_go();
  // Whatever cannot be decoded.
  void clear(uint64_t sample);
  Output output(uint64_t sample, size_t output = 0) const;

 private:
  friend class DecodePool;
  // Finds room for what becomes of all pictures, as their headers say.
  void lay_out(Worker& worker, Arena& arena);
  std::shared_ptr<io::Batch> room_for_reduced(Arena& arena) const;
  // Fills a sample's room.
  void reduce(Worker& worker, uint64_t sample, Arena& arena);
  void make_good(Arena& arena);

  std::once_flag laid_out_;
  std::vector<Recipe> wholes_;  // of what can be decoded here; others have no side
  std::atomic<uint64_t> unreduced_{0};
  std::atomic<bool> damaged_{false};  // a picture whose header could be read
  uint64_t next_ = 0;                 // picture that nobody has begun with
  std::atomic<uint64_t> left_{0};
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
};

class DecodePool {
 public:
  // `retained_bytes`: of free buffers that are kept. `kept_bytes`: of decoded pictures, by recipes
  // with `keep_short`; they must all be the same recipe's, and indices the same pictures'.
  // `memory`: of its buffers. `done_fd`: an eventfd that is rung whenever a batch is done; -1:
  // none.
  DecodePool(unsigned threads, size_t retained_bytes, size_t kept_bytes = 0,
             Memory memory = Memory::kPrivate, int done_fd = -1);
  // Ends the threads; pictures that are under way are finished, other jobs end as failed.
  ~DecodePool();
  DecodePool(const DecodePool&) = delete;
  DecodePool& operator=(const DecodePool&) = delete;

  // Each picture becomes one output or more. Throws Error(kVolume, ENOMEM), Error(kInvalidArgument)
  // for a part that the batch lacks, or steps that do not fit.
  std::shared_ptr<DecodeJob> submit(DecodeRequest request);
  void turn(unsigned threads);
  DecodeStats stats() const;
  size_t mapped_bytes() const { return arena_->mapped_bytes() + kept_.held().second; }
  const KeptPictures& kept() const { return kept_; }

 private:
  void work(unsigned number);

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<DecodeJob>> jobs_;  // with pictures that nobody has begun with
  std::vector<std::weak_ptr<DecodeJob>> held_;   // for buffered_bytes
  std::vector<std::thread> threads_;
  unsigned wanted_ = 0;
  bool closed_ = false;
  DecodeStats stats_;
  const int done_fd_;
  std::shared_ptr<Arena> arena_;
  KeptPictures kept_;
};

}  // namespace headrace::pixels
