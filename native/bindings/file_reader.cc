// File reader bindings: one call submits some files, one call takes one; the GIL is free while the
// disk works. A taken file is a read-only buffer that keeps the memory of its batch.
#include "bindings/file_reader.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "io/file_reader.h"
#include "io/residency.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::ColdReads;
using io::FileBatch;
using io::FileBytes;
using io::FileIdentity;
using io::FileJob;
using io::FileReader;

constexpr size_t kKnownColumns = 5;
using KnownFiles =
    nb::ndarray<const int64_t, nb::shape<-1, kKnownColumns>, nb::c_contig, nb::device::cpu>;

std::optional<ColdReads> cold_reads(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  if (*name == "direct") return ColdReads::kDirect;
  if (*name == "fill") return ColdReads::kFill;
  throw Error(ErrorKind::kInvalidArgument, "cold is '" + *name + "', expected direct or fill");
}

std::shared_ptr<const io::SlowFiles> slow_files(std::shared_ptr<io::SlowModel> model,
                                                std::vector<std::string> roots) {
  if (model == nullptr) return nullptr;
  return std::make_shared<const io::SlowFiles>(std::move(model), std::move(roots));
}

// Paths as they are: bytes that need not be UTF-8.
std::vector<std::string> names_of(const nb::list& paths) {
  std::vector<std::string> names;
  names.reserve(paths.size());
  for (const nb::handle path : paths) {
    if (!PyBytes_Check(path.ptr())) {
      throw Error(ErrorKind::kInvalidArgument, "a path is no bytes object");
    }
    names.emplace_back(PyBytes_AS_STRING(path.ptr()),
                       static_cast<size_t>(PyBytes_GET_SIZE(path.ptr())));
  }
  return names;
}

// Ends the reader's threads when Python lets go of it. In a forked child it is left alone.
struct FileReaderHandle {
  std::shared_ptr<FileReader> reader;

  FileReaderHandle(unsigned reads_in_flight, uint64_t buffer_bytes, const std::string& cold,
                   std::shared_ptr<io::SlowModel> simulate, std::vector<std::string> roots)
      : reader(FileReader::make({.reads_in_flight = reads_in_flight,
                                 .buffer_bytes = buffer_bytes,
                                 .cold = *cold_reads(cold),
                                 .slow = slow_files(std::move(simulate), std::move(roots))})) {}
  ~FileReaderHandle() {
    const WithoutGil released;
    reader->close(kCloseSeconds);
  }
  FileReaderHandle(const FileReaderHandle&) = delete;
  FileReaderHandle& operator=(const FileReaderHandle&) = delete;

  // A read that the device never answers must not hold up the program's end.
  static constexpr double kCloseSeconds = 5.0;
};

std::vector<FileIdentity> identities_of(const std::optional<KnownFiles>& known) {
  std::vector<FileIdentity> identities;
  if (!known) return identities;
  for (size_t i = 0; i < known->shape(0); ++i) {
    const int64_t* row = known->data() + i * kKnownColumns;
    identities.push_back({.size = static_cast<uint64_t>(row[2]),
                          .mtime_ns = row[3],
                          .ctime_ns = row[4],
                          .ino = static_cast<uint64_t>(row[1]),
                          .dev = static_cast<uint64_t>(row[0])});
  }
  return identities;
}

std::shared_ptr<FileJob> submit(FileReaderHandle& handle, const nb::list& paths,
                                const std::optional<KnownFiles>& known) {
  std::vector<std::string> names = names_of(paths);
  std::vector<FileIdentity> identities = identities_of(known);
  const WithoutGil released;
  return handle.reader->submit(std::move(names), std::move(identities));
}

nb::tuple look_at_files(const nb::list& paths, double seconds_max) {
  const std::vector<std::string> names = names_of(paths);
  io::LookedAt looked;
  {
    const WithoutGil released;
    looked = io::look_at_files(names, seconds_max);
  }
  return nb::make_tuple(looked.resident, looked.seconds);
}

