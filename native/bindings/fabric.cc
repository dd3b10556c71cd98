// Bindings of the NVMe/TCP data paths: connected sockets go in, ranges are read, figures come out.
// Sockets are taken over: Python hands in a descriptor that it no longer owns.
#include "bindings/fabric.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "bindings/remote.h"
#include "core/error.h"
#include "fabric/failover.h"
#include "fabric/initiator.h"
#include "fabric/target_queues.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using fabric::Exports;
using fabric::Failover;
using fabric::Initiator;
using fabric::TargetQueues;

// Owned by Python and by threads of its own, which may need the interpreter to end: who destroys it
// lets go of the interpreter first. A forked child, which has none of the threads, leaves it alone.
template <class T, class... Args>
std::shared_ptr<T> make_with_threads(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [owner = ::getpid()](T* p) {
    if (::getpid() != owner) return;
    if (interpreter_ends() || !PyGILState_Check()) {
      delete p;
      return;
    }
    const WithoutGil released;
    delete p;
  });
}

// (0, 0, header, padding and data bytes) or (status, info, 0, 0, 0): what check_common says.
std::tuple<int, uint32_t, uint32_t, uint32_t, uint32_t> judge(const nb::bytes& header, bool to_host,
                                                              bool established, bool hdgst,
                                                              bool ddgst, uint32_t alignment,
                                                              uint32_t capsule_data_max,
                                                              uint32_t data_max) {
  fabric::CommonHeader common;
  if (header.size() != sizeof(common)) throw nb::value_error("a common header has 8 bytes");
  std::memcpy(&common, header.data(), sizeof(common));
  const fabric::PduRules rules{to_host ? fabric::Side::kHost : fabric::Side::kController,
                               established,
                               hdgst,
                               ddgst,
                               alignment,
                               capsule_data_max,
                               data_max};
  fabric::PduLayout layout;
  if (const fabric::Fault fault = fabric::check_common(common, rules, &layout)) {
    return {static_cast<int>(fault.status), fault.info, 0, 0, 0};
  }
  return {0, 0, layout.header_bytes, layout.pad_bytes, layout.data_bytes};
}

void adopt(TargetQueues& queues, int fd, uint16_t entries, uint8_t dgst, uint8_t hpda,
           bool flow_control, std::shared_ptr<Exports> exports, uint64_t association,
           const nb::bytes& before) {
  fabric::TargetQpairOptions options;
  options.entries = entries;
  options.dgst = dgst;
  options.hpda = hpda;
  options.sq_flow_control = flow_control;
  options.data_pdu_max = 1 << 20;
  queues.adopt(fd, options, std::move(exports), association,
               {static_cast<const std::byte*>(before.data()), before.size()});
}

nb::dict target_figures(const TargetQueues& queues) {
  const fabric::TargetFigures f = queues.figures();
  nb::dict d;
  d["queues"] = f.queues;
  d["reads"] = f.reads;
  d["bytes"] = f.bytes;
  d["reads_cold"] = f.reads_cold;
  d["reads_uncopied"] = f.reads_uncopied;
  d["refused"] = f.refused;
  d["read_errors"] = f.read_errors;
  d["faults"] = f.faults;
  d["digest_errors"] = f.digest_errors;
  return d;
}

nb::dict initiator_figures(const Initiator& initiator) {
  const fabric::InitiatorFigures f = initiator.figures();
  nb::dict d;
  d["reads"] = f.reads;
  d["commands"] = f.commands;
  d["bytes"] = f.bytes;
  d["retried"] = f.retried;
  d["digest_errors"] = f.digest_errors;
  d["timeouts"] = f.timeouts;
  d["lost_queues"] = f.lost_queues;
  d["failed"] = f.failed;
  return d;
}

