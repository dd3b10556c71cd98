#include "bindings/interpreter.h"

#include <time.h>

#include <chrono>
#include <cstdint>

#include "bindings/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

// Sleeps without the lock, then asks for it: how long that takes is no matter of the processor's
// queue, which the sleep has been through already.
int64_t lock_wait_ns(int64_t sleep_ns) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point wanted;
  {
    const WithoutGil released;
    const timespec pause{sleep_ns / 1'000'000'000, sleep_ns % 1'000'000'000};
    nanosleep(&pause, nullptr);
    wanted = Clock::now();
  }
  return (Clock::now() - wanted) / std::chrono::nanoseconds(1);
}

}  // namespace

void register_interpreter(nb::module_& m) {
  m.def("lock_wait_ns", &lock_wait_ns, "sleep_ns"_a,
        "Sleeps without the interpreter's lock, and says how long it waited to have it again.");
}

}  // namespace headrace::bindings
