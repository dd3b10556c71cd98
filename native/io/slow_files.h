// SlowFiles: which files lie on a simulated storage, and what reading them as a whole costs there.
//
// A look at a path asks the metadata server, and so does an open; bytes come in requests of at most
// `kSlowRequestBytes`. Looking again at what was just looked at is free: a client of such a storage
// keeps attributes under a lock, or for some seconds. Thread-safe; its calls sleep.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/slow_model.h"

namespace headrace::io {

// The largest read that goes to a network file system in one piece (rsize, Lustre's RPC size).
inline constexpr uint64_t kSlowRequestBytes = 1 << 20;

class SlowFiles {
 public:
  // `roots`: resolved paths of folders or files that are on it.
  SlowFiles(std::shared_ptr<SlowModel> model, std::vector<std::string> roots);

  // Whether the path leads to a file below one of the roots.
  bool has(const char* path) const;
  // Of what began at `begun_ns`, before the real file was touched: what that took is not added.
  void look_delay(int64_t begun_ns) const;
  // An open and the reads of all bytes: when the last was due, and 0 or EIO.
  SlowAnswer read_delay(int64_t begun_ns, uint64_t bytes) const;

 private:
  const std::shared_ptr<SlowModel> model_;
  const std::vector<std::string> roots_;
};

}  // namespace headrace::io