void attach(Initiator& initiator, uint64_t target, uint16_t label, int fd, uint16_t entries,
            uint8_t dgst, uint8_t cpda, bool flow_control, uint32_t data_max) {
  fabric::QpairOptions options;
  options.entries = entries;
  options.dgst = dgst;
  options.cpda = cpda;
  options.sq_flow_control = flow_control;
  options.data_max = data_max;
  initiator.attach(target, label, fd, options);
}

nb::list take_lost(Initiator& initiator) {
  nb::list out;
  for (const fabric::LostQueue& lost : initiator.take_lost()) {
    out.append(nb::make_tuple(lost.target, lost.label, lost.reason));
  }
  return out;
}

using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keeps arrays alive until the last request that writes to them is gone, on whatever thread.
std::shared_ptr<const void> keep(std::vector<Writable> arrays) {
  return {new std::vector<Writable>(std::move(arrays)), [](const void* p) {
            if (const Visit visit; visit) {
              or_stay([p] { delete static_cast<const std::vector<Writable>*>(p); });
            }
          }};
}

// Has requests read and waits for all of them: bytes that arrived, or -errno, for each.
ArrayOut<int64_t> wait_for(io::RemoteEngine& engine, std::vector<io::RemoteRequest> requests,
                           std::vector<std::string> urls, std::vector<Writable> memory,
                           double deadline_s) {
  const size_t count = requests.size();
  std::vector<int64_t> outcomes(count, -ETIMEDOUT);
  const auto inbox = std::make_shared<io::RemoteInbox>();
  auto batch = std::make_shared<io::RemoteRequests>(std::move(requests), std::move(urls),
                                                    keep(std::move(memory)), inbox, 0);
  {
    const WithoutGil released;
    const auto deadline = io::RemoteInbox::Clock::now() +
                          std::chrono::duration_cast<io::RemoteInbox::Clock::duration>(
                              std::chrono::duration<double>(deadline_s));
    engine.read(batch);
    for (size_t answered = 0; answered < count;) {
      const auto results = inbox->take(deadline, count - answered);  // woken once
      if (results.empty()) {
        batch->abandon();
        break;
      }
      for (const io::RemoteResult& result : results) {
        ++answered;
        outcomes[result.number] =
            result.error != 0 ? -int64_t{result.error} : static_cast<int64_t>(result.bytes);
      }
    }
    // The loop lets go right after its last answer. Who asked may want to unmap the memory now.
    while (batch.use_count() > 1 && io::RemoteInbox::Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    batch.reset();
  }
  return own(std::move(outcomes));
}

ArrayOut<int64_t> read_many(const std::shared_ptr<io::RemoteEngine>& engine, const std::string& url,
                            const ArrayIn<int64_t>& offsets, const ArrayIn<int64_t>& lengths,
                            Writable dest, double deadline_s) {
  const size_t count = offsets.size();
  if (lengths.size() != count) throw nb::value_error("offsets and lengths differ in number");
  std::vector<io::RemoteRequest> requests;
  uint64_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    if (offsets.data()[i] < 0 || lengths.data()[i] < 0) throw nb::value_error("a range below 0");
    const auto length = static_cast<uint64_t>(lengths.data()[i]);
    if (length > dest.size() - at) throw nb::value_error("dest is shorter than the lengths' sum");
    requests.push_back({0, static_cast<uint64_t>(offsets.data()[i]), length,
                        reinterpret_cast<std::byte*>(dest.data()) + at});
    at += length;
  }
  return wait_for(*engine, std::move(requests), std::vector<std::string>(count, url),
                  {std::move(dest)}, deadline_s);
}

