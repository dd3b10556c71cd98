// Order bindings: positions in, samples out, whole batches at a time.
//
// The classes of headrace/order hold one each, and check what they are asked for.
#include "bindings/order.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/order.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

template <class T>
ArrayOut<int64_t> indices(const T& self, uint64_t epoch, uint64_t start, uint64_t stop) {
  std::vector<int64_t> out(stop - start);
  {
    const WithoutGil released;
    self.indices(epoch, start, stop, out.data());
  }
  return own(std::move(out));
}

// With the GIL, which is the lock that the order needs: a fork never finds it held by another.
ArrayOut<int64_t> balanced_indices(const BalancedOrder& self, uint64_t epoch, uint64_t start,
                                   uint64_t stop) {
  std::vector<int64_t> out(stop - start);
  self.indices(epoch, start, stop, out.data());
  return own(std::move(out));
}

void construct_balanced(BalancedOrder* self, const ArrayIn<int64_t>& labels, uint64_t seed,
                        uint64_t length) {
  new (self) BalancedOrder(view(labels), seed, length);
}

// Orders travel to worker processes.
template <class T>
void set_state(T& self, const typename T::State& state) {
  std::apply([&](const auto&... values) { new (&self) T(values...); }, state);
}

template <const std::vector<int64_t>& (BalancedOrder::*kMember)() const>
ArrayOut<const int64_t> balanced_array(nb::handle_t<BalancedOrder> self) {
  const std::vector<int64_t>& values = (nb::cast<const BalancedOrder&>(self).*kMember)();
  return borrow(values.data(), values.size(), self);
}

using Array = ArrayOut<int64_t>;
std::tuple<Array, Array, Array, uint64_t, uint64_t> balanced_state(const BalancedOrder& self) {
  return {own(self.classes()), own(self.starts()), own(self.members()), self.seed(), self.length()};
}

using ArrayState =
    std::tuple<ArrayIn<int64_t>, ArrayIn<int64_t>, ArrayIn<int64_t>, uint64_t, uint64_t>;
void set_balanced_state(BalancedOrder& self, const ArrayState& state) {
  const auto copy = [](const ArrayIn<int64_t>& array) {
    return std::vector<int64_t>(array.data(), array.data() + array.size());
  };
  const auto& [classes, starts, members, seed, length] = state;
  new (&self) BalancedOrder(copy(classes), copy(starts), copy(members), seed, length);
}

}  // namespace

void register_order(nb::module_& m) {
  nb::class_<BlockedOrder>(m, "BlockedOrder", "See headrace.order.Blocked.")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t>(), "samples"_a, "block_samples"_a,
           "window_blocks"_a, "seed"_a)
      .def("indices", &indices<BlockedOrder>, "epoch"_a, "start"_a, "stop"_a,
           "The samples at positions start to stop - 1.")
      .def("window_at", &BlockedOrder::window_at, "epoch"_a, "position"_a,
           "The positions (start, stop) of the window that holds one.")
      .def("__getstate__", &BlockedOrder::state)
      .def("__setstate__", &set_state<BlockedOrder>, "state"_a);
  nb::class_<OpportunisticOrder>(m, "OpportunisticOrder", "See headrace.order.Opportunistic.")
      .def(nb::init<uint64_t, const std::vector<Interval>&, uint64_t, uint64_t>(), "samples"_a,
           "resident"_a, "seed"_a, "epochs"_a)
      .def("indices", &indices<OpportunisticOrder>, "epoch"_a, "start"_a, "stop"_a,
           "The samples at positions start to stop - 1.")
      .def_prop_ro("parts", &OpportunisticOrder::parts,
                   "Epochs that begin with a part that was not first before.")
      .def("part", &OpportunisticOrder::part, "number"_a,
           "Where a part begins and ends when the resident samples are numbered first.")
      .def("__getstate__", &OpportunisticOrder::state)
      .def("__setstate__", &set_state<OpportunisticOrder>, "state"_a);
  nb::class_<BalancedOrder>(m, "BalancedOrder", "See headrace.order.Balanced.")
      .def("__init__", &construct_balanced, "labels"_a, "seed"_a, "length"_a)
      .def("indices", &balanced_indices, "epoch"_a, "start"_a, "stop"_a,
           "The samples at positions start to stop - 1.")
      .def_prop_ro("classes", &balanced_array<&BalancedOrder::classes>, nb::rv_policy::automatic,
                   "The labels that are drawn, ascending.")
      .def_prop_ro("starts", &balanced_array<&BalancedOrder::starts>, nb::rv_policy::automatic,
                   "Where each class's members begin when all are counted, and where they end.")
      .def("__getstate__", &balanced_state)
      .def("__setstate__", &set_balanced_state, "state"_a);
}

}  // namespace headrace::bindings
