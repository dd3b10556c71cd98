// The extension module: a table of contents, nothing else.
#include <nanobind/nanobind.h>

#include "bindings/checksum.h"
#include "bindings/directory.h"
#include "bindings/errors.h"
#include "bindings/reader.h"

NB_MODULE(_native, m) {
  m.attr("build_type") = HEADRACE_BUILD_TYPE;
  headrace::bindings::register_errors(m);
  headrace::bindings::register_checksum(m);
  headrace::bindings::register_directory(m);
  headrace::bindings::register_reader(m);
}
