// SharedMapping: memory that another process shares with us, mapped read-only.
//
// Whoever sends the descriptor is not believed: memory is mapped only if the kernel vouches that
// its pages exist and stay, so that touching them cannot end the process.
//
// A forked child does not inherit the pages, because nobody would know that it keeps them; objects
// that it inherits leave its address space alone.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace headrace {

class SharedMapping {
 public:
  // Maps `size` bytes; the descriptor may be closed afterwards. Throws Error(kInvalidArgument)
  // unless it is a memfd of at least so many bytes, all allocated, sealed against shrinking and
  // against writers to come; Error(kVolume) where the kernel refuses.
  static std::shared_ptr<const SharedMapping> of(int fd, size_t size);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  SharedMapping(const std::byte* data, size_t size);
  const std::byte* data_;
  size_t size_;
  int owner_pid_;
};

}  // namespace headrace
