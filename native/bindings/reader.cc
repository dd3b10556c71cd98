// Reader bindings: one call submits a batch, one call takes it; the GIL is free while the disk
// works. Arrays borrow the batch's memory and keep the batch alive.
#include "bindings/reader.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/choice.h"
#include "bindings/gil.h"
#include "bindings/remote.h"
#include "core/error.h"
#include "io/reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::Batch;
using io::Catalog;
using io::Job;
using io::Reader;

// The descriptions that Python hands over: (kind, path, bytes, mtime_ns or -1).
std::unique_ptr<io::Volume> make_volume(const nb::tuple& entry) {
  const auto kind = nb::cast<std::string>(entry[0]);
  const auto path = nb::cast<nb::bytes>(entry[1]);
  return std::make_unique<io::Volume>(choice<io::VolumeKind>(kind,
                                                             {{"file", io::VolumeKind::kFile},
                                                              {"tree", io::VolumeKind::kTree},
                                                              {"remote", io::VolumeKind::kRemote}},
                                                             "volume kind"),
                                      path.c_str(), nb::cast<uint64_t>(entry[2]),
                                      nb::cast<int64_t>(entry[3]));
}

// Holds the catalog and an arena for single reads.
struct CatalogHandle {
  std::shared_ptr<Catalog> catalog = std::make_shared<Catalog>();
  std::shared_ptr<Arena> arena = Arena::make(16 << 20);

  CatalogHandle(const nb::list& segments, nb::object remote) {
    catalog->set_remote(remote_engine_of(std::move(remote)));
    for (const nb::handle item : segments) {
      const auto segment = nb::cast<nb::tuple>(item);
      std::vector<std::unique_ptr<io::Volume>> volumes;
      for (const nb::handle entry : nb::cast<nb::list>(segment[1])) {
        volumes.push_back(make_volume(nb::cast<nb::tuple>(entry)));
      }
      catalog->add_segment(nb::cast<std::shared_ptr<Directory>>(segment[0]), std::move(volumes));
    }
    catalog->seal();
  }
};

// Ends the reader's threads when Python lets go of it. In a forked child it is left alone.
struct ReaderHandle {
  std::shared_ptr<Reader> reader;

  ReaderHandle(const CatalogHandle& catalog, std::vector<int> parts, const std::string& engine,
               const std::string& direct, unsigned queue_depth, unsigned threads, unsigned workers,
               unsigned reads_in_flight, uint64_t budget_bytes, bool verify, double deadline_s,
               std::shared_ptr<io::SlowModel> simulate, nb::object remote, bool shared,
               int done_fd) {
    io::ReaderOptions options;
    options.reads_in_flight = reads_in_flight;
    options.remote_deadline_s = deadline_s;
    options.slow = std::move(simulate);
    options.done_fd = done_fd;
    options.buffers = shared ? Memory::kShared : Memory::kPrivate;
    options.remote = remote_engine_of(std::move(remote));
    options.engine = choice<io::EngineChoice>(engine,
                                              {{"auto", io::EngineChoice::kAuto},
                                               {"uring", io::EngineChoice::kUring},
                                               {"threads", io::EngineChoice::kThreads},
                                               {"mmap", io::EngineChoice::kMmap}},
                                              "engine");
    options.direct = choice<io::DirectReads>(direct,
                                             {{"auto", io::DirectReads::kAuto},
                                              {"always", io::DirectReads::kAlways},
                                              {"never", io::DirectReads::kNever}},
                                             "direct");
    options.engine_options.queue_depth = std::clamp(queue_depth, 1u, 4096u);
    options.engine_options.threads = std::clamp(threads, 1u, 1024u);
    options.workers = std::clamp(workers, 1u, 256u);
    options.budget_bytes = budget_bytes;
    options.verify = verify;
    for (const int part : parts) {
      if (part < 0 || static_cast<size_t>(part) >= catalog.catalog->part_names().size()) {
        throw Error(ErrorKind::kInvalidArgument, "no part has number " + std::to_string(part));
      }
    }
    if (parts.empty()) throw Error(ErrorKind::kInvalidArgument, "no part is selected");
    reader = Reader::make(catalog.catalog, options, std::move(parts));
  }
  ~ReaderHandle() {
    const WithoutGil released;
    reader->close(kCloseSeconds);
  }
  ReaderHandle(const ReaderHandle&) = delete;
  ReaderHandle& operator=(const ReaderHandle&) = delete;

