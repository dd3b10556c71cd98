// Permutation bindings: positions in, indices out, whole batches at a time, the GIL free meanwhile.
#include "bindings/permutation.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/gil.h"
#include "core/error.h"
#include "core/permutation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OwnedIndices = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

std::span<const int64_t> span_of(const Indices& array) { return {array.data(), array.size()}; }

// A new array of `count` values that `fill(int64_t*)` writes while the GIL is free.
template <typename Fill>
OwnedIndices filled(size_t count, Fill fill) {
  std::unique_ptr<int64_t[]> values(new int64_t[count]);
  {
    const WithoutGil released;
    fill(values.get());
  }
  nb::capsule owner(values.get(), [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  return {values.release(), {count}, owner};
}

// Checked here as well as in the library, because the size of the result hangs on it.
OwnedIndices range(const Permutation& self, int64_t start, int64_t stop) {
  if (start < 0 || stop < start || static_cast<uint64_t>(stop) > self.n()) {
    throw Error(ErrorKind::kInvalidArgument,
                "range is " + std::to_string(start) + " to " + std::to_string(stop) +
                    ", expected 0 <= start <= stop <= " + std::to_string(self.n()));
  }
  const auto first = static_cast<uint64_t>(start);
  const auto last = static_cast<uint64_t>(stop);
  return filled(last - first, [&](int64_t* out) { self.range(first, last, out); });
}

OwnedIndices at(const Permutation& self, const Indices& positions) {
  return filled(positions.size(), [&](int64_t* out) { self.at(span_of(positions), out); });
}

OwnedIndices inverse(const Permutation& self, const Indices& indices) {
  return filled(indices.size(), [&](int64_t* out) { self.inverse(span_of(indices), out); });
}

// Signed, so that a negative n is our ValueError with its value, not a TypeError about overloads.
void construct(Permutation* self, int64_t n, uint64_t key) {
  if (n < 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "n is " + std::to_string(n) + ", expected 1 to 2^48 elements");
  }
  new (self) Permutation(static_cast<uint64_t>(n), key);
}

// Orders that hold permutations travel to worker processes; (n, key) says all.
std::pair<uint64_t, uint64_t> state_of(const Permutation& self) { return {self.n(), self.key()}; }

void set_state(Permutation& self, const std::pair<uint64_t, uint64_t>& state) {
  new (&self) Permutation(state.first, state.second);
}

uint64_t hash_of(uint64_t position_start, const Indices& indices) {
  return order_hash(position_start, span_of(indices));
}

}  // namespace

void register_permutation(nb::module_& m) {
  nb::class_<Permutation>(m, "Permutation", "A keyed permutation of [0, n) in O(1) memory.")
      .def("__init__", &construct, "n"_a, "key"_a)
      .def_prop_ro("n", &Permutation::n, "The number of elements.")
      .def_prop_ro("key", &Permutation::key, "The 64-bit key.")
      .def("range", &range, "start"_a, "stop"_a, "The indices at positions start to stop - 1.")
      .def("at", &at, "positions"_a, "The index at each position (int64).")
      .def("inverse", &inverse, "indices"_a, "The position of each index (int64).")
      .def("__getstate__", &state_of)
      .def("__setstate__", &set_state, "state"_a);
  m.def("order_hash", &hash_of, "position_start"_a, "indices"_a, nb::call_guard<WithoutGil>(),
        "Sum over the batch of a hash of (position, index), mod 2^64.");
}

}  // namespace headrace::bindings