ArrayOut<int64_t> read_each(const std::shared_ptr<Initiator>& initiator,
                            std::vector<std::string> urls, const ArrayIn<int64_t>& offsets,
                            std::vector<Writable> dests, double deadline_s) {
  if (urls.size() != offsets.size() || urls.size() != dests.size()) {
    throw nb::value_error("urls, offsets and dests differ in number");
  }
  std::vector<io::RemoteRequest> requests;
  for (size_t i = 0; i < urls.size(); ++i) {
    if (offsets.data()[i] < 0) throw nb::value_error("an offset below 0");
    requests.push_back({0, static_cast<uint64_t>(offsets.data()[i]), dests[i].size(),
                        reinterpret_cast<std::byte*>(dests[i].data())});
  }
  return wait_for(*initiator, std::move(requests), std::move(urls), std::move(dests), deadline_s);
}

template <class Engine>
ArrayOut<int64_t> read_many_of(const std::shared_ptr<Engine>& engine, const std::string& url,
                               const ArrayIn<int64_t>& offsets, const ArrayIn<int64_t>& lengths,
                               Writable dest, double deadline_s) {
  return read_many(engine, url, offsets, lengths, std::move(dest), deadline_s);
}

nb::dict failover_figures(const Failover& failover) {
  const fabric::FailoverFigures f = failover.figures();
  nb::dict d;
  d["reads"] = f.reads;
  d["bytes"] = f.bytes;
  d["reads_elsewhere"] = f.reads_elsewhere;
  d["bytes_elsewhere"] = f.bytes_elsewhere;
  d["reads_last"] = f.reads_last;
  d["bytes_last"] = f.bytes_last;
  d["unwritten"] = f.unwritten;
  d["failed"] = f.failed;
  return d;
}

void register_failover(nb::module_& m) {
  nb::class_<Failover>(m, "FabricFailover",
                       "Reads volumes that lie in several places: the first that has the bytes.")
      .def(nb::new_([](std::shared_ptr<Initiator> engine, nb::object last) {
             return make_with_threads<Failover>(std::move(engine),
                                                remote_engine_of(std::move(last)));
           }),
           "engine"_a, "last"_a.none() = nb::none(),
           "engine: reads the places. last: reads, by the volume's path, what no place has.")
      .def("add_volume", &Failover::add_volume, "path"_a, "places"_a,
           "A volume, and the URLs of its copies in the order in which they are asked.")
      .def("close", &Failover::close, nb::call_guard<WithoutGil>(),
           "Later reads fail with ECANCELED.")
      .def("figures", &failover_figures, nb::sig("def figures(self) -> dict[str, int]"))
      .def("read_many", &read_many_of<Failover>, "path"_a, "offsets"_a, "lengths"_a, "dest"_a,
           "deadline_s"_a,
           "Reads ranges into `dest`, one behind the other. int64 for each: bytes that arrived, or "
           "-errno.");
}

void register_target(nb::module_& m) {
  nb::class_<Exports>(m, "FabricExports", "Namespaces that a target's queues read from.")
      .def(nb::new_([] { return std::make_shared<Exports>(); }))
      .def("add", &Exports::add, "nsid"_a, "fd"_a, "nbytes"_a, "block_bytes"_a,
           "Exports what `fd` (duplicated) is open for.")
      .def("remove", &Exports::remove, "nsid"_a)
      .def("set_written", &Exports::set_written, "nsid"_a, "nbytes"_a,
           "Only the first `nbytes` are there: reads beyond are answered as unwritten.");
  nb::class_<TargetQueues>(m, "FabricTargetQueues", "The threads that serve a target's I/O queues.")
      .def(nb::new_([](unsigned loops, unsigned readers, uint64_t cache_bytes) {
             fabric::TargetQueuesOptions options;
             options.loops = loops;
             options.readers = readers;
             options.cache_bytes = cache_bytes;
             return make_with_threads<TargetQueues>(options);
           }),
           nb::kw_only(), "loops"_a = 1, "readers"_a = 16, "cache_bytes"_a = 0)
      .def("adopt", &adopt, nb::kw_only(), "fd"_a, "entries"_a, "dgst"_a, "hpda"_a,
           "flow_control"_a, "exports"_a, "association"_a, "before"_a,
           "Takes a connected socket over after its Connect was answered.")
      .def("close", &TargetQueues::close, nb::call_guard<WithoutGil>(),
           "Closes all queues and ends the threads.")
      .def("drop", &TargetQueues::drop, "association"_a, "Closes an association's queues, soon.")
      .def("figures", &target_figures, nb::sig("def figures(self) -> dict[str, int]"));
}

