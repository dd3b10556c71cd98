// TensorFlow's strings, cut out of batches by TensorFlow itself.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::bindings {

void register_string_kernel(nanobind::module_& m);

}  // namespace headrace::bindings
