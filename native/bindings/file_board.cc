// Bindings of what a daemon and unmodified programs share: the board of files and the ring of
// opens.
#include "bindings/file_board.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "preload/file_board.h"
#include "preload/open_follower.h"
#include "preload/open_ring.h"
#include "preload/run_page.h"
#include "preload/slow_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using preload::FileBoard;
using preload::OpenRing;
using Figures = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OwnedReports = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;

constexpr size_t kStatColumns = 4;
constexpr size_t kFullColumns = 9;

void check_shape(const char* name, const Figures& array, size_t rows, size_t columns) {
  if (array.shape(0) == rows && array.shape(1) == columns) return;
  throw Error(ErrorKind::kInvalidArgument,
              std::string(name) + " has the shape (" + std::to_string(array.shape(0)) + ", " +
                  std::to_string(array.shape(1)) + "), expected (" + std::to_string(rows) + ", " +
                  std::to_string(columns) + ")");
}

std::vector<preload::FileFigures> figures_of(const Figures& stats, const Figures& full) {
  std::vector<preload::FileFigures> figures(stats.shape(0));
  for (size_t i = 0; i < figures.size(); ++i) {
    const int64_t* s = stats.data() + i * kStatColumns;
    const int64_t* f = full.data() + i * kFullColumns;
    figures[i] = {s[0],
                  s[1],
                  s[2],
                  s[3],
                  f[4],
                  f[5],
                  f[6],
                  static_cast<uint32_t>(f[0]),
                  static_cast<uint32_t>(f[1]),
                  static_cast<uint32_t>(f[2]),
                  static_cast<uint32_t>(f[3]),
                  static_cast<uint32_t>(f[7]),
                  f[8] != 0};
  }
  return figures;
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void make_board(FileBoard* self, const std::vector<nb::bytes>& paths, const Figures& stats,
                const Figures& full_stats, const std::vector<nb::tuple>& roots,
                const std::vector<nb::bytes>& tiers, bool immutable) {
  check_shape("stats", stats, paths.size(), kStatColumns);
  check_shape("full_stats", full_stats, paths.size(), kFullColumns);
  std::vector<std::string_view> views;
  views.reserve(paths.size());
  for (const nb::bytes& path : paths) views.push_back(view_of(path));
  preload::BoardOptions options;
  for (const nb::tuple& root : roots) {
    if (root.size() != 2) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a root has " + std::to_string(root.size()) + " parts, expected 2");
    }
    options.roots.emplace_back(string_of(nb::cast<nb::bytes>(root[0])),
                               string_of(nb::cast<nb::bytes>(root[1])));
  }
  for (const nb::bytes& tier : tiers) options.tiers.push_back(string_of(tier));
  options.immutable = immutable;
  const WithoutGil released;
  const auto figures = figures_of(stats, full_stats);
  new (self) FileBoard(views, figures, options);
}

OwnedReports take(OpenRing& ring, double timeout_s) {
  auto* kept = new std::vector<preload::OpenReport>;
  nb::capsule owner(
      kept, [](void* p) noexcept { delete static_cast<std::vector<preload::OpenReport>*>(p); });
  {
    const WithoutGil released;
    *kept = ring.take(timeout_s);
  }
  static_assert(sizeof(preload::OpenReport) == 4 * sizeof(int64_t));
  return OwnedReports(reinterpret_cast<int64_t*>(kept->data()), {kept->size(), 4}, owner);
}

nb::dict dict_of(const preload::RingTotals& totals) {
  static constexpr const char* kNames[preload::kOpenedKinds] = {
      "original", "copy", "writing", "unknown", "refused", "attached", "blind"};
  nb::dict d;
  for (uint32_t i = 0; i < preload::kOpenedKinds; ++i) d[kNames[i]] = totals.opened[i];
  d["tier_copy"] = totals.tier_copies;
  d["copy_bytes"] = totals.copy_bytes;
  d["original_bytes"] = totals.original_bytes;
  d["stat"] = totals.stats;
  return d;
}

nb::dict counts(const OpenRing& ring) { return dict_of(ring.totals()); }

preload::SlowMemory* make_slow(const ArrayIn<int64_t>& open_ns, const ArrayIn<int64_t>& read_ns,
                               uint32_t servers, uint64_t link_bytes_per_s,
                               uint64_t stream_bytes_per_s, uint64_t seed) {
  return new preload::SlowMemory(
      {view(open_ns), view(read_ns), servers, link_bytes_per_s, stream_bytes_per_s, seed});
}

