// A TensorFlow operation that cuts the samples of a batch's buffer into strings.
//
// Registered through TensorFlow's C API, whose functions are looked up in the library that the
// process has loaded: neither its headers nor its version are needed to build. It runs in
// TensorFlow's own threads, without Python's lock, and copies each sample once; strings made in
// Python are copied twice under the lock.
#pragma once

#include <string>

namespace headrace::io {

// The operation's name: (data: uint8, offsets: int64, lengths: int64) -> strings: string, shaped
// like offsets.
inline constexpr const char* kStringOperation = "HeadraceStrings";

// Registers the operation, once in a process. `shares`: this TensorFlow's strings can be views that
// share ownership of their memory. Returns why the operation cannot be had, or "".
std::string register_string_kernel(const std::string& framework_library, bool shares);

}  // namespace headrace::io
