// limit_probe: how fast this machine can read samples in random order, by plain system calls.
//
// The ceiling that loaders are measured against. Uses none of headrace's engines: each mode is the
// shortest program that reads that way, with the buffers recycled as a loader would. Prints one
// line of JSON. See --help.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "workload.h"

namespace headrace::bench {
namespace {

constexpr char kHelp[] =
    R"(limit_probe: reads samples of one file in random order; prints one line of JSON.

  limit_probe --mode MODE --file FILE --manifest EXTENTS [options]

modes
  pread            buffered pread, --threads T
  mmap             memcpy from a mapping, --threads T
  preaddirect      O_DIRECT pread of the aligned superset of each sample, --threads T
  uring-direct     the same through io_uring, --depth D, registered buffers
  uring-direct-4k  aligned 4096-byte random reads over the file, --depth D: the disk's IOPS

options
  --manifest EXTENTS  binary pairs of u64 offset, u64 length (not for uring-direct-4k)
  --seed N            of the random order (default 7)
  --batch N           samples a batch buffer holds (default 256)
  --buffers N         batch buffers that are used in turn (default 3)
  --threads T         (default 1)      --depth D  (default 32)
  --samples N         stop after N samples (default: all; 100000 for uring-direct-4k)
  --seconds S         stop after S seconds
  --fixed-file        uring modes: register the file
  --plain-buffers     uring modes: do not register the buffers

Drop the page cache first for cold figures (echo 3 > /proc/sys/vm/drop_caches); read the file
once for hot ones. Buffers are touched before the clock starts. `cpu_seconds` is user + system.
)";

constexpr uint64_t kSector = 512;
constexpr uint64_t kPage = 4096;

struct Options {
  std::map<std::string, std::string> values;
  const char* text(const char* name) const {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : found->second.c_str();
  }
  double number(const char* name, double otherwise) const {
    const char* value = text(name);
    return value == nullptr ? otherwise : std::atof(value);
  }
  bool has(const char* name) const { return values.count(name) != 0; }
};

struct Workload {
  std::vector<Extent> extents;   // in the order of reading
  std::vector<Extent> reads;     // what is asked of the disk for each: itself, or a superset
  std::vector<uint64_t> places;  // where in its batch's buffer each read goes
  size_t batch = 256;
  size_t buffer_bytes = 0;
  std::vector<std::byte*> buffers;
  double stop_at_s = 0;

  size_t size() const { return reads.size(); }
  std::byte* dest(size_t i) const { return buffers[i / batch % buffers.size()] + places[i]; }
};

void place(Workload& w, bool direct, unsigned buffers) {
  w.reads.resize(w.extents.size());
  w.places.resize(w.extents.size());
  uint64_t end = 0;
  for (size_t i = 0; i < w.extents.size(); ++i) {
    if (i % w.batch == 0) end = 0;
    const Extent& extent = w.extents[i];
    w.reads[i] = extent;
    if (direct) {
      const uint64_t from = extent.offset / kSector * kSector;
      const uint64_t to = (extent.offset + extent.length + kSector - 1) / kSector * kSector;
      w.reads[i] = {from, to - from};
    }
    w.places[i] = end;
    end += w.reads[i].length;
    w.buffer_bytes = std::max<size_t>(w.buffer_bytes, end);
  }
  w.buffer_bytes = (w.buffer_bytes + kPage - 1) / kPage * kPage;
  for (unsigned i = 0; i < buffers; ++i) {
    void* memory = mmap(nullptr, w.buffer_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    w.buffers.push_back(static_cast<std::byte*>(memory));
  }
}

void read_fully(int fd, const Extent& extent, std::byte* dest) {
  for (uint64_t done = 0; done < extent.length;) {
    const ssize_t count = pread(fd, dest + done, extent.length - done, extent.offset + done);
    if (count < 0) fail("pread");
    if (count == 0) return;  // the superset of the last sample may pass the end
    done += count;
  }
}

// Threads take samples one by one. A thread may be in the next batch while another ends this one:
// with several buffers that is what a prefetching loader does.
template <typename ReadOne>
void run_threads(const Workload& w, unsigned threads, Result& result, ReadOne&& read_one) {
  std::atomic<size_t> next = 0;
  std::atomic<size_t> in_first_batch = std::min(w.batch, w.size());
  std::atomic<uint64_t> samples = 0;
  const double start = now_s();
  std::atomic<double> first = 0;
  const auto work = [&] {
    uint64_t done = 0;
    for (;; ++done) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= w.size() || (w.stop_at_s > 0 && i % 64 == 0 && now_s() - start > w.stop_at_s)) break;
      read_one(i);
      if (i < w.batch && --in_first_batch == 0) first = now_s() - start;
    }
    next = std::max(next.load(), w.size());
    samples += done;
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  result.seconds = now_s() - start;
  result.first_batch_s = first;
  result.samples = samples;
}

int open_ring(io_uring& ring, unsigned depth) {
  const int fast =
      io_uring_queue_init(depth, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
  return fast == 0 ? 0 : io_uring_queue_init(depth, &ring, 0);
}

void run_uring(const Workload& w, int fd, unsigned depth, const Options& options, Result& result) {
  io_uring ring;
  if (const int error = open_ring(ring, depth)) {
    errno = -error;
    fail("io_uring_queue_init");
  }
  bool fixed_buffers = !options.has("plain-buffers");
  std::vector<iovec> parts;
  for (std::byte* buffer : w.buffers) parts.push_back({buffer, w.buffer_bytes});
  if (fixed_buffers) {
    fixed_buffers = io_uring_register_buffers(&ring, parts.data(), parts.size()) == 0;
  }
  const bool fixed_file = options.has("fixed-file") && io_uring_register_files(&ring, &fd, 1) == 0;

  const double start = now_s();
  size_t next = 0;
  size_t size = w.size();
  size_t in_first_batch = std::min(w.batch, w.size());
  unsigned busy = 0;
  while (next < size || busy > 0) {
    for (; next < size && busy < depth; ++next, ++busy) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring);
      const Extent& read = w.reads[next];
      const int file = fixed_file ? 0 : fd;
      if (fixed_buffers) {
        io_uring_prep_read_fixed(sqe, file, w.dest(next), read.length, read.offset,
                                 static_cast<int>(next / w.batch % w.buffers.size()));
      } else {
        io_uring_prep_read(sqe, file, w.dest(next), read.length, read.offset);
      }
      if (fixed_file) sqe->flags |= IOSQE_FIXED_FILE;
      sqe->user_data = next;
    }
    if (io_uring_submit_and_wait(&ring, 1) < 0) fail("io_uring_submit_and_wait");
    unsigned head, count = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring, head, cqe) {
      ++count;
      if (cqe->res < 0) {
        errno = -cqe->res;
        fail("read");
      }
      if (cqe->user_data < w.batch && --in_first_batch == 0) result.first_batch_s = now_s() - start;
    }
    io_uring_cq_advance(&ring, count);
    busy -= count;
    result.samples += count;
    if (w.stop_at_s > 0 && now_s() - start > w.stop_at_s) size = std::min(size, next);
  }
  result.seconds = now_s() - start;
  io_uring_queue_exit(&ring);
}