void register_run(nb::module_& m) {
  nb::class_<preload::SlowMemory>(m, "SlowMemory",
                                  "A simulated storage as the processes of one run share it.")
      .def(nb::new_(&make_slow), nb::kw_only(), "open_ns"_a, "read_ns"_a, "servers"_a,
           "link_bytes_per_s"_a, "stream_bytes_per_s"_a, "seed"_a,
           "Latencies: 1,024 quantiles each, ascending. 0: unbounded.")
      .def_prop_ro("fd", &preload::SlowMemory::fd)
      .def_prop_ro("inode", &preload::SlowMemory::inode);
  nb::class_<preload::RunPageWriter>(m, "RunPage",
                                     "Where the programs of one run find board and ring.")
      .def(
          "__init__",
          [](preload::RunPageWriter* self, const preload::SlowMemory* slow) {
            new (self) preload::RunPageWriter(slow == nullptr ? -1 : slow->fd(),
                                              slow == nullptr ? 0 : slow->inode());
          },
          "slow"_a.none() = nb::none(), nb::keep_alive<1, 2>())
      .def("publish", &preload::RunPageWriter::publish, "process"_a, "board_fd"_a, "board_inode"_a,
           "ring_fd"_a, "ring_inode"_a,
           "Descriptors of this process; copies in memory are descriptors of `process`.")
      .def("clear", &preload::RunPageWriter::clear, "From now on the originals are opened.")
      .def_prop_ro("epoch", &preload::RunPageWriter::epoch)
      .def_prop_ro("fd", &preload::RunPageWriter::fd)
      .def_prop_ro("inode", &preload::RunPageWriter::inode);
  nb::class_<preload::OpenFollower>(m, "OpenFollower", "A second reader of a ring of opens.")
      .def(nb::init<int, int>(), "board_fd"_a, "ring_fd"_a)
      .def(
          "take",
          [](preload::OpenFollower& self) {
            nb::list paths;
            for (const std::string& path : self.take()) {
              paths.append(nb::bytes(path.data(), path.size()));
            }
            return paths;
          },
          nb::sig("def take(self) -> list[bytes]"),
          "Paths that were opened for reading since the last call, in that order.");
  m.def(
      "open_counts", [](int fd) { return dict_of(preload::read_totals(fd)); }, "fd"_a,
      nb::sig("def open_counts(fd: int) -> dict[str, int]"),
      "The `counts` of a ring that another process made.");
}

void register_board(nb::module_& m) {
  nb::class_<FileBoard>(m, "FileBoard",
                        "Which files there are, and where each can be opened fastest, in shared "
                        "memory for programs that were not changed.")
      .def("__init__", &make_board, "paths"_a, "stats"_a, "full_stats"_a, nb::kw_only(),
           "roots"_a = std::vector<nb::tuple>(), "tiers"_a = std::vector<nb::bytes>(),
           "immutable"_a = false,
           nb::sig("def __init__(self, paths: Sequence[bytes], stats: Annotated[NDArray[numpy"
                   ".int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], "
                   "full_stats: Annotated[NDArray[numpy.int64], dict(shape=(None, None), "
                   "order='C', device='cpu', writable=False)], *, roots: Sequence[tuple[bytes, "
                   "bytes]] = (), tiers: Sequence[bytes] = (), immutable: bool = False) -> None"),
           "Absolute paths. stats (n, 4): st_dev, st_ino, st_size, mtime_ns. full_stats (n, 9): "
           "st_mode, st_nlink, st_uid, st_gid, atime_ns, ctime_ns, st_blocks, st_blksize, 1 where "
           "the path is a symbolic link to what the figures describe. roots: (as programs may "
           "spell it, what stands for it in `paths`). tiers: folders of `place_path`'s files.")
      .def("place", &FileBoard::place, "file"_a, "fd"_a, nb::call_guard<WithoutGil>(),
           "The copy is the memfd `fd`, which stays open until `withdraw`.")
      .def(
          "place_path",
          [](FileBoard& board, int64_t file, const nb::bytes& path) {
            const std::string copy = string_of(path);
            const WithoutGil released;
            board.place_path(file, copy);
          },
          "file"_a, "path"_a, "The copy is this file below one of `tiers`.")
      .def("withdraw", &FileBoard::withdraw, "file"_a, nb::call_guard<WithoutGil>(),
           "Before the copy is closed or removed.")
      .def("placed", &FileBoard::placed, "file"_a)
      .def(
          "find",
          [](const FileBoard& board, const nb::bytes& path) { return board.find(view_of(path)); },
          "path"_a, "The file's number; -1: none.")
      .def("__len__", &FileBoard::files)
      .def_prop_ro("nbytes", &FileBoard::nbytes)
      .def_prop_ro("fd", &FileBoard::fd, "Shared memory that others can only read.")
      .def_prop_ro("inode", &FileBoard::inode, "By which others know it.");
}

}  // namespace

void register_file_board(nb::module_& m) {
  register_board(m);
  register_run(m);
  auto ring =
      nb::class_<OpenRing>(m, "OpenRing", "What programs opened, told without waiting.")
          .def(nb::init<uint64_t>(), "capacity"_a = 65536)
          .def("take", &take, "timeout_s"_a,
               "int64, shape (k, 4): file number or -1, process id, what, position in the ring; "
               "oldest first. Waits for the first; k = 0 when none came.")
          .def_prop_ro("lost", &OpenRing::lost, "Reports overwritten before they were taken.")
          .def_prop_ro("counts", &counts, nb::sig("def counts(self) -> dict[str, int]"),
                       "Totals, exact also where reports were lost; bytes are of whole files.")
          .def_prop_ro("capacity", &OpenRing::capacity)
          .def_prop_ro("fd", &OpenRing::fd, "Shared memory that others may write.")
          .def_prop_ro("inode", &OpenRing::inode, "By which others know it.");
  const auto kind = [&](const char* name, preload::Opened what) {
    ring.attr(name) = static_cast<int>(what);
  };
  kind("ORIGINAL", preload::Opened::kOriginal);
  kind("COPY", preload::Opened::kCopy);
  kind("WRITING", preload::Opened::kWriting);
  kind("UNKNOWN", preload::Opened::kUnknown);
  kind("REFUSED", preload::Opened::kRefused);
  kind("ATTACHED", preload::Opened::kAttached);
  kind("BLIND", preload::Opened::kBlind);
}

}  // namespace headrace::bindings
