#include "io/file_work.h"

#include <cerrno>
#include <utility>

namespace headrace::io {

FileWork::FileWork(std::vector<std::string> names, std::vector<FileIdentity> known)
    : paths(std::move(names)),
      states(paths.size(), known.empty() ? FileState::kNew : FileState::kLooked),
      batch(std::make_shared<FileBatch>()),
      looks_left(known.empty() ? paths.size() : 0),
      left(paths.size()) {
  batch->offsets.assign(paths.size(), 0);
  batch->lengths.assign(paths.size(), 0);
  batch->errors.assign(paths.size(), EINPROGRESS);
  batch->identities = std::move(known);
  batch->identities.resize(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    if (paths[i].find('\0') != std::string::npos) end(i, EINVAL);  // no path has a NUL in it
  }
}

std::optional<size_t> FileWork::claim() {
  size_t& next = laid_out ? next_read_ : next_look_;
  const FileState from = laid_out ? FileState::kLooked : FileState::kNew;
  while (next < states.size() && states[next] != from) ++next;
  if (next == states.size()) return std::nullopt;
  states[next] = laid_out ? FileState::kReading : FileState::kLooking;
  return next++;
}

uint64_t FileWork::lay_out(uint64_t file_bytes_max, uint64_t bytes_max) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i] != FileState::kLooked) continue;
    const uint64_t size = batch->identities[i].size;
    if (size > file_bytes_max) {
      end(i, EFBIG);
    } else if (bytes + room_for(size) > bytes_max) {
      end(i, ENOBUFS);
    } else {
      batch->offsets[i] = static_cast<int64_t>(bytes);
      bytes += room_for(size);
    }
  }
  return bytes;
}

void FileWork::refuse_all(int error) {
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i] == FileState::kLooked) end(i, error);
  }
}

void FileWork::give_up(size_t index) {
  const FileState state = states[index];
  if (state == FileState::kLooking) {
    batch->errors[index] = ECANCELED;  // who looks at it sees that
  } else if (state == FileState::kNew || state == FileState::kLooked) {
    end(index, ECANCELED);
  }
}

void FileWork::end(size_t index, int error) {
  if (states[index] == FileState::kNew || states[index] == FileState::kLooking) --looks_left;
  states[index] = FileState::kDone;
  batch->errors[index] = error;
  --left;
}

}  // namespace headrace::io