// What `take` gives: the bytes, or why there are none.
nb::object take(FileJob& job, size_t index, double seconds) {
  std::optional<FileBytes> bytes;
  int error = 0;
  {
    const WithoutGil released;
    bytes = job.take(index, seconds, &error);
  }
  return bytes ? nb::cast(std::move(*bytes)) : nb::cast(error);
}

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) noexcept {
  static const std::byte nothing{};
  const auto* bytes = nb::inst_ptr<FileBytes>(self);
  const std::byte* data = bytes->size() == 0 ? &nothing : bytes->data();
  return PyBuffer_FillInfo(buffer, self, const_cast<std::byte*>(data),
                           static_cast<Py_ssize_t>(bytes->size()), /*readonly=*/1, flags);
}

ArrayOut<const uint8_t> batch_data(nb::handle_t<FileBatch> self) {
  const auto& batch = nb::cast<const FileBatch&>(self);
  const auto* data = batch.buffer == nullptr ? nullptr : batch.buffer->data;
  return borrow(reinterpret_cast<const uint8_t*>(data), batch.bytes, self);
}

template <auto kMember>
auto batch_array(nb::handle_t<FileBatch> self) {
  const auto& values = nb::cast<const FileBatch&>(self).*kMember;
  return borrow(values.data(), values.size(), self);
}

template <auto kField>
ArrayOut<int64_t> identity_array(const FileBatch& batch) {
  std::vector<int64_t> values;
  for (const FileIdentity& identity : batch.identities) {
    values.push_back(static_cast<int64_t>(identity.*kField));
  }
  return own(std::move(values));
}

nb::dict stats(const FileReaderHandle& handle) {
  const io::FileReaderStats s = handle.reader->stats();
  nb::dict tiers;
  tiers["page_cache"] = s.page_cache_bytes;
  tiers["source"] = s.source_bytes;
  nb::dict d;
  d["busy_s"] = s.busy_s;
  d["wait_input_s"] = s.wait_input_s;
  d["wait_output_s"] = s.wait_output_s;
  d["reads"] = s.reads;
  d["failures"] = s.failures;
  d["bytes"] = s.bytes;
  d["in_flight"] = s.in_flight;
  d["buffered_bytes"] = s.buffered_bytes;
  d["ready_bytes"] = s.ready_bytes;
  d["mapped_bytes"] = s.mapped_bytes;
  d["threads"] = s.threads;
  d["gave_up"] = s.gave_up;
  d["bytes_by_tier"] = tiers;
  d["latency_us"] = nb::tuple(nb::cast(s.latency_us));
  return d;
}

void register_file_batch(nb::module_& m) {
  nb::class_<FileBatch>(m, "FileBatch", "The files of one job in one buffer.")
      .def_prop_ro("data", &batch_data, "uint8, the used bytes of the buffer.")
      .def_prop_ro("offsets", &batch_array<&FileBatch::offsets>, "int64, one per file.")
      .def_prop_ro("lengths", &batch_array<&FileBatch::lengths>, "int64, 0 where errors is not.")
      .def_prop_ro("errors", &batch_array<&FileBatch::errors>, "int32, errno per file; 0: read.")
      .def_ro(
          "ready_ns", &FileBatch::ready_ns,
          "When the last file was there, of the steady clock; a simulated one: when it was due.")
      .def_prop_ro("size", &identity_array<&FileIdentity::size>, nb::rv_policy::automatic)
      .def_prop_ro("mtime_ns", &identity_array<&FileIdentity::mtime_ns>, nb::rv_policy::automatic)
      .def_prop_ro("ctime_ns", &identity_array<&FileIdentity::ctime_ns>, nb::rv_policy::automatic)
      .def_prop_ro("ino", &identity_array<&FileIdentity::ino>, nb::rv_policy::automatic)
      .def_prop_ro("dev", &identity_array<&FileIdentity::dev>, nb::rv_policy::automatic);
}

