// Bindings of the simulated storage: figures go in once, delays and statistics come out.
#include "bindings/slow.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/gil.h"
#include "io/slow_model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::SlowFigures;
using io::SlowModel;

std::shared_ptr<SlowModel> make(const std::string& name, double latency_median_s,
                                double latency_sigma, double open_median_s, double open_sigma,
                                double bandwidth_bytes_per_s, double stream_bytes_per_s,
                                unsigned parallelism, double error_rate, uint64_t seed,
                                const std::vector<std::pair<double, double>>& steps) {
  SlowFigures figures{name,
                      latency_median_s,
                      latency_sigma,
                      open_median_s,
                      open_sigma,
                      bandwidth_bytes_per_s,
                      stream_bytes_per_s,
                      parallelism,
                      error_rate,
                      seed,
                      {}};
  for (const auto& [at_s, factor] : steps) figures.steps.push_back({at_s, factor});
  return std::make_shared<SlowModel>(std::move(figures));
}

nb::dict stats(const SlowModel& model) {
  const io::SlowStats stats = model.stats();
  nb::dict d;
  d["requests"] = stats.requests;
  d["bytes"] = stats.bytes;
  d["errors"] = stats.errors;
  d["delay_s"] = stats.delay_s;
  return d;
}

}  // namespace

void register_slow(nb::module_& m) {
  nb::class_<SlowModel>(m, "SlowModel",
                        "A simulated slow storage. Its state is shared with forked children.")
      .def(nb::new_(&make), nb::kw_only(), "name"_a, "latency_median_s"_a, "latency_sigma"_a,
           "open_median_s"_a, "open_sigma"_a, "bandwidth_bytes_per_s"_a, "stream_bytes_per_s"_a,
           "parallelism"_a, "error_rate"_a, "seed"_a, "steps"_a)
      .def_prop_ro("label", &SlowModel::label)
      .def_static("now_ns", &SlowModel::now_ns, "Nanoseconds of the steady clock.")
      .def(
          "admit",
          [](SlowModel& model, int64_t now_ns, uint64_t nbytes, bool opens) {
            const io::SlowAnswer answer = model.admit(now_ns, nbytes, opens);
            return std::make_pair(answer.due_ns, answer.error);
          },
          "now_ns"_a, "nbytes"_a, "opens"_a = false,
          "A read that begins at `now_ns`: when it is done, and 0 or the errno it meets. Sleeps "
          "not.")
      .def("admit_open", &SlowModel::admit_open, "now_ns"_a,
           "An open or stat that begins at `now_ns`: when it is done. Sleeps not.")
      .def("open_delay", &SlowModel::open_delay, nb::call_guard<WithoutGil>(),
           "Sleeps as long as an open takes.")
      .def("read_delay", &SlowModel::read_delay, "nbytes"_a, nb::call_guard<WithoutGil>(),
           "Sleeps as long as a read takes; returns 0 or the errno that it meets.")
      .def("scale_latency", &SlowModel::scale_latency, "factor"_a,
           "Multiplies latencies from now on, in all processes that share the model.")
      .def("latency_factor", &SlowModel::latency_factor, "now_ns"_a)
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, typing.Any]"),
           "Requests, bytes, errors and delay_s of all processes that share the model.");
}

}  // namespace headrace::bindings