void register_initiator(nb::module_& m) {
  nb::class_<Initiator>(m, "FabricInitiator",
                        "Reads ranges of NVMe/TCP namespaces over connected queues.")
      .def(nb::new_([](double command_timeout_s, double read_deadline_s, unsigned reads_in_flight) {
             fabric::InitiatorOptions options;
             options.command_timeout_s = command_timeout_s;
             options.read_deadline_s = read_deadline_s;
             options.reads_in_flight = reads_in_flight;
             return make_with_threads<Initiator>(options);
           }),
           nb::kw_only(), "command_timeout_s"_a = 10.0, "read_deadline_s"_a = 60.0,
           "reads_in_flight"_a = 256)
      .def("add_target", &Initiator::add_target, "transfer_max"_a,
           "Returns the number of a new target.")
      .def(
          "add_volume",
          [](Initiator& initiator, const std::string& url, uint64_t target, uint32_t nsid,
             uint32_t block_bytes, uint64_t blocks, uint64_t first_byte,
             std::optional<uint64_t> bytes) {
            const uint64_t whole = blocks * block_bytes;
            if (first_byte > whole || bytes.value_or(0) > whole - first_byte) {
              throw nb::value_error("the window leaves the namespace");
            }
            initiator.add_volume(
                url, target,
                {nsid, block_bytes, blocks, first_byte, bytes.value_or(whole - first_byte)});
          },
          "url"_a, "target"_a, "nsid"_a, "block_bytes"_a, "blocks"_a, "first_byte"_a = 0,
          "bytes"_a = nb::none(), "A namespace, or a window of it, under a name.")
      .def("attach", &attach, nb::kw_only(), "target"_a, "label"_a, "fd"_a, "entries"_a, "dgst"_a,
           "cpda"_a, "flow_control"_a, "data_max"_a,
           "Takes a connected socket over after Connect has succeeded.")
      .def("give_up", &Initiator::give_up, "target"_a, "errno"_a,
           "A target's reads fail with this from now on, until a queue is attached.")
      .def("take_lost", &take_lost, nb::sig("def take_lost(self) -> list[tuple[int, int, str]]"),
           "Queues that ended since the last call: target, label, why.")
      .def_prop_ro("lost_event", &Initiator::lost_event,
                   "A descriptor that is readable while `take_lost` has something.")
      .def("turn", &Initiator::turn, "reads_in_flight"_a)
      .def("close", &Initiator::close, nb::call_guard<WithoutGil>())
      .def("figures", &initiator_figures, nb::sig("def figures(self) -> dict[str, int]"))
      .def("read_many", &read_many_of<Initiator>, "url"_a, "offsets"_a, "lengths"_a, "dest"_a,
           "deadline_s"_a,
           "Reads ranges into `dest`, one behind the other. int64 for each: bytes that arrived, or "
           "-errno.")
      .def("read_each", &read_each, "urls"_a, "offsets"_a, "dests"_a, "deadline_s"_a,
           "The same for ranges of several volumes, each into memory of its own.");
}

}  // namespace

void register_fabric(nb::module_& m) {
  m.def(
      "fabric_check_common", &judge, "header"_a, nb::kw_only(), "to_host"_a, "established"_a,
      "hdgst"_a, "ddgst"_a, "alignment"_a, "capsule_data_max"_a, "data_max"_a,
      "What the native receiver says of a PDU's first 8 bytes: (status, info, header, padding and "
      "data bytes).");
  register_target(m);
  register_initiator(m);
  register_failover(m);
}

}  // namespace headrace::bindings
