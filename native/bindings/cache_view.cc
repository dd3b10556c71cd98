// Bindings of a client of a shared cache: one call looks a batch up, one takes it.
#include "bindings/cache_view.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "io/cache_view.h"
#include "io/gatherer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::Batch;
using io::CacheView;
using io::Gatherer;
using io::GatherJob;
using io::Hits;

// Fewer samples are looked up in less time than others take to get the interpreter and give it
// back.
constexpr size_t kLookUpsWithGil = 4096;

// Ends the gatherer's threads when Python lets go of it.
struct GathererHandle {
  std::shared_ptr<Gatherer> gatherer;

  GathererHandle(uint64_t budget_bytes, unsigned threads)
      : gatherer(Gatherer::make(budget_bytes, std::clamp(threads, 1u, 64u))) {}
  ~GathererHandle() { gatherer->close(); }
  GathererHandle(const GathererHandle&) = delete;
  GathererHandle& operator=(const GathererHandle&) = delete;
};

// What was read for the rest, as a batch that borrows the arrays' memory for the call.
Batch borrowed(const ArrayIn<uint8_t>& data, const ArrayIn<int64_t>& offsets,
               const ArrayIn<int64_t>& lengths, const ArrayIn<int64_t>& labels, uint64_t parts) {
  Batch batch;
  batch.parts = parts;
  batch.samples = labels.size();
  const auto values = [](const ArrayIn<int64_t>& array) {
    return std::vector<int64_t>(array.data(), array.data() + array.size());
  };
  batch.offsets = values(offsets);
  batch.lengths = values(lengths);
  batch.labels = values(labels);
  bool inside = batch.offsets.size() == batch.samples * parts &&
                batch.lengths.size() == batch.samples * parts;
  for (size_t s = 0; inside && s < batch.offsets.size(); ++s) {
    const auto offset = static_cast<uint64_t>(batch.offsets[s]);
    inside =
        offset <= data.size() && static_cast<uint64_t>(batch.lengths[s]) <= data.size() - offset;
  }
  if (!inside) {
    throw Error(ErrorKind::kInvalidArgument, "the samples read do not lie in their memory");
  }
  auto buffer = std::make_shared<Buffer>();
  buffer->data = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(data.data()));
  buffer->capacity = data.size();
  batch.buffer = std::move(buffer);
  batch.bytes = data.size();
  return batch;
}

std::shared_ptr<Batch> gather(const GathererHandle& handle, Hits& hits,
                              const ArrayIn<uint8_t>& data, const ArrayIn<int64_t>& offsets,
                              const ArrayIn<int64_t>& lengths, const ArrayIn<int64_t>& labels) {
  const WithoutGil released;
  const Batch misses = borrowed(data, offsets, lengths, labels, hits.parts);
  return handle.gatherer->gather(hits, &misses);
}

std::shared_ptr<Hits> look_up(const CacheView& view, const ArrayIn<int64_t>& indices) {
  std::optional<WithoutGil> release;
  if (indices.size() > kLookUpsWithGil) release.emplace();
  return view.look_up({indices.data(), indices.size()});
}

}  // namespace

void register_cache_view(nb::module_& m) {
  static_assert(SharedNatively<Hits>);  // its threads let go of them
  nb::class_<CacheView>(m, "CacheView", "A cache in shared memory, as another process sees it.")
      .def(nb::new_(&CacheView::of), "fd"_a, "bytes"_a, nb::kw_only(), "samples"_a, "parts"_a,
           "Maps the index. ValueError for memory that is not sealed and allocated.")
      .def(
          "add_slab",
          [](CacheView& v, uint32_t number, int fd, uint64_t bytes) {
            v.add_slab(number, fd, bytes);
          },
          "number"_a, "fd"_a, "bytes"_a, "Maps a slab.")
      .def("drop_slab", &CacheView::drop_slab, "number"_a, nb::call_guard<WithoutGil>(),
           "What look-ups found there stays valid.")
      .def("look_up", &look_up, "indices"_a, "Which samples are held.")
      .def_prop_ro("samples", &CacheView::samples)
      .def_prop_ro("parts", &CacheView::parts)
      .def_prop_ro("mapped_bytes", &CacheView::mapped_bytes,
                   "Address space of index and slabs; the memory is the owner's.");
  nb::class_<GatherJob>(m, "GatherJob", "A batch of held samples that was submitted.")
      .def("take", &GatherJob::take, nb::call_guard<WithoutGil>(), "The batch, once.")
      .def_prop_ro("done", &GatherJob::done)
      .def_prop_ro("bytes", &GatherJob::bytes, "Of its samples; known when it is done.");
  nb::class_<GathererHandle>(m, "Gatherer", "Puts batches of held samples together ahead.")
      .def(nb::init<uint64_t, unsigned>(), "budget_bytes"_a, "threads"_a)
      .def(
          "submit",
          [](const GathererHandle& h, std::shared_ptr<Hits> hits) {
            return h.gatherer->submit(std::move(hits));
          },
          "hits"_a, "Queues a batch of which nothing is missing; returns at once.")
      .def("gather", &gather, "hits"_a, "data"_a, "offsets"_a, "lengths"_a, "labels"_a,
           "One batch of what is held and what was read for the rest.")
      .def(
          "set_budget",
          [](const GathererHandle& h, uint64_t bytes) { h.gatherer->set_budget(bytes); }, "bytes"_a,
          nb::call_guard<WithoutGil>(), "Bytes of batches that are gathered or wait to be taken.")
      .def(
          "close", [](const GathererHandle& h) { h.gatherer->close(); },
          nb::call_guard<WithoutGil>(), "Ends the threads; batches can be taken still.")
      .def_prop_ro("mapped_bytes",
                   [](const GathererHandle& h) { return h.gatherer->mapped_bytes(); });
}

}  // namespace headrace::bindings
