// Sample: the first part of one sample, read when it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>

#include "capi/mounted.h"

namespace headrace::capi {

// The index of a name in all segments. Throws Failure(HR_ERR_NO_SAMPLE).
uint64_t find_sample(const Mounted& mounted, std::string_view name);

class Sample {
 public:
  Sample(std::shared_ptr<Mounted> mounted, uint64_t index);

  uint64_t index() const { return index_; }
  uint64_t bytes() const { return bytes_; }
  int64_t label() const { return label_; }
  // Copies from `offset` on; returns how many bytes.
  size_t read(uint64_t offset, std::byte* dest, size_t size);

 private:
  std::shared_ptr<io::Batch> fetch(uint64_t start, int64_t size) const;

  const std::shared_ptr<Mounted> mounted_;
  const uint64_t index_;
  uint64_t bytes_ = 0;
  int64_t label_ = -1;
  std::mutex mutex_;
  std::shared_ptr<io::Batch> whole_;  // of small ones, once read
};

}  // namespace headrace::capi
