// The interpreter's lock: how native code lets go of Python and comes back to it, up to the
// process's end.
//
// An interpreter that ends lets no other thread back in. CPython before 3.14 calls pthread_exit
// then, whose unwinding ends the whole process at the first function that is noexcept ("terminate
// called without an active exception"): destructors are, and so is nanobind's call into us. Later
// ones have such threads wait for the process's end, and here they always do.
//
// Threads that are not Python's must not wait: who destroys their engine joins them. They make a
// `Visit`, which is refused from the moment that the interpreter begins to end; what they would
// have released then is leaked. See docs/decisions/0015.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <nanobind/nanobind.h>

namespace headrace::bindings {

// For the rest of the process's life.
[[noreturn]] void stay() noexcept;

// What `call` returns; a thread that the interpreter ends in it stays there. REQUIRES that `call`
// has nothing to destroy but what may be destroyed without the interpreter.
template <class Call>
decltype(auto) or_stay(Call&& call) {
  try {
    return call();
  } catch (const abi::__forced_unwind&) {
    stay();
  }
}

// A scope without the interpreter's lock. In place of nb::gil_scoped_release, everywhere.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    or_stay([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// A scope with the interpreter's lock on any thread, or false: it ends, touch nothing of Python.
// In place of nb::gil_scoped_acquire, everywhere.
class Visit {
 public:
  Visit() noexcept;
  ~Visit();
  explicit operator bool() const { return entered_; }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  const bool entered_;
  PyGILState_STATE state_{};
};

// Objects of T that Python hands over are kept alive without Python: any thread may let go of them.
template <class T>
concept SharedNatively = nanobind::detail::has_shared_from_this_v<T>;

// Whether visits are refused: no native thread waits for the interpreter any more.
bool interpreter_ends() noexcept;

// Has visits refused at the interpreter's end, once those that are under way are over.
void register_gil(nanobind::module_& m);

}  // namespace headrace::bindings
