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

void SlowFiles::look_delay(int64_t begun_ns) const {
  SlowModel::sleep_until(model_->admit_open(begun_ns));
}

SlowAnswer SlowFiles::read_delay(int64_t begun_ns, uint64_t bytes) const {
  int64_t due_ns = model_->admit_open(begun_ns);
  SlowModel::sleep_until(due_ns);
  for (uint64_t done = 0; done < bytes; done += kSlowRequestBytes) {
    // From when the one before was due, not from when this thread was woken: a busy machine must
    // not make the storage slower than it is said to be.
    const SlowAnswer answer =
        model_->admit(due_ns, std::min(kSlowRequestBytes, bytes - done), false);
    SlowModel::sleep_until(answer.due_ns);
    if (answer.error != 0) return answer;
    due_ns = answer.due_ns;
  }
  return {due_ns, 0};
}

}  // namespace headrace::io
