// engine_probe: the workload of limit_probe through headrace's engines, batch by batch.
//
// Prints the same line of JSON, so that an engine is judged by its ratio to the limit, side by
// side in one run. Also reads a folder's files by path. See --help.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

#include "io/engine.h"
#include "io/uring.h"
#include "workload.h"

namespace headrace::bench {
namespace {

constexpr char kHelp[] =
    R"(engine_probe: reads samples through an engine; prints one line of JSON like limit_probe.

  engine_probe --engine uring|threads --file FILE --manifest EXTENTS [options]
  engine_probe --engine uring|threads --folder FOLDER [options]    files named 0, 1, 2, ...

  --folders N    FOLDER holds N folders: file i is i % N/i
  --seed N (7)  --batch N (256)  --buffers N (3)  --samples N (all)
  --depth D (32)  --threads T (16)
  --cold 1       drop the page cache just before the clock starts (root)
  --batches N    batches that one call reads (1): a plane prefetches several
  --buffered 1   without O_DIRECT
  --plain-buffers 1, --wait-share N   inner choices of the uring engine
)";

constexpr uint64_t kSector = 512;

using Options = std::map<std::string, std::string>;

double number(const Options& options, const char* name, double otherwise) {
  const auto found = options.find(name);
  return found == options.end() ? otherwise : std::atof(found->second.c_str());
}

struct Buffers {
  std::vector<std::byte*> memory;
  size_t bytes = 0;
};

Buffers make_buffers(io::Engine& engine, size_t bytes, unsigned count) {
  Buffers buffers;
  buffers.bytes = (bytes + 4095) / 4096 * 4096;
  for (unsigned i = 0; i < count; ++i) {
    void* memory = mmap(nullptr, buffers.bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    buffers.memory.push_back(static_cast<std::byte*>(memory));
    engine.know_buffer(i + 1, {buffers.memory.back(), buffers.bytes});
  }
  return buffers;
}

std::vector<io::Read> reads_of_file(const Options& options, int fd, bool direct) {
  const auto extents = in_random_order(load_manifest(options.at("manifest").c_str()),
                                       static_cast<uint64_t>(number(options, "seed", 7)),
                                       static_cast<uint64_t>(number(options, "samples", 1e18)));
  std::vector<io::Read> reads(extents.size());
  for (size_t i = 0; i < extents.size(); ++i) {
    uint64_t from = extents[i].offset, to = from + extents[i].length;
    if (direct) from = from / kSector * kSector, to = (to + kSector - 1) / kSector * kSector;
    reads[i].fd = fd;
    reads[i].offset = from;
    reads[i].length = to - from;
  }
  return reads;
}

// Every file of the folder once, in random order; `names` owns the paths.
std::vector<io::Read> reads_of_folder(const Options& options, int folder,
                                      std::vector<std::string>& names) {
  struct stat status;
  std::vector<Extent> files;
  const auto folders = static_cast<uint64_t>(number(options, "folders", 0));
  const auto name = [folders](uint64_t file) {
    const std::string last = std::to_string(file);
    return folders == 0 ? last : std::to_string(file % folders) + "/" + last;
  };
  while (fstatat(folder, name(files.size()).c_str(), &status, 0) == 0) {
    files.push_back({files.size(), static_cast<uint64_t>(status.st_size)});
  }
  files = in_random_order(files, static_cast<uint64_t>(number(options, "seed", 7)),
                          static_cast<uint64_t>(number(options, "samples", 1e18)));
  std::vector<io::Read> reads(files.size());
  names.resize(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    names[i] = name(files[i].offset);
    reads[i].fd = folder;
    reads[i].path = names[i].c_str();
    reads[i].length = files[i].length;
    reads[i].check.size_bytes = files[i].length;
  }
  return reads;
}

std::unique_ptr<io::Engine> make_engine(const Options& options) {
  io::EngineOptions engine;
  engine.queue_depth = static_cast<unsigned>(number(options, "depth", 32));
  engine.threads = static_cast<unsigned>(number(options, "threads", 16));
  if (options.at("engine") == "threads") return io::make_threads_engine(engine);
  io::RingOptions ring;
  ring.registered_buffers = number(options, "plain-buffers", 0) == 0;
  ring.wait_share = static_cast<unsigned>(number(options, "wait-share", ring.wait_share));
  std::string reason;
  auto made = io::make_uring_engine(engine, ring, &reason);
  if (!made) std::fprintf(stderr, "engine_probe: %s\n", reason.c_str()), std::exit(1);
  return made;
}

// The kernel keeps what a stat of the folder brought in; a cold run must not.
void drop_caches() {
  sync();
  const int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);
  if (fd < 0 || write(fd, "3", 1) != 1) fail("drop_caches");
  close(fd);
}

void run(const Options& options) {
  Result result;
  const auto engine = make_engine(options);
  result.mode = std::string("engine-") + engine->name();
  result.threads = static_cast<unsigned>(number(options, "threads", 16));
  result.depth = static_cast<unsigned>(number(options, "depth", 32));
  const bool by_path = options.count("folder") != 0;
  const bool direct = !by_path && number(options, "buffered", 0) == 0;
  const char* source = by_path ? options.at("folder").c_str() : options.at("file").c_str();
  const int fd = open(source, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
  if (fd < 0) fail(source);
  std::vector<std::string> names;
  auto reads = by_path ? reads_of_folder(options, fd, names) : reads_of_file(options, fd, direct);

  const auto batch =
      static_cast<size_t>(number(options, "batch", 256) * number(options, "batches", 1));
  size_t bytes_max = 0;
  for (size_t from = 0; from < reads.size(); from += batch) {
    size_t bytes = 0;
    for (size_t i = from; i < std::min(from + batch, reads.size()); ++i) bytes += reads[i].length;
    bytes_max = std::max(bytes_max, bytes);
  }
  const auto buffers =
      make_buffers(*engine, bytes_max, static_cast<unsigned>(number(options, "buffers", 3)));
  if (number(options, "cold", 0) != 0) drop_caches();

  const double cpu_before = cpu_s();
  const double start = now_s();
  for (size_t from = 0, turn = 0; from < reads.size(); from += batch, ++turn) {
    const std::span<io::Read> part(&reads[from], std::min(batch, reads.size() - from));
    const size_t which = turn % buffers.memory.size();
    std::byte* dest = buffers.memory[which];
    for (io::Read& read : part) {
      read.dest = dest;
      read.buffer_id = which + 1;
      dest += read.length;
    }
    engine->read(part, [](io::Read& read) {
      if (read.error != 0) {
        errno = read.error;
        fail("read");
      }
    });
    if (turn == 0) result.first_batch_s = now_s() - start;
  }
  result.seconds = now_s() - start;
  result.cpu_seconds = cpu_s() - cpu_before;
  result.samples = reads.size();
  for (const io::Read& read : reads) result.bytes += read.done;
  print_json(result);
}

}  // namespace
}  // namespace headrace::bench

int main(int argc, char** argv) {
  headrace::bench::Options options;
  for (int i = 1; i + 1 < argc; i += 2) options[std::string(argv[i]).substr(2)] = argv[i + 1];
  const bool complete = options.count("engine") != 0 &&
                        (options.count("folder") != 0 ||
                         (options.count("file") != 0 && options.count("manifest") != 0));
  if (argc % 2 == 0 || !complete) {
    std::fputs(headrace::bench::kHelp, stderr);
    return 2;
  }
  headrace::bench::run(options);
  return 0;
}
