#include "io/catalog.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/crc32c.h"
#include "core/error.h"
#include "io/blocking.h"
#include "io/sample_path.h"

namespace headrace::io {
namespace {

// Descriptors that are left for the rest of the process.
constexpr int64_t kDescriptorHeadroom = 24;

int64_t open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 64;
  int64_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

class File {
 public:
  File(int directory, const char* path)
      : fd_(openat(directory, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Bytes until `length` or the end of the file, or -errno. A file that was opened with O_NONBLOCK
// may say EAGAIN: tried again a few times, then it is the error.
int64_t read_fully(int fd, std::byte* dest, uint64_t offset, uint64_t length, const Syscalls& sys) {
  const Read read = read_blocking(fd, offset, length, dest, sys);
  return read.error != 0 ? -read.error : static_cast<int64_t>(read.done);
}

}  // namespace

void Catalog::add_segment(std::shared_ptr<Directory> directory,
                          std::vector<std::unique_ptr<Volume>> volumes) {
  Segment segment;
  segment.base = samples_;
  segment.volume_base = static_cast<uint32_t>(volumes_.size());
  segment.volumes = static_cast<uint32_t>(volumes.size());
  for (const std::string& name : directory->part_names()) {
    auto it = std::find(part_names_.begin(), part_names_.end(), name);
    segment.part_map.push_back(static_cast<int>(it - part_names_.begin()));
    if (it == part_names_.end()) part_names_.push_back(name);
  }
  samples_ += directory->samples();
  segment.directory = std::move(directory);
  segments_.push_back(std::move(segment));
  for (auto& volume : volumes) volumes_.push_back(std::move(volume));
}

void Catalog::seal() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int64_t free =
      static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) - open_descriptors();
  const auto files = std::count_if(volumes_.begin(), volumes_.end(), [](const auto& volume) {
    return volume->kind() != VolumeKind::kRemote;
  });
  // A volume may hold two descriptors, buffered and direct.
  open_per_read_ = 2 * files > free - kDescriptorHeadroom;
}

const Segment& Catalog::later_segment_of(uint64_t index) const {
  auto it = std::upper_bound(segments_.begin(), segments_.end(), index,
                             [](uint64_t i, const Segment& s) { return i < s.base; });
  return *std::prev(it);
}

void Catalog::check_index(int64_t index) const {
  if (index >= 0 && static_cast<uint64_t>(index) < samples_) return;
  throw Error(ErrorKind::kSampleNotFound, "sample index " + std::to_string(index) +
                                              " is outside 0.." +
                                              std::to_string(static_cast<int64_t>(samples_) - 1));
}

void Catalog::fail_extent(const Segment& segment, uint64_t sample, const Extent& extent) const {
  const std::string& path = segment.directory->path();
  throw Error(ErrorKind::kCorruptStore,
              path + ": sample " + std::to_string(segment.base + sample) +
                  " is said to lie in volume " + std::to_string(extent.volume) + " of " +
                  std::to_string(segment.volumes) + ", offset " + std::to_string(extent.offset) +
                  ", length " + std::to_string(extent.length) +
                  ", which leaves that volume. The directory belongs to other volumes; pack or "
                  "index again.",
              path);
}

bool Catalog::read_extent(const Segment& segment, uint64_t sample, const Extent& extent,
                          uint64_t start, uint64_t length, std::byte* dest, Failure* failure,
                          const RemoteCall* remote) const {
  *failure = {0,
              FailureKind::kSystem,
              0,
              0,
              extent.crc,
              segment.volume_base + extent.volume,
              extent.offset,
              extent.length};
  Volume& v = volume(segment.volume_base + extent.volume);
  int64_t got;
  if (v.kind() == VolumeKind::kRemote) {
    got = remote == nullptr || remote->engine == nullptr
              ? -ENOTSUP
              : read_remote(*remote, segment.volume_base + extent.volume, v.path(),
                            extent.offset + start, length, dest);
  } else if (v.kind() == VolumeKind::kTree) {
    std::string name;
    segment.directory->name(sample, &name);
    if (!stays_below(name)) {
      failure->kind = FailureKind::kChanged;
      failure->system_errno = ENOENT;
      return false;
    }
    const File file(v.fd(), name.c_str());
    struct stat status;
    if (file.fd() < 0 || fstat(file.fd(), &status) != 0) {
      failure->system_errno = errno;
      if (errno == ENOENT) failure->kind = FailureKind::kChanged;
      return false;
    }
    const int64_t mtime = status.st_mtim.tv_sec * int64_t{1'000'000'000} + status.st_mtim.tv_nsec;
    if (!S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) != extent.length ||
        (extent.mtime_ns >= 0 && mtime != extent.mtime_ns)) {
      failure->kind = FailureKind::kChanged;
      failure->system_errno = ESTALE;
      return false;
    }
    got = read_fully(file.fd(), dest, start, length, sys_);
  } else if (open_per_read_) {
    // A throw-away volume repeats the checks of size and mtime and closes its descriptor.
    Volume once(v.kind(), v.path(), v.bytes(), v.mtime_ns());
    got = read_fully(once.fd(), dest, extent.offset + start, length, sys_);
  } else {
    got = read_fully(v.fd(), dest, extent.offset + start, length, sys_);
  }
  if (got < 0) {
    failure->system_errno = static_cast<int>(-got);
    return false;
  }
  if (static_cast<uint64_t>(got) != length) {
    failure->kind = FailureKind::kShort;
    return false;
  }
  return true;
}

std::shared_ptr<Batch> Catalog::read_one(Arena& arena, int64_t index, int part, uint64_t start,
                                         int64_t size, bool verify) const {
  check_index(index);
  const Segment& segment = segment_of(static_cast<uint64_t>(index));
  const uint64_t sample = static_cast<uint64_t>(index) - segment.base;
  auto batch = std::make_shared<Batch>();
  batch->samples = 1;
  batch->indices = {index};
  batch->labels = {segment.directory->label(sample)};
  batch->offsets = {0};
  batch->lengths = {0};
  const auto [first, last] = segment.directory->extents_of(sample);
  for (uint64_t e = first; e < last; ++e) {
    const uint32_t p = segment.directory->part(e);
    if (part >= 0 && (p >= segment.part_map.size() || segment.part_map[p] != part)) continue;
    const Extent extent = segment.directory->extent(e);
    segment.directory->assert_whole();
    check_extent(segment, sample, extent);
    const uint64_t from = std::min(start, extent.length);
    const uint64_t length =
        size < 0 ? extent.length - from : std::min<uint64_t>(size, extent.length - from);
    batch->buffer = arena.acquire(length);
    batch->bytes = length;
    Failure failure;
    auto* dest = const_cast<std::byte*>(batch->buffer->data);
    const RemoteCall remote{remote_, batch->buffer};
    if (!read_extent(segment, sample, extent, from, length, dest, &failure, &remote)) {
      batch->failures.push_back(failure);
    } else if (verify && segment.directory->has_crc() && length == extent.length) {
      failure.crc_found = crc32c(0, dest, length);
      failure.kind = FailureKind::kChecksum;
      if (failure.crc_found != extent.crc) batch->failures.push_back(failure);
    }
    batch->lengths = {static_cast<int64_t>(length)};
    return batch;
  }
  batch->buffer = arena.acquire(0);
  return batch;
}

std::shared_ptr<Batch> Catalog::filled_up(Arena& arena, std::vector<int64_t> indices,
                                          const Batch* read,
                                          std::span<const int64_t> positions) const {
  auto batch = read == nullptr ? std::make_shared<Batch>() : std::make_shared<Batch>(*read);
  if (batch->samples != positions.size()) {
    throw Error(ErrorKind::kInvalidArgument, "there is not one position for each sample");
  }
  if (read == nullptr) batch->buffer = arena.acquire(0);
  const uint64_t parts = batch->parts;
  batch->samples = indices.size();
  batch->labels.clear();
  batch->offsets.assign(indices.size() * parts, 0);
  batch->lengths.assign(indices.size() * parts, 0);
  for (const int64_t index : indices) {
    check_index(index);
    const Segment& segment = segment_of(static_cast<uint64_t>(index));
    batch->labels.push_back(segment.directory->label(static_cast<uint64_t>(index) - segment.base));
  }
  for (size_t k = 0; k < positions.size(); ++k) {
    const auto at = static_cast<uint64_t>(positions[k]);
    if (at >= indices.size() || indices[at] != read->indices[k]) {
      throw Error(ErrorKind::kInvalidArgument, "a sample is not the one at its position");
    }
    std::copy_n(&read->offsets[k * parts], parts, &batch->offsets[at * parts]);
    std::copy_n(&read->lengths[k * parts], parts, &batch->lengths[at * parts]);
  }
  for (Failure& failure : batch->failures) {
    failure.slot =
        static_cast<uint64_t>(positions[failure.slot / parts]) * parts + failure.slot % parts;
  }
  batch->indices = std::move(indices);
  return batch;
}

}  // namespace headrace::io
