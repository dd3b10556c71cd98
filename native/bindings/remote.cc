// Remote bindings: requests go to an engine written in Python once per batch, with the
// interpreter's lock; answers come from any thread. Memory of a request stays valid as long as
// anybody holds the requests, late answers included.
#include "bindings/remote.h"

#include <nanobind/stl/shared_ptr.h>

#include <cerrno>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "fabric/failover.h"
#include "fabric/initiator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::RemoteRequest;
using io::RemoteRequests;

// The errno of the OSError that is being handled, else EIO. An error that says nothing to the user
// otherwise is printed.
int errno_of(nb::python_error& error) {
  if (error.matches(PyExc_OSError)) {
    const nb::object number = nb::getattr(error.value(), "errno", nb::none());
    if (nb::isinstance<nb::int_>(number)) return nb::cast<int>(number);
  }
  error.discard_as_unraisable("headrace remote engine");
  return EIO;
}

class PythonEngine final : public io::RemoteEngine {
 public:
  explicit PythonEngine(nb::object engine) : engine_(std::move(engine)) {}
  ~PythonEngine() override {
    if (const Visit visit; visit) {
      or_stay([this] { engine_.reset(); });
    } else {
      static_cast<void>(engine_.release());
    }
  }

  void read(std::shared_ptr<RemoteRequests> requests) override {
    int error = EIO;
    if (const Visit visit; visit) {
      try {
        or_stay([&] { engine_.attr("read")(requests); });
        return;
      } catch (nb::python_error& e) {
        error = or_stay([&] { return errno_of(e); });
      }
    }
    for (size_t i = 0; i < requests->requests().size(); ++i) requests->finish(i, 0, error);
  }

  void turn(unsigned reads_in_flight) override {
    if (const Visit visit; visit) or_stay([&] { engine_.attr("turn")(reads_in_flight); });
  }

  std::string name() const override { return "remote"; }

 private:
  nb::object engine_;
};

size_t checked(const RemoteRequests& requests, size_t i) {
  if (i < requests.requests().size()) return i;
  throw nb::index_error("no request has this number");
}

template <auto kMember>
ArrayOut<int64_t> column(const RemoteRequests& requests) {
  std::vector<int64_t> values;
  for (const RemoteRequest& request : requests.requests()) {
    values.push_back(static_cast<int64_t>(request.*kMember));
  }
  return own(std::move(values));
}

nb::object dest(nb::handle_t<RemoteRequests> self, size_t i) {
  const auto& requests = nb::cast<const RemoteRequests&>(self);
  const RemoteRequest& request = requests.requests()[checked(requests, i)];
  const nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> array(reinterpret_cast<uint8_t*>(request.dest),
                                                           {request.length}, self);
  return nb::steal(PyMemoryView_FromObject(nb::cast(array).ptr()));
}

bool finish_with(RemoteRequests& requests, size_t i, nb::handle buffer, int error) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  bool counted;
  {
    const WithoutGil released;
    counted = requests.finish_with(
        i, {static_cast<const std::byte*>(view.buf), static_cast<size_t>(view.len)}, error);
  }
  PyBuffer_Release(&view);
  return counted;
}

}  // namespace

std::shared_ptr<io::RemoteEngine> remote_engine_of(nb::object object) {
  if (object.is_none()) return nullptr;
  // Native engines are called without the interpreter, and readers' threads let go of them.
  static_assert(SharedNatively<fabric::Initiator> && SharedNatively<fabric::Failover>);
  if (nb::isinstance<fabric::Initiator>(object)) {
    return nb::cast<std::shared_ptr<fabric::Initiator>>(object);
  }
  if (nb::isinstance<fabric::Failover>(object)) {
    return nb::cast<std::shared_ptr<fabric::Failover>>(object);
  }
  return std::make_shared<PythonEngine>(std::move(object));
}

void register_remote(nb::module_& m) {
  nb::class_<RemoteRequests>(m, "RemoteRequests",
                             "Ranges of remote volumes to be read. Each must be finished once.")
      .def_prop_ro("count", [](const RemoteRequests& r) { return r.requests().size(); })
      .def_prop_ro("volumes", &column<&RemoteRequest::volume>, nb::rv_policy::automatic,
                   "int64, each request's volume: its number within the catalog.")
      .def_prop_ro("offsets", &column<&RemoteRequest::offset>, nb::rv_policy::automatic,
                   "int64, in the volume.")
      .def_prop_ro("lengths", &column<&RemoteRequest::length>, nb::rv_policy::automatic,
                   "int64, bytes.")
      .def(
          "path",
          [](const RemoteRequests& r, size_t i) {
            const std::string& path = r.path(checked(r, i));
            return nb::bytes(path.data(), path.size());
          },
          "i"_a, "The volume's path: a URL.")
      .def("dest", &dest, "i"_a, nb::sig("def dest(self, i: int) -> memoryview"),
           "Writable memory for request i, of its length. Stays valid as long as it is held.")
      .def(
          "open", [](const RemoteRequests& r, size_t i) { return r.open(checked(r, i)); }, "i"_a,
          "Whether request i still wants an answer: it is not finished, and somebody waits.")
      .def(
          "finish",
          [](RemoteRequests& r, size_t i, uint64_t nbytes, int error) {
            return r.finish(checked(r, i), nbytes, error);
          },
          "i"_a, "nbytes"_a, "errno"_a = 0,
          "Request i brought `nbytes` into `dest(i)`, or met `errno`. The first call counts; False "
          "for the others, and when nobody waits any more. Any thread may call.")
      .def(
          "finish_with",
          [](RemoteRequests& r, size_t i, nb::handle buffer, int error) {
            return finish_with(r, checked(r, i), buffer, error);
          },
          "i"_a, "buffer"_a, "errno"_a = 0,
          nb::sig("def finish_with(self, i: int, buffer: typing.Any, errno: int = 0) -> bool"),
          "The same for bytes that lie in `buffer`: copies them, without the interpreter's lock.");
}

}  // namespace headrace::bindings