std::vector<Extent> pages_at_random(int fd, uint64_t seed, uint64_t count) {
  struct stat status;
  if (fstat(fd, &status) != 0) fail("fstat");
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<uint64_t> page(0, status.st_size / kPage - 1);
  std::vector<Extent> extents(count);
  for (Extent& extent : extents) extent = {page(random) * kPage, kPage};
  return extents;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name.rfind("--", 0) != 0) {
      std::fputs(kHelp, name == "--help" ? stdout : stderr);
      std::exit(name == "--help" ? 0 : 2);
    }
    const bool is_flag = name == "--fixed-file" || name == "--plain-buffers";
    if (!is_flag && i + 1 == argc) {
      std::fprintf(stderr, "limit_probe: %s needs a value\n", name.c_str());
      std::exit(2);
    }
    options.values[name.substr(2)] = is_flag ? "" : argv[++i];
  }
  return options;
}

void run(const Options& options) {
  Result result;
  const char* file = options.text("file");
  result.mode = options.text("mode") != nullptr ? options.text("mode") : "";
  const bool uring = result.mode.rfind("uring-direct", 0) == 0;
  const bool direct = uring || result.mode == "preaddirect";
  const bool iops = result.mode == "uring-direct-4k";
  if (file == nullptr || !(direct || result.mode == "pread" || result.mode == "mmap") ||
      (!iops && options.text("manifest") == nullptr)) {
    std::fputs(kHelp, stderr);
    std::exit(2);
  }
  const int fd = open(file, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
  if (fd < 0) fail(file);

  Workload w;
  w.batch = static_cast<size_t>(options.number("batch", 256));
  w.stop_at_s = options.number("seconds", 0);
  const auto seed = static_cast<uint64_t>(options.number("seed", 7));
  const double cap = options.number("samples", iops ? 100'000 : 1e18);
  w.extents = iops ? pages_at_random(fd, seed, static_cast<uint64_t>(cap))
                   : in_random_order(load_manifest(options.text("manifest")), seed,
                                     static_cast<uint64_t>(cap));
  place(w, direct, static_cast<unsigned>(options.number("buffers", 3)));

  result.threads = uring ? 1 : static_cast<unsigned>(options.number("threads", 1));
  result.depth = uring ? static_cast<unsigned>(options.number("depth", 32)) : result.threads;
  const double cpu_before = cpu_s();
  if (uring) {
    run_uring(w, fd, result.depth, options, result);
  } else if (result.mode == "mmap") {
    struct stat status;
    if (fstat(fd, &status) != 0) fail("fstat");
    void* mapped = mmap(nullptr, status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) fail("mmap");
    madvise(mapped, status.st_size, MADV_RANDOM);
    const auto* from = static_cast<const std::byte*>(mapped);
    run_threads(w, result.threads, result, [&](size_t i) {
      std::memcpy(w.dest(i), from + w.reads[i].offset, w.reads[i].length);
    });
  } else {
    run_threads(w, result.threads, result,
                [&](size_t i) { read_fully(fd, w.reads[i], w.dest(i)); });
  }
  result.cpu_seconds = cpu_s() - cpu_before;
  for (size_t i = 0; i < std::min<size_t>(result.samples, w.size()); ++i) {
    result.bytes += w.extents[i].length;
  }
  print_json(result);
}

}  // namespace
}  // namespace headrace::bench

int main(int argc, char** argv) {
  headrace::bench::run(headrace::bench::parse(argc, argv));
  return 0;
}