  // A read that the device never answers must not hold up the program's end.
  static constexpr double kCloseSeconds = 5.0;
};

std::vector<io::Range> ranges(const std::optional<ArrayIn<uint64_t>>& starts,
                              const std::optional<ArrayIn<uint64_t>>& sizes) {
  std::vector<io::Range> list;
  if (!starts && !sizes) return list;
  if (!starts || !sizes || starts->size() != sizes->size()) {
    throw Error(ErrorKind::kInvalidArgument, "starts and sizes are not equally many");
  }
  list.reserve(starts->size());
  for (size_t i = 0; i < starts->size(); ++i) list.push_back({starts->data()[i], sizes->data()[i]});
  return list;
}

nb::dict reader_stats(const ReaderHandle& handle) {
  const io::ReaderStats stats = [&] {
    const WithoutGil released;
    return handle.reader->stats();
  }();
  nb::dict d;
  d["busy_s"] = stats.busy_s;
  d["wait_input_s"] = stats.wait_input_s;
  d["wait_output_s"] = stats.wait_output_s;
  d["consumer_wait_s"] = stats.consumer_wait_s;
  d["reads"] = stats.reads.reads;
  d["read_bytes"] = stats.reads.bytes;
  d["in_flight"] = stats.reads.in_flight;
  d["in_flight_most"] = stats.reads.in_flight_most;
  d["in_flight_s"] = stats.reads.in_flight_s;
  d["latency_us"] = nb::cast(stats.reads.latency_us);
  d["delivered_samples"] = stats.delivered_samples;
  d["delivered_bytes"] = stats.delivered_bytes;
  d["buffered_bytes"] = stats.buffered_bytes;
  d["ready_bytes"] = stats.ready_bytes;
  d["page_cache_bytes"] = stats.gathered_bytes + stats.resident_bytes;
  d["source_bytes"] = stats.reads.bytes - std::min(stats.reads.bytes, stats.resident_bytes);
  d["workers"] = stats.workers;
  d["reads_in_flight"] = stats.reads_in_flight;
  d["buffer_bytes"] = stats.buffer_bytes;
  return d;
}

const char* failure_name(io::FailureKind kind) {
  switch (kind) {
    case io::FailureKind::kChecksum:
      return "checksum";
    case io::FailureKind::kShort:
      return "short";
    case io::FailureKind::kChanged:
      return "changed";
    case io::FailureKind::kSystem:
      return "system";
  }
  return "unknown";
}

nb::list failures(const CatalogHandle& catalog, const Batch& batch) {
  nb::list list;
  for (const io::Failure& f : batch.failures) {
    nb::dict d;
    d["slot"] = f.slot;
    d["kind"] = failure_name(f.kind);
    d["errno"] = f.system_errno;
    d["crc_found"] = f.crc_found;
    d["crc_expected"] = f.crc_expected;
    d["path"] =
        nb::steal(PyUnicode_DecodeFSDefault(catalog.catalog->volume(f.volume).path().c_str()));
    d["offset"] = f.offset;
    d["length"] = f.length;
    list.append(d);
  }
  return list;
}

nb::dict stats(const Batch& batch) {
  nb::dict d;
  d["cached_reads"] = batch.stats.cached_reads;
  d["direct_reads"] = batch.stats.direct_reads;
  d["buffered_reads"] = batch.stats.buffered_reads;
  d["remote_reads"] = batch.stats.remote_reads;
  d["opened_files"] = batch.stats.opened_files;
  d["bytes_read"] = batch.stats.bytes_read;
  return d;
}

nb::bytes way(const Batch& batch) {
  static_assert(sizeof(io::BatchWay) == (12 + io::kTiers) * sizeof(int64_t));
  static_assert(std::is_trivially_copyable_v<io::BatchWay>);
  return nb::bytes(&batch.way, sizeof batch.way);
}

// What was read from the source of a nearer tier came from that tier.
void came_from(Batch& batch, size_t tier) {
  auto& bytes = batch.way.tier_bytes;
  if (tier >= io::kTierSource) {
    throw Error(ErrorKind::kInvalidArgument, "no nearer tier " + std::to_string(tier));
  }
  bytes[tier] += std::exchange(bytes[io::kTierSource], 0);
}

