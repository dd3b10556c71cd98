#include "io/slow_files.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace headrace::io {

SlowFiles::SlowFiles(std::shared_ptr<SlowModel> model, std::vector<std::string> roots)
    : model_(std::move(model)), roots_(std::move(roots)) {}

bool SlowFiles::has(const char* path) const {
  char resolved[PATH_MAX];
  if (::realpath(path, resolved) == nullptr) return false;  // nothing is there to be slow
  const std::string_view name(resolved);
  return std::any_of(roots_.begin(), roots_.end(), [&](const std::string& root) {
    if (!name.starts_with(root)) return false;
    return name.size() == root.size() || root.ends_with('/') || name[root.size()] == '/';
  });
}

int SlowFiles::read_delay(uint64_t bytes) const {
  model_->open_delay();
  for (uint64_t done = 0; done < bytes; done += kSlowRequestBytes) {
    const int error = model_->read_delay(std::min(kSlowRequestBytes, bytes - done));
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace headrace::io
