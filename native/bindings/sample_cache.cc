// Tier bindings: samples of one batch held in memory, put together from several tiers, or written
// to a file: one call a batch, the GIL free meanwhile.
#include "bindings/sample_cache.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "io/assemble.h"
#include "io/direct_writer.h"
#include "io/sample_cache.h"
#include "io/sample_writer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::Batch;
using io::Hits;
using io::SampleCache;

// Buffers of assembled batches, recycled. Shared by the readers of one tier.
struct Assembler {
  std::shared_ptr<Arena> arena;

  Assembler(uint64_t retained_bytes, bool shared)
      : arena(Arena::make(retained_bytes, shared ? Memory::kShared : Memory::kPrivate)) {}

  std::shared_ptr<Batch> assemble(const ArrayIn<int64_t>& indices, const nb::list& parts) const {
    std::vector<io::Part> list;
    for (const nb::handle item : parts) {
      const auto part = nb::cast<nb::tuple>(item);
      const auto positions = nb::cast<ArrayIn<int64_t>>(part[1]);
      const auto values = view(positions);
      list.push_back({nb::cast<std::shared_ptr<Batch>>(part[0]), {values.begin(), values.end()}});
    }
    const auto asked = view(indices);
    const WithoutGil released;
    return io::assemble(*arena, asked, list);
  }
};

template <std::vector<int64_t> Hits::*kMember>
ArrayOut<const int64_t> hits_array(nb::handle_t<Hits> self) {
  const auto& values = nb::cast<const Hits&>(self).*kMember;
  return borrow(values.data(), values.size(), self);
}

ArrayOut<uint32_t> write_samples(int fd, uint64_t offset, const Batch& batch,
                                 const ArrayIn<int64_t>& positions) {
  std::vector<uint32_t> checksums;
  {
    const WithoutGil released;
    checksums = io::write_samples(fd, offset, batch, view(positions));
  }
  return own(std::move(checksums));
}

ArrayOut<uint32_t> append(io::DirectWriter& writer, const Batch& batch,
                          const ArrayIn<int64_t>& positions) {
  std::vector<uint32_t> checksums;
  {
    const WithoutGil released;
    checksums = writer.append(batch, view(positions));
  }
  return own(std::move(checksums));
}

ArrayOut<int64_t> failed_samples(const Batch& batch) {
  std::vector<int64_t> samples;
  for (const io::Failure& failure : batch.failures) {
    samples.push_back(static_cast<int64_t>(failure.slot / batch.parts));
  }
  std::sort(samples.begin(), samples.end());
  samples.erase(std::unique(samples.begin(), samples.end()), samples.end());
  return own(std::move(samples));
}

}  // namespace

void register_sample_cache(nb::module_& m) {
  nb::class_<Assembler>(m, "Assembler", "Puts batches together from what several tiers have read.")
      .def(nb::init<uint64_t, bool>(), "retained_bytes"_a, "shared"_a = false)
      .def_prop_ro("mapped_bytes", [](const Assembler& a) { return a.arena->mapped_bytes(); })
      .def(
          "assemble", &Assembler::assemble, "indices"_a, "parts"_a,
          nb::sig("def assemble(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), "
                  "order='C', device='cpu', writable=False)], parts: list[tuple[Batch, "
                  "NDArray[numpy.int64]]]) -> Batch"),
          "One batch of [(batch, positions), ...]; a batch that fits whole is not copied.");
  nb::class_<Hits>(m, "Hits", "What a look-up in a cache found; keeps its memory.")
      .def_prop_ro("indices", &hits_array<&Hits::indices>, "int64, as asked.")
      .def_prop_ro("missing", &hits_array<&Hits::missing>,
                   "int64, positions in `indices` that are not held.")
      .def_prop_ro("missing_count", [](const Hits& h) { return h.missing.size(); })
      .def_prop_ro(
          "bytes", [](const Hits& h) { return h.bytes; },
          "Of what is held; known when a cache looked it up, or it was gathered.");
  nb::class_<SampleCache>(m, "SampleCache", "Samples in memory, within a quota.")
      .def(nb::new_([](uint64_t samples, uint64_t parts, uint64_t quota_bytes, bool shared) {
             return SampleCache::make(samples, parts, quota_bytes,
                                      shared ? Memory::kShared : Memory::kPrivate);
           }),
           nb::kw_only(), "samples"_a, "parts"_a, "quota_bytes"_a, "shared"_a = false)
      .def("insert", &SampleCache::insert, "batch"_a, nb::call_guard<WithoutGil>(),
           "Copies what is not held and still fits; returns the number of samples.")
      .def(
          "look_up",
          [](const SampleCache& c, const ArrayIn<int64_t>& indices) {
            return c.look_up(view(indices));
          },
          "indices"_a, nb::call_guard<WithoutGil>(), "Which samples are held.")
      .def("gather", &SampleCache::gather, "hits"_a, "misses"_a.none(),
           nb::call_guard<WithoutGil>(),
           "One batch of what was held and what was read for the rest.")
      .def("set_quota", &SampleCache::set_quota, "bytes"_a, nb::call_guard<WithoutGil>(),
           "A smaller quota gives memory back at once.")
      .def_prop_ro("quota_bytes", &SampleCache::quota_bytes)
      .def_prop_ro("held_samples", &SampleCache::held_samples)
      .def_prop_ro("mapped_bytes", &SampleCache::mapped_bytes)
      .def_prop_ro("delivered_bytes", &SampleCache::delivered_bytes)
      .def_prop_ro("version", &SampleCache::version, "Changes when slabs come or go.")
      .def("slabs", &SampleCache::slabs,
           "The memory that others may map, as it is now: the index, number 0, and the slabs.");
  nb::class_<io::Slab>(m, "Slab", "Memory of a cache; mapped as long as this lives.")
      .def_prop_ro(
          "number", [](const io::Slab& s) { return s.number; }, "0: the index.")
      .def_prop_ro("identity", [](const io::Slab& s) { return s.buffer->id; })
      .def_prop_ro(
          "fd", [](const io::Slab& s) { return s.buffer->fd; }, "-1: private memory.")
      .def_prop_ro("bytes", [](const io::Slab& s) { return s.buffer->capacity; });
  nb::class_<io::DirectWriter>(m, "DirectWriter", "Appends samples to a file past the page cache.")
      .def(nb::init<const std::string&, uint64_t>(), "path"_a, "offset"_a)
      .def("append", &append, "batch"_a, "positions"_a,
           "Writes samples behind those before and returns the crc32c of each slot.")
      .def_prop_ro("direct", &io::DirectWriter::direct,
                   "Whether writes still go past the page cache.");
  m.def("failed_samples", &failed_samples, "batch"_a,
        "int64, ascending: samples of a batch that could not be read.");
  m.def("write_samples", &write_samples, "fd"_a, "offset"_a, "batch"_a, "positions"_a,
        "Writes samples back to back and returns the crc32c of each slot.");
}

}  // namespace headrace::bindings
