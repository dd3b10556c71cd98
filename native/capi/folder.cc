// Mounting a store that lies in a local folder.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "capi/failure.h"
#include "capi/manifest.h"
#include "capi/mounted.h"
#include "capi/segments.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

class File {
 public:
  File(const std::string& path, int missing, const char* advice) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool absent = fd_ < 0 && (errno == ENOENT || errno == ENOTDIR);
    if (absent) throw Failure(missing, path + advice, errno);
    if (fd_ < 0 || ::fstat(fd_, &status_) != 0) {
      const int error = errno;
      if (fd_ >= 0) ::close(fd_);
      fail(error);
    }
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  const struct stat& status() const { return status_; }
  uint64_t bytes() const { return static_cast<uint64_t>(status_.st_size); }
  int64_t mtime_ns() const {
    return status_.st_mtim.tv_sec * int64_t{1'000'000'000} + status_.st_mtim.tv_nsec;
  }
  // Up to `most` bytes from the start.
  std::string read(size_t most) const {
    std::string out(std::min<uint64_t>(most, bytes()), '\0');
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t got =
          ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(errno);
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    out.resize(done);
    return out;
  }

 private:
  [[noreturn]] void fail(int error) const {
    throw Error(ErrorKind::kVolume,
                path_ + ": cannot be read: " + strerror(error) +
                    ". Check the file's permissions and the disk.",
                path_, -1, error);
  }

  const std::string path_;
  int fd_ = -1;
  struct stat status_ {};
};

std::string join(const std::string& folder, const std::string& path) {
  return path.starts_with('/') ? path : folder + "/" + path;
}

[[noreturn]] void fail_changed(const std::string& path, const std::string& what) {
  throw Error(
      ErrorKind::kSourceChanged,
      path + ": " + what + ": the file changed after it was indexed. Index the source again.",
      path);
}

void check_packed(const SegmentEntry& segment, size_t number, const std::string& path) {
  const VolumeEntry& entry = segment.volumes[number];
  const File file(path, HR_ERR_CORRUPT_STORE,
                  ": the volume is missing. Put the file back, or pack the source again.");
  if (file.bytes() != entry.bytes) {
    fail_corrupt(path, "volume size in bytes", std::to_string(file.bytes()),
                 std::to_string(entry.bytes));
  }
  const std::string page = file.read(kPageBytes);
  check_volume_page(std::as_bytes(std::span(page.data(), page.size())), segment, number, path);
}

void check_foreign(const VolumeEntry& entry, const std::string& path) {
  const File file(path, HR_ERR_SOURCE_CHANGED,
                  ": what was indexed is gone. Put it back, or index the source again.");
  if (entry.kind == VolumeEntry::Kind::kTree) {
    if (!S_ISDIR(file.status().st_mode)) fail_changed(path, "this is no folder any more");
    return;
  }
  if (file.bytes() != entry.bytes) {
    fail_changed(path, "size in bytes is " + std::to_string(file.bytes()) + ", expected " +
                           std::to_string(entry.bytes));
  }
  if (file.mtime_ns() != entry.mtime_ns) {
    fail_changed(path, "modification time is " + std::to_string(file.mtime_ns()) +
                           " ns, expected " + std::to_string(entry.mtime_ns) + " ns");
  }
}

std::unique_ptr<io::Volume> open_volume(const SegmentEntry& segment, size_t number,
                                        const std::string& folder) {
  const VolumeEntry& entry = segment.volumes[number];
  if (entry.kind == VolumeEntry::Kind::kObject) {
    throw Failure(HR_ERR_UNSUPPORTED,
                  entry.path +
                      ": objects in a store such as S3 are read by headrace for Python alone. Pack "
                      "the data into a local store.");
  }
  const std::string path = join(folder, entry.path);
  entry.kind == VolumeEntry::Kind::kPacked ? check_packed(segment, number, path)
                                           : check_foreign(entry, path);
  const bool tree = entry.kind == VolumeEntry::Kind::kTree;
  return std::make_unique<io::Volume>(tree ? io::VolumeKind::kTree : io::VolumeKind::kFile, path,
                                      entry.bytes, entry.mtime_ns);
}

std::string absolute(const std::string& folder) {
  char* real = ::realpath(folder.c_str(), nullptr);
  if (real == nullptr) {
    throw Failure(HR_ERR_NO_STORE,
                  folder + ": there is no store here (" + strerror(errno) +
                      "). Check the path, or make a store with headrace pack.",
                  errno);
  }
  const std::string out = real;
  ::free(real);
  return out;
}

}  // namespace

void mount_folder(const std::string& where, Mounted* mounted) {
  const std::string folder = absolute(where);
  const std::string path = folder + "/store.json";
  const File file(path, HR_ERR_NO_STORE,
                  ": there is no store here. Make one with headrace pack or headrace index.");
  const Manifest manifest = parse_manifest(file.read(Json::kBytesMax + 1), path);
  std::vector<std::shared_ptr<Directory>> directories;
  for (const SegmentEntry& segment : manifest.segments) {
    const std::string at = folder + "/" + segment.directory;
    const File directory(at, HR_ERR_NO_STORE,
                         ": the sample directory is missing. Restore the file from a copy, or pack "
                         "or index the source again.");
    if (directory.bytes() != segment.directory_bytes) {
      fail_corrupt(at, "file size in bytes", std::to_string(directory.bytes()),
                   std::to_string(segment.directory_bytes));
    }
    directories.push_back(open_directory(directory.fd(), segment, at));
  }
  mounted->fingerprint = fingerprint_of(directories);
  check_fingerprint(mounted->fingerprint, manifest.fingerprint, path);
  for (size_t s = 0; s < directories.size(); ++s) {
    const SegmentEntry& segment = manifest.segments[s];
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (size_t number = 0; number < segment.volumes.size(); ++number) {
      volumes.push_back(open_volume(segment, number, folder));
    }
    mounted->catalog->add_segment(directories[s], std::move(volumes));
  }
}

}  // namespace headrace::capi