ArrayOut<const uint8_t> batch_data(nb::handle_t<Batch> self) {
  const auto& batch = nb::cast<const Batch&>(self);
  return borrow(reinterpret_cast<const uint8_t*>(batch.buffer->data), batch.bytes, self);
}

template <std::vector<int64_t> Batch::*kMember>
ArrayOut<const int64_t> batch_array(nb::handle_t<Batch> self) {
  const auto& values = nb::cast<const Batch&>(self).*kMember;
  return borrow(values.data(), values.size(), self);
}

std::shared_ptr<Batch> gather(ReaderHandle& handle, const nb::list& pieces) {
  std::vector<io::Piece> list;
  for (const nb::handle item : pieces) {
    const auto piece = nb::cast<nb::tuple>(item);
    list.push_back({nb::cast<std::shared_ptr<Batch>>(piece[0]), nb::cast<uint64_t>(piece[1]),
                    nb::cast<uint64_t>(piece[2])});
  }
  const WithoutGil released;
  return handle.reader->gather(list);
}

// Of memory that a Python object keeps. Whoever is last to let go of it, on whatever thread, lets
// go of the object, unless the interpreter ends.
BufferPtr lent_buffer(const ArrayIn<uint8_t>& data) {
  auto* memory = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(data.data()));
  auto* buffer = new Buffer{.data = memory, .capacity = data.size()};
  return {buffer, [data = std::make_unique<ArrayIn<uint8_t>>(data)](const Buffer* b) mutable {
            delete b;
            const Visit visit;
            if (visit) {
              data.reset();
            } else {
              (void)data.release();
            }
          }};
}

std::shared_ptr<Batch> lent(const ArrayIn<uint8_t>& data, const ArrayIn<int64_t>& indices,
                            const ArrayIn<int64_t>& offsets, const ArrayIn<int64_t>& lengths,
                            const ArrayIn<int64_t>& labels, uint64_t parts, const nb::bytes& way) {
  const auto vector = [](const ArrayIn<int64_t>& array) {
    return std::vector<int64_t>(array.data(), array.data() + array.size());
  };
  auto batch = std::make_shared<Batch>();
  batch->bytes = data.size();
  batch->samples = indices.size();
  batch->parts = parts;
  batch->indices = vector(indices);
  batch->offsets = vector(offsets);
  batch->lengths = vector(lengths);
  batch->labels = vector(labels);
  const uint64_t slots = batch->samples * parts;
  expect(offsets.size() == slots && lengths.size() == slots && labels.size() == batch->samples,
         "the batch has other samples than were asked for");
  for (uint64_t i = 0; i < slots; ++i) {
    const auto at = static_cast<uint64_t>(batch->offsets[i]);
    const auto size = static_cast<uint64_t>(batch->lengths[i]);
    expect(at <= batch->bytes && size <= batch->bytes - at,
           "the batch has samples outside its bytes");
  }
  if (way.size() == sizeof batch->way) std::memcpy(&batch->way, way.c_str(), way.size());
  batch->buffer = lent_buffer(data);
  return batch;
}

