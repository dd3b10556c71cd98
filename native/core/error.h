// The one exception type that leaves the native library.
//
// Inside, hot code returns status values; a public edge throws `Error`. The binding layer turns
// `kind` into the Python class of the same name in headrace/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace headrace {

enum class ErrorKind : int {
  kInvalidArgument,  // the caller's mistake: ValueError
  kSampleNotFound,   // an index or name that the store does not hold
  kCorruptStore,     // a directory, manifest or volume that contradicts itself
  kCorruptSample,    // a sample whose bytes differ from its checksum
  kSourceChanged,    // a foreign file that is not as it was when it was indexed
  kVolume,           // the operating system refused: carries errno
  kVolumeTimeout,    // a deadline passed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string message, std::string path = {}, int64_t offset_bytes = -1,
        int system_errno = 0)
      : std::runtime_error(std::move(message)),
        kind(kind),
        path(std::move(path)),
        offset_bytes(offset_bytes),
        system_errno(system_errno) {}

  ErrorKind kind;
  std::string path;
  int64_t offset_bytes;
  int system_errno;
};

// Of an argument: `what` is wrong unless it holds.
inline void expect(bool holds, const char* what) {
  if (!holds) throw Error(ErrorKind::kInvalidArgument, what);
}

}  // namespace headrace
