// Mapping bindings: a mapped file for readers in Python and their libraries, which may shrink
// without ending the process. The array borrows the mapping and keeps it alive.
#include "core/mapping.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/mapping.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

struct MappedFile {
  std::unique_ptr<Mapping> mapping;
};

auto data(nb::handle_t<MappedFile> self) {
  const Mapping& mapping = *nb::cast<MappedFile&>(self).mapping;
  return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(mapping.data(), {mapping.size()}, self);
}

}  // namespace

void register_mapping(nb::module_& m) {
  nb::class_<MappedFile>(m, "MappedFile", "A file mapped read-only, whose pages may vanish.")
      .def(
          "__init__",
          [](MappedFile* self, int fd, size_t size, const std::string& path) {
            new (self) MappedFile{Mapping::of_file(fd, size, path)};
          },
          "fd"_a, "size"_a, "path"_a,
          "Map the first `size` bytes of `fd`, which may be closed afterwards.")
      .def_prop_ro("data", &data, "uint8, shape (size,): what is mapped.")
      .def_prop_ro(
          "damaged", [](const MappedFile& self) { return self.mapping->damaged(); },
          "Pages that were gone when they were touched, and are zeros now.");
}

}  // namespace headrace::bindings