void register_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch", "Bytes of some samples in one buffer.")
      .def_static("lent", &lent, nb::kw_only(), "data"_a, "indices"_a, "offsets"_a, "lengths"_a,
                  "labels"_a, "parts"_a, "way"_a,
                  "A batch in memory that `data` keeps, uint8, as long as anybody looks at it; the "
                  "rest as its properties give it. ValueError: samples lie outside.")
      .def_prop_ro("data", &batch_data, "uint8, the used bytes of the buffer.")
      .def_prop_ro("offsets", &batch_array<&Batch::offsets>,
                   "int64, samples x parts: where each slot starts in `data`.")
      .def_prop_ro("lengths", &batch_array<&Batch::lengths>, "int64, samples x parts.")
      .def_prop_ro("indices", &batch_array<&Batch::indices>, "int64, one per sample.")
      .def_prop_ro("labels", &batch_array<&Batch::labels>, "int64, one per sample, -1: none.")
      .def_prop_ro("samples", [](const Batch& b) { return b.samples; })
      .def_prop_ro("parts", [](const Batch& b) { return b.parts; })
      .def_prop_ro(
          "ready_ns", [](const Batch& b) { return b.way.ready_ns; },
          "When it was there, of the steady clock.")
      .def_prop_ro("way", &way,
                   "How it came: BatchWay of batch.h, as it lies in memory. Nanoseconds and bytes.")
      .def(
          "held", [](Batch& b, int64_t ns) { b.way.held_ns += ns; }, "ns"_a,
          "Notes that a limit on rates held it back before it was submitted.")
      .def(
          "made_of",
          [](Batch& b, const Batch* read, uint64_t ram_bytes) {
            if (read != nullptr) b.way.add(read->way);
            b.way.tier_bytes[0] += ram_bytes;
          },
          nb::arg("read").none(), "ram_bytes"_a,
          "Notes that it was made of a batch that was read and of samples in memory.")
      .def("came_from", &came_from, "tier"_a,
           "Notes that what was read came from a nearer tier, by its number.")
      .def_prop_ro("failed", [](const Batch& b) { return b.failures.size(); })
      .def_prop_ro("stats", &stats, nb::sig("def stats(self, /) -> dict[str, int]"),
                   "Reads by route, and bytes asked for.")
      .def_prop_ro(
          "shared",
          [](const Batch& b) -> nb::object {
            if (b.buffer->fd < 0) return nb::none();
            return nb::make_tuple(b.buffer->fd, b.buffer->id, b.buffer->capacity);
          },
          nb::sig("def shared(self, /) -> tuple[int, int, int] | None"),
          "The buffer's memfd, identity and size in bytes; None in private memory.")
      .def(
          "abandon", [](const Batch& b) { b.buffer->abandoned = true; },
          "Never recycle the buffer: somebody may look at it for ever.");
}

void register_catalog(nb::module_& m) {
  nb::class_<CatalogHandle>(m, "Catalog", "Directories and volumes of an open store.")
      .def(
          nb::init<const nb::list&, nb::object>(), "segments"_a, "remote"_a = nb::none(),
          nb::sig("def __init__(self, segments: list[tuple[Directory, list[tuple[str, bytes, int, "
                  "int]]]], remote: typing.Any = None) -> None"),
          "segments: [(Directory, [(kind, path, bytes, mtime_ns or -1), ...]), ...]; kind is file, "
          "tree or remote. remote: what reads the remote ones.")
      .def_prop_ro("samples", [](const CatalogHandle& c) { return c.catalog->samples(); })
      .def_prop_ro(
          "part_names",
          [](const CatalogHandle& c) {
            nb::list list;
            for (const std::string& name : c.catalog->part_names()) {
              list.append(nb::bytes(name.data(), name.size()));
            }
            return list;
          },
          nb::sig("def part_names(self, /) -> list[bytes]"))
      .def_prop_ro("open_per_read",
                   [](const CatalogHandle& c) { return c.catalog->open_per_read(); })
      .def(
          "read_one",
          [](const CatalogHandle& c, int64_t index, int part, uint64_t start, int64_t size,
             bool verify) {
            return c.catalog->read_one(*c.arena, index, part, start, size, verify);
          },
          "index"_a, "part"_a = -1, "start"_a = 0, "size"_a = -1, "verify"_a = true,
          nb::call_guard<WithoutGil>(),
          "Reads one sample (its first part when `part` is -1) in the calling thread.")
      .def(
          "filled_up",
          [](const CatalogHandle& c, const ArrayIn<int64_t>& indices, const Batch* read,
             const ArrayIn<int64_t>& positions) {
            const auto all = view(indices);
            return c.catalog->filled_up(*c.arena, {all.begin(), all.end()}, read, view(positions));
          },
          "indices"_a, "read"_a.none(), "positions"_a,
          "A batch of all these samples, of which `read` has those at `positions`; None: of none. "
          "The "
          "others have their labels, and no bytes.")
      .def("failures", &failures, "batch"_a,
           nb::sig("def failures(self, batch: Batch) -> list[dict[str, typing.Any]]"),
           "What went wrong in a batch, one dict per slot.");
}

}  // namespace

