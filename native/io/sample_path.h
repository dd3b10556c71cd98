// Whether a sample's name may be opened as a file below its tree: a directory from elsewhere must
// not lead out of the folder it was made for.
#pragma once

#include <string_view>

namespace headrace::io {

// False for names that are empty or absolute, hold a NUL (the system would open another file) or a
// component "..".
inline bool stays_below(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string_view::npos) {
    return false;
  }
  while (!name.empty()) {
    const size_t slash = name.find('/');
    if (name.substr(0, slash) == "..") return false;
    if (slash == std::string_view::npos) break;
    name.remove_prefix(slash + 1);
  }
  return true;
}

}  // namespace headrace::io
