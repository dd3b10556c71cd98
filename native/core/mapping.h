// Mapping: a file mapped read-only, whose pages may vanish without killing the process.
//
// If somebody truncates a mapped file, touching the lost pages raises SIGBUS, which would end the
// user's training run. A handler puts zero pages in their place and counts the damage; whoever read
// through the mapping looks at `damaged()` afterwards and reports an error. Faults outside our
// mappings go to the handler that was there before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace headrace {

class Mapping {
 public:
  // Maps `size` bytes of `fd` from its start; the descriptor may be closed afterwards.
  // Throws Error(kVolume) where the kernel refuses or too many files are mapped.
  static std::unique_ptr<Mapping> of_file(int fd, size_t size, const std::string& path);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // Pages of this mapping that were replaced by zeros, ever.
  uint64_t damaged() const;

 private:
  Mapping(const std::byte* data, size_t size, int slot) : data_(data), size_(size), slot_(slot) {}
  const std::byte* data_;
  size_t size_;
  int slot_;
};

// Makes sure that our SIGBUS handler is the outermost one (another library may have put its own
// in front since). Costs one system call: call it once per batch, not per sample.
void guard_mappings();

}  // namespace headrace
