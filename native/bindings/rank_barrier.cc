// Binding of the barrier that a benchmark's ranks of one host share; moments are pairs of
// nanoseconds.
#include "bindings/rank_barrier.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include <optional>
#include <utility>

#include "bindings/gil.h"
#include "io/rank_barrier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using Moments = std::pair<int64_t, int64_t>;  // end, undelayed end

StepEnds ends_of(const Moments& moments) { return {moments.first, moments.second}; }

template <bool (RankBarrier::*wait)(int64_t, StepEnds*)>
std::optional<Moments> waited(RankBarrier& self, int64_t until_ns) {
  StepEnds latest{};
  const WithoutGil released;
  if (!(self.*wait)(until_ns, &latest)) return std::nullopt;
  return Moments{latest.end_ns, latest.undelayed_ns};
}

}  // namespace

void register_rank_barrier(nb::module_& m) {
  nb::class_<RankBarrier>(m, "RankBarrier", "Where a benchmark's ranks of one host meet.")
      .def_static("create", &RankBarrier::create, "ranks"_a, "led"_a,
                  "For so many processes; `led`: nobody goes on before `release`.")
      .def_static("attach", &RankBarrier::attach, "fd"_a, "index"_a,
                  "Another process's, by its descriptor; this one is the `index`-th there.")
      .def_prop_ro("fd", &RankBarrier::fd, "For others to open; -1 in those that opened it.")
      .def(
          "arrive", [](RankBarrier& self, const Moments& ends) { self.arrive(ends_of(ends)); },
          "ends"_a,
          "Say when this rank's step ended, and when it would have without the harness's delays.")
      .def("wait", &waited<&RankBarrier::await>, "until_ns"_a,
           "The latest moments of all; None: not until then, or a signal came.")
      .def("wait_host", &waited<&RankBarrier::await_host>, "until_ns"_a,
           "For the leader: the latest moments of its host; None as for `wait`.")
      .def_prop_ro("missing", &RankBarrier::missing,
                   "The first who has not arrived in this turn; -1: all have.")
      .def(
          "release", [](RankBarrier& self, const Moments& ends) { self.release(ends_of(ends)); },
          "ends"_a, "For the leader: let the host go on, with the latest moments of all hosts.");
}

}  // namespace headrace::bindings
