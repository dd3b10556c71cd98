#include "io/string_kernel.h"

#include <nanobind/stl/string.h>

#include "bindings/string_kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {

void register_string_kernel(nb::module_& m) {
  m.def("register_string_kernel", &io::register_string_kernel, "framework_library"_a, "shares"_a,
        "Registers TensorFlow's operation HeadraceStrings; returns why it cannot be had, or ''.");
}

}  // namespace headrace::bindings