void register_file_bytes(nb::module_& m) {
  static PyType_Slot slots[] = {
      {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
      {0, nullptr},
  };
  nb::class_<FileBytes>(m, "FileBytes", nb::type_slots(slots),
                        "The bytes of one file: a read-only buffer, for memoryview().")
      .def("same_as", &FileBytes::same_as, "fd"_a, "Whether an open file is the one that was read.")
      .def("__len__", &FileBytes::size);
}

}  // namespace

void register_file_reader(nb::module_& m) {
  register_file_batch(m);
  register_file_bytes(m);
  nb::class_<FileJob>(m, "FileJob", "Files that are being read.")
      .def("__len__", &FileJob::files)
      .def_prop_ro("done", &FileJob::done)
      .def("wait", &FileJob::wait, "seconds"_a, nb::call_guard<WithoutGil>(),
           nb::sig("def wait(self, seconds: float) -> FileBatch | None"),
           "All files, when all are finished; None when `seconds` are over.")
      .def("take", &take, "index"_a, "seconds"_a,
           nb::sig("def take(self, index: int, seconds: float) -> FileBytes | int"),
           "One file if its path still names what was read, else an errno. Waits for a read that "
           "has begun; one that has not is given up (ECANCELED).")
      .def("forget", &FileJob::forget, "index"_a, "Nobody will take this file.");
  nb::class_<FileReaderHandle>(m, "FileReader", "Reads whole files by path, ahead of their user.")
      .def(nb::init<unsigned, uint64_t, const std::string&, std::shared_ptr<io::SlowModel>,
                    std::vector<std::string>>(),
           nb::kw_only(), "reads_in_flight"_a = 16, "buffer_bytes"_a = 64 << 20,
           "cold"_a = "direct", "simulate"_a = nb::none(),
           "simulated_roots"_a = std::vector<std::string>(),
           "`simulate`: files below `simulated_roots` (resolved paths) take their time.")
      .def("submit", &submit, "paths"_a, "known"_a = nb::none(),
           nb::sig("def submit(self, paths: list[bytes], known: "
                   "numpy.typing.NDArray[numpy.int64] | None = None) -> FileJob"),
           "Queues some files; returns at once. `known`: (files, 5), the dev, ino, size, mtime_ns "
           "and "
           "ctime_ns of files that need no look: one that is another by now is ESTALE.")
      .def(
          "turn",
          [](FileReaderHandle& h, std::optional<unsigned> reads_in_flight,
             std::optional<uint64_t> buffer_bytes, std::optional<std::string> cold) {
            h.reader->turn(reads_in_flight, buffer_bytes, cold_reads(cold));
          },
          nb::kw_only(), "reads_in_flight"_a = nb::none(), "buffer_bytes"_a = nb::none(),
          "cold"_a = nb::none(), nb::call_guard<WithoutGil>(), "Changes what is given, at once.")
      .def_prop_ro("reads_in_flight",
                   [](const FileReaderHandle& h) { return h.reader->reads_in_flight(); })
      .def_prop_ro("buffer_bytes",
                   [](const FileReaderHandle& h) { return h.reader->buffer_bytes(); })
      .def("stats", &stats, nb::sig("def stats(self, /) -> dict[str, typing.Any]"),
           "Figures since the first submit; times in seconds.")
      .def(
          "close", [](FileReaderHandle& h, double seconds) { return h.reader->close(seconds); },
          "seconds"_a = FileReaderHandle::kCloseSeconds, nb::call_guard<WithoutGil>(),
          "Ends the threads. False: one did not answer in time and was left behind.");
  m.def("changed_just_now", &io::changed_just_now, "ctime_ns"_a,
        "Whether a file with this ctime may be changed again without a new one.");
  m.def("look_at_files", &look_at_files, "paths"_a, "seconds_max"_a,
        nb::sig("def look_at_files(paths: list[bytes], seconds_max: float) -> tuple[int, float]"),
        "Opens files to see whether all of their bytes lie in the page cache, up to the first that "
        "does not, or while `seconds_max` last: how many do, and the seconds that it took.");
}

}  // namespace headrace::bindings