void register_reader(nb::module_& m) {
  // Its threads hold and let go of them.
  static_assert(SharedNatively<Directory> && SharedNatively<Batch> &&
                SharedNatively<io::SlowModel>);
  m.def("retired_buffers", &Arena::take_retired_shared,
        "Identities of shared buffers that were unmapped since the last call.");
  register_batch(m);
  register_catalog(m);
  nb::class_<Job>(m, "Job", "A submitted batch.")
      .def("wait", &Job::wait, "seconds"_a, nb::call_guard<WithoutGil>(),
           "The batch, or None when `seconds` are over. Delivers once.")
      .def("waiting_for", &Job::waiting_for, nb::call_guard<WithoutGil>())
      .def_prop_ro("done", &Job::done);
  nb::class_<ReaderHandle>(m, "Reader", "Reads submitted batches ahead, in order.")
      .def(nb::init<const CatalogHandle&, std::vector<int>, const std::string&, const std::string&,
                    unsigned, unsigned, unsigned, unsigned, uint64_t, bool, double,
                    std::shared_ptr<io::SlowModel>, nb::object, bool, int>(),
           "catalog"_a, nb::kw_only(), "parts"_a, "engine"_a, "direct"_a, "queue_depth"_a,
           "threads"_a, "workers"_a, "reads_in_flight"_a = 0, "budget_bytes"_a, "verify"_a,
           "deadline_s"_a = 300.0, "simulate"_a = nb::none(), "remote"_a = nb::none(),
           "shared"_a = false, "done_fd"_a = -1,
           nb::sig("def __init__(self, catalog: Catalog, *, parts: collections.abc.Sequence[int], "
                   "engine: str, direct: str, queue_depth: int, threads: int, workers: int, "
                   "reads_in_flight: int = 0, budget_bytes: int, verify: bool, "
                   "deadline_s: float = 300.0, simulate: SlowModel | None = None, "
                   "remote: typing.Any = None, shared: bool = False, done_fd: int = -1) -> None"))
      .def(
          "submit",
          [](ReaderHandle& h, const ArrayIn<int64_t>& indices,
             const std::optional<ArrayIn<uint64_t>>& starts,
             const std::optional<ArrayIn<uint64_t>>& sizes) {
            const auto values = view(indices);
            return h.reader->submit({values.begin(), values.end()}, ranges(starts, sizes));
          },
          "indices"_a, "starts"_a = nb::none(), "sizes"_a = nb::none(),
          "Queues one batch; returns at once. `starts`, `sizes`: bytes to read of each sample's "
          "only "
          "part.")
      .def("gather", &gather, "pieces"_a,
           nb::sig("def gather(self, pieces: list[tuple[Batch, int, int]]) -> Batch"),
           "Copies [(batch, start, stop), ...] into one new batch.")
      .def(
          "turn",
          [](ReaderHandle& h, std::optional<unsigned> reads_in_flight,
             std::optional<uint64_t> buffer_bytes) {
            h.reader->turn(reads_in_flight, buffer_bytes);
          },
          "reads_in_flight"_a = nb::none(), "buffer_bytes"_a = nb::none(),
          nb::call_guard<WithoutGil>(),
          "Sets the knobs that are given, at any time: reads in flight of all workers together, "
          "and "
          "bytes of batches that are read or ready.")
      .def("stats", &reader_stats, nb::sig("def stats(self) -> dict[str, typing.Any]"),
           "What it did since it was made, and what it holds now: see ReaderStats in reader.h.")
      .def_prop_ro(
          "batches_ahead", [](const ReaderHandle& h) { return h.reader->batches_ahead(); },
          "How many batches should be submitted ahead so that no worker runs dry.")
      .def(
          "close", [](ReaderHandle& h, double seconds) { return h.reader->close(seconds); },
          "seconds"_a = ReaderHandle::kCloseSeconds, nb::call_guard<WithoutGil>(),
          "Ends the threads. False: one did not answer in time and was left behind.")
      .def_prop_ro("engine_name", [](const ReaderHandle& h) { return h.reader->engine_name(); })
      .def_prop_ro("engine_reason", [](const ReaderHandle& h) { return h.reader->engine_reason(); })
      .def_prop_ro("mapped_bytes", [](const ReaderHandle& h) { return h.reader->mapped_bytes(); });
}

}  // namespace headrace::bindings
