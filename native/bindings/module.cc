// The extension module: a table of contents, nothing else.
#include <nanobind/nanobind.h>

#include <string_view>

#include "bindings/cache_view.h"
#include "bindings/checksum.h"
#include "bindings/directory.h"
#include "bindings/errors.h"
#include "bindings/fabric.h"
#include "bindings/file_board.h"
#include "bindings/file_reader.h"
#include "bindings/generation.h"
#include "bindings/gil.h"
#include "bindings/interpreter.h"
#include "bindings/mapping.h"
#include "bindings/order.h"
#include "bindings/permutation.h"
#include "bindings/pixels.h"
#include "bindings/rank_barrier.h"
#include "bindings/reader.h"
#include "bindings/remote.h"
#include "bindings/sample_cache.h"
#include "bindings/slow.h"
#include "bindings/string_kernel.h"
#include "bindings/tokens.h"

NB_MODULE(_native, m) {
  m.attr("build_type") = HEADRACE_BUILD_TYPE;
  // Objects in users' globals and test parameters outlive the module at exit; that is no leak.
  // Debug builds still list them.
  nanobind::set_leak_warnings(std::string_view(HEADRACE_BUILD_TYPE) == "Debug");
  headrace::bindings::register_gil(m);
  headrace::bindings::register_errors(m);
  headrace::bindings::register_checksum(m);
  headrace::bindings::register_mapping(m);
  headrace::bindings::register_directory(m);
  headrace::bindings::register_slow(m);
  headrace::bindings::register_remote(m);
  headrace::bindings::register_fabric(m);
  headrace::bindings::register_rank_barrier(m);
  headrace::bindings::register_reader(m);
  headrace::bindings::register_file_reader(m);
  headrace::bindings::register_generation(m);
  headrace::bindings::register_interpreter(m);
  headrace::bindings::register_permutation(m);
  headrace::bindings::register_order(m);
  headrace::bindings::register_pixels(m);
  headrace::bindings::register_sample_cache(m);
  headrace::bindings::register_cache_view(m);
  headrace::bindings::register_string_kernel(m);
  headrace::bindings::register_file_board(m);
  headrace::bindings::register_tokens(m);
}
