#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace nb = nanobind;

namespace headrace::bindings {
namespace {

// How many visits there are, and whether more are let in.
constexpr uint32_t kClosed = uint32_t{1} << 31;
std::atomic<uint32_t> g_visits{0};
thread_local uint32_t t_visits = 0;

// A visitor that takes longer hangs in Python; should it come back, it stays.
constexpr std::chrono::seconds kVisitMax{5};

bool enter() noexcept {
  if ((g_visits.fetch_add(1) & kClosed) == 0) {
    ++t_visits;
    return true;
  }
  g_visits.fetch_sub(1);
  return false;
}

void leave() noexcept {
  --t_visits;
  g_visits.fetch_sub(1);
}

// Of the parent's visitors a child has the one that forked.
void after_fork() { g_visits.store((g_visits.load() & kClosed) | t_visits); }

void close_interpreter() {
  const WithoutGil released;  // visitors want it
  g_visits.fetch_or(kClosed);
  const auto deadline = std::chrono::steady_clock::now() + kVisitMax;
  while ((g_visits.load() & ~kClosed) != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void stay() noexcept {
  for (;;) ::pause();
}

Visit::Visit() noexcept : entered_(enter()) {
  if (entered_) state_ = or_stay([] { return PyGILState_Ensure(); });
}

Visit::~Visit() {
  if (!entered_) return;
  or_stay([this] { PyGILState_Release(state_); });
  leave();
}

bool interpreter_ends() noexcept { return (g_visits.load() & kClosed) != 0; }

void register_gil(nb::module_&) {
  pthread_atfork(nullptr, nullptr, after_fork);
  // Before what is registered later, which is called earlier: engines are closed by then.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_interpreter));
}

}  // namespace headrace::bindings
