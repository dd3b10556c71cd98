// Arena: recycled, page-aligned buffers.
//
// The first touch of fresh memory costs four times the copy into it (page faults), so buffers are
// kept when their user lets go of them and handed out again. A buffer has an identity that is never
// reused, by which engines register it with the kernel once. Thread-safe. Buffers may outlive the
// user's reference to the arena. A forked child may use it too, without recycling: its buffers have
// the id 0, which engines do not register.
//
// An arena of shared memory makes each buffer a sealed memfd, which other processes may map but
// never write: what is read or gathered into it reaches them without another copy. Such a buffer
// that somebody may still look at must be abandoned, so that it is not handed out again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace headrace {

class Arena;

// kSharedSmallPages: for what is filled once and kept. Looking for huge pages would hold up whoever
// reads meanwhile.
enum class Memory { kPrivate, kShared, kSharedSmallPages };

// An arena that retains so much unmaps nothing while it lives: for buffers that somebody has
// page-locked, who must unlock them first.
inline constexpr size_t kRetainAll = SIZE_MAX;

// Memory of one batch. Goes back to its arena when the last owner lets go.
struct Buffer {
  std::byte* data = nullptr;
  size_t capacity = 0;
  uint64_t id = 0;  // unique in this process
  int fd = -1;      // of shared memory
  // Unmapped rather than recycled when the last owner lets go. Set by an owner.
  mutable bool abandoned = false;
  // The kernel may still write to it: its memory is given back, its addresses are never used again.
  // Set by an owner.
  mutable bool lost = false;
  std::span<std::byte> memory() const { return {data, capacity}; }
};
using BufferPtr = std::shared_ptr<const Buffer>;

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static std::shared_ptr<Arena> make(size_t retained_bytes_max, Memory memory = Memory::kPrivate);
  ~Arena();

  // At least `bytes` bytes at a 4,096-byte boundary. Throws Error(kVolume, ENOMEM).
  BufferPtr acquire(size_t bytes);

  // A listener hears of every buffer that is unmapped from now on; `take_unmapped` empties its
  // inbox. Engines use it to unregister buffers.
  int listen();
  void stop_listening(int listener);
  std::vector<uint64_t> take_unmapped(int listener);

  size_t mapped_bytes() const;
  // Keeps at most so many bytes of free buffers from now on.
  void retain_at_most(size_t bytes);

  // The ids of shared buffers, of whatever arena, that were unmapped since the last call.
  static std::vector<uint64_t> take_retired_shared();

 private:
  Arena(size_t retained_bytes_max, Memory memory);
  void release(const Buffer& buffer);
  void retire_locked(size_t i, std::vector<Buffer>* surplus);

  mutable std::mutex mutex_;
  std::vector<Buffer> free_;
  std::map<int, std::vector<uint64_t>> inboxes_;
  int next_listener_ = 0;
  size_t free_bytes_ = 0;
  size_t mapped_bytes_ = 0;
  size_t retained_bytes_max_;
  const Memory memory_;
  const int owner_pid_;
};

}  // namespace headrace
