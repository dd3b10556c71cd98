// Directory bindings: a mapped sample directory, and the builder of its name tree.
#include "bindings/directory.h"

#include <fcntl.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/directory.h"
#include "core/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using DirectoryPtr = std::shared_ptr<Directory>;

// The bytes of a name. A str that has no UTF-8 (a file name that was not text) is encoded as Python
// encodes file names; `kept` holds what that made.
std::string_view bytes_of(nb::handle name, std::vector<nb::object>* kept) {
  Py_ssize_t size = 0;
  char* data = nullptr;
  PyObject* bytes = name.ptr();
  if (PyUnicode_Check(name.ptr())) {
    const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
    if (text != nullptr) return {text, static_cast<size_t>(size)};
    PyErr_Clear();
    kept->push_back(nb::steal(PyUnicode_EncodeFSDefault(name.ptr())));
    bytes = kept->back().ptr();
    if (bytes == nullptr) throw nb::python_error();
  }
  if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

DirectoryPtr open_path(const nb::bytes& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    throw Error(ErrorKind::kVolume, std::string(path.c_str()) + ": " + strerror(errno),
                path.c_str(), -1, errno);
  }
  try {
    DirectoryPtr directory = Directory::open(fd, path.c_str());
    close(fd);
    return directory;
  } catch (...) {
    close(fd);
    throw;
  }
}

// The names are bytes or str. -1 where no sample has that name.
ArrayOut<int64_t> find_many(const Directory& directory, const nb::list& names) {
  // The tuple keeps every name alive while the GIL is away, whatever happens to the list.
  const nb::tuple held = nb::steal<nb::tuple>(PyList_AsTuple(names.ptr()));
  std::vector<std::string_view> queries;
  queries.reserve(held.size());
  std::vector<nb::object> kept;
  for (const nb::handle name : held) queries.push_back(bytes_of(name, &kept));
  std::vector<int64_t> indices(queries.size());
  {
    const WithoutGil released;
    directory.find(queries, indices);
    directory.assert_whole();
  }
  return own(std::move(indices));
}

// One name, bytes or str; it takes less time than to let the GIL go. -1 where no sample has it.
int64_t find(const Directory& directory, const nb::object& name) {
  std::vector<nb::object> kept;
  const std::string_view query = bytes_of(name, &kept);
  int64_t index = -1;
  directory.find({&query, 1}, {&index, 1});
  directory.assert_whole();
  return index;
}

uint64_t checked(const Directory& directory, int64_t index) {
  if (index < 0 || static_cast<uint64_t>(index) >= directory.samples()) {
    throw Error(ErrorKind::kSampleNotFound,
                "sample index " + std::to_string(index) + " is outside 0.." +
                    std::to_string(static_cast<int64_t>(directory.samples()) - 1));
  }
  return static_cast<uint64_t>(index);
}

nb::list names(const Directory& directory, const ArrayIn<int64_t>& indices) {
  nb::list list;
  std::string name;
  for (const int64_t index : view(indices)) {
    directory.name(checked(directory, index), &name);
    list.append(to_bytes(name));
  }
  directory.assert_whole();
  return list;
}

// At most so many entries of a folder at once: each is a Python object.
constexpr uint64_t kChildrenMax = 1 << 20;

nb::tuple children(const Directory& directory, const nb::bytes& prefix, int64_t first,
                   int64_t limit) {
  std::vector<Child> found;
  {
    const std::string_view text(prefix.c_str(), prefix.size());
    const WithoutGil released;
    found = directory.children(
        text, static_cast<uint64_t>(std::max<int64_t>(first, 0)),
        std::min(static_cast<uint64_t>(std::max<int64_t>(limit, 0)), kChildrenMax));
    directory.assert_whole();
  }
  nb::list names;
  std::vector<int64_t> samples, next;
  std::vector<uint8_t> kinds;
  for (const Child& child : found) {
    names.append(to_bytes(child.name));
    samples.push_back(static_cast<int64_t>(child.sample));
    next.push_back(static_cast<int64_t>(child.next_rank));
    kinds.push_back(child.kind);
  }
  return nb::make_tuple(names, own(std::move(samples)), own(std::move(next)),
                        own(std::move(kinds)));
}

nb::tuple lookup(const Directory& directory, const nb::bytes& path) {
  const auto found = directory.lookup({path.c_str(), path.size()});
  directory.assert_whole();
  return nb::make_tuple(found.first, found.second);
}

// The length of one part of each sample; -1 where a sample has no such part.
ArrayOut<int64_t> lengths(const Directory& directory, const ArrayIn<int64_t>& indices,
                          uint32_t part) {
  std::vector<int64_t> found;
  for (const int64_t index : view(indices)) {
    const auto [first, last] = directory.extents_of(checked(directory, index));
    int64_t length = -1;
    for (uint64_t e = first; e < last && length < 0; ++e) {
      if (directory.part(e) == part) length = static_cast<int64_t>(directory.extent(e).length);
    }
    found.push_back(length);
  }
  directory.assert_whole();
  return own(std::move(found));
}

nb::object column_array(nb::handle self, const Directory& directory, const ColumnInfo& column) {
  const std::byte* bytes = directory.column_bytes(column);
  directory.assert_whole();
  const nb::dlpack::dtype dtype = {
      static_cast<uint8_t>(column.kind == 'f'   ? nb::dlpack::dtype_code::Float
                           : column.kind == 'u' ? nb::dlpack::dtype_code::UInt
                                                : nb::dlpack::dtype_code::Int),
      static_cast<uint8_t>(8 * column.width), 1};
  const size_t shape[1] = {column.count};
  return nb::cast(nb::ndarray<nb::numpy, nb::ro>(bytes, 1, shape, self, nullptr, dtype));
}

nb::object labels(nb::handle_t<Directory> self) {
  const auto& directory = nb::cast<const Directory&>(self);
  for (const ColumnInfo& column : directory.columns()) {
    if (column.label) return column_array(self, directory, column);
  }
  return nb::none();
}

nb::dict columns(nb::handle_t<Directory> self) {
  const auto& directory = nb::cast<const Directory&>(self);
  nb::dict dict;
  for (const ColumnInfo& column : directory.columns()) {
    if (!column.label) dict[column.name.c_str()] = column_array(self, directory, column);
  }
  return dict;
}

// One element per extent of the given samples, in order.
nb::dict extents_of(const Directory& directory, const ArrayIn<int64_t>& indices) {
  std::vector<int64_t> sample, part, volume, offset, length, crc, mtime;
  for (const int64_t index : view(indices)) {
    const auto [first, last] = directory.extents_of(checked(directory, index));
    for (uint64_t e = first; e < last; ++e) {
      const Extent extent = directory.extent(e);
      sample.push_back(index);
      part.push_back(directory.part(e));
      volume.push_back(extent.volume);
      offset.push_back(static_cast<int64_t>(extent.offset));
      length.push_back(static_cast<int64_t>(extent.length));
      crc.push_back(extent.crc);
      mtime.push_back(extent.mtime_ns);
    }
  }
  directory.assert_whole();
  nb::dict dict;
  dict["sample"] = own(std::move(sample));
  dict["part"] = own(std::move(part));
  dict["volume"] = own(std::move(volume));
  dict["offset"] = own(std::move(offset));
  dict["length"] = own(std::move(length));
  dict["crc"] = own(std::move(crc));
  dict["mtime_ns"] = own(std::move(mtime));
  return dict;
}

nb::list list_of(const std::vector<std::string>& strings) {
  nb::list list;
  for (const std::string& text : strings) list.append(to_bytes(text));
  return list;
}

nb::tuple build(const ArrayIn<uint8_t>& blob, const ArrayIn<uint64_t>& offsets) {
  BuiltNames built;
  {
    const WithoutGil released;
    built = build_names(view(blob), view(offsets));
  }
  nb::list levels;
  for (BuiltLevel& level : built.levels) {
    levels.append(nb::make_tuple(own(std::move(level.offsets)), own(std::move(level.blob))));
  }
  nb::object order = nb::none();
  if (!built.rank_to_index.empty()) order = nb::cast(own(std::move(built.rank_to_index)));
  return nb::make_tuple(order, levels);
}

}  // namespace

void register_directory(nb::module_& m) {
  nb::class_<Directory>(m, "Directory", "The sample directory of one segment, mapped.")
      .def_static("open", &open_path, "path"_a)
      .def_static(
          "from_fd", [](int fd, const std::string& label) { return Directory::open(fd, label); },
          "fd"_a, "label"_a, "The directory in an open file; `fd` stays the caller's.")
      .def_prop_ro("samples", &Directory::samples)
      .def_prop_ro("extents", &Directory::extents)
      .def_prop_ro("has_crc", &Directory::has_crc)
      .def_prop_ro("uuid",
                   [](const Directory& d) {
                     const auto uuid = d.uuid();
                     return nb::bytes(uuid.data(), uuid.size());
                   })
      .def(
          "header",
          [](const Directory& d) {
            const auto header = d.header();
            return nb::bytes(header.data(), header.size());
          },
          "The header page: what the fingerprint is made of.")
      .def_prop_ro(
          "part_names", [](const Directory& d) { return list_of(d.part_names()); },
          nb::sig("def part_names(self, /) -> list[bytes]"))
      .def_prop_ro(
          "class_names", [](const Directory& d) { return list_of(d.class_names()); },
          nb::sig("def class_names(self, /) -> list[bytes]"))
      .def_prop_ro("labels", &labels,
                   nb::sig("def labels(self, /) -> numpy.typing.NDArray[typing.Any] | None"),
                   "Array of the labels as stored, or None.")
      .def_prop_ro("columns", &columns,
                   nb::sig("def columns(self, /) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
                   "User columns by name.")
      .def("find", &find, "name"_a, nb::sig("def find(self, name: str | bytes) -> int"),
           "The sample with this name, -1 where there is none.")
      .def("find_many", &find_many, "names"_a,
           nb::sig("def find_many(self, names: list[str] | list[bytes] | list[str | bytes]) -> "
                   "numpy.typing.NDArray[numpy.int64]"),
           "The samples with these names, -1 where there is none.")
      .def(
          "name",
          [](const Directory& d, int64_t index) {
            std::string name;
            d.name(checked(d, index), &name);
            d.assert_whole();
            return to_bytes(name);
          },
          "index"_a)
      .def("names", &names, "indices"_a,
           nb::sig("def names(self, indices: numpy.typing.NDArray[numpy.int64]) -> list[bytes]"))
      .def(
          "index_at_rank",
          [](const Directory& d, int64_t rank) { return d.index_at_rank(checked(d, rank)); },
          "rank"_a, "The sample at a rank of the sorted name order.")
      .def(
          "children", &children, "prefix"_a, "first"_a, "limit"_a,
          nb::sig("def children(self, prefix: bytes, first: int, limit: int) -> tuple[list[bytes], "
                  "numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], "
                  "numpy.typing.NDArray[numpy.uint8]]"),
          "Entries of a folder (names, samples, ranks to go on at, kinds: 0 file, 1 folder, 2 file "
          "whose name others begin with).")
      .def(
          "seek",
          [](const Directory& d, const nb::bytes& key) {
            const uint64_t rank = d.seek({key.c_str(), key.size()});
            d.assert_whole();
            return rank;
          },
          "key"_a, "The first rank whose name is not less than `key`.")
      .def("lookup", &lookup, "path"_a, nb::sig("def lookup(self, path: bytes) -> tuple[int, int]"),
           "The sample of this name and the first sample below it; -1 for none.")
      .def("lengths", &lengths, "indices"_a, "part"_a,
           nb::sig("def lengths(self, indices: numpy.typing.NDArray[numpy.int64], part: int) -> "
                   "numpy.typing.NDArray[numpy.int64]"),
           "The length of a part of each sample in bytes, -1 where it has none.")
      .def("extents_of", &extents_of, "indices"_a,
           nb::sig("def extents_of(self, indices: numpy.typing.NDArray[numpy.int64]) -> dict[str, "
                   "numpy.typing.NDArray[numpy.int64]]"),
           "Arrays by field (sample, part, volume, offset, length, crc, mtime_ns), one element per "
           "extent.")
      .def("verify", &Directory::damaged_blocks, nb::call_guard<WithoutGil>(),
           "Offsets of the blocks that do not match their checksum.");
  m.def(
      "build_names", &build, "blob"_a, "offsets"_a,
      nb::sig(
          "def build_names(blob: numpy.typing.NDArray[numpy.uint8], offsets: "
          "numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.int64] | None, "
          "list[tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8]]]]"),
      "Builds the name tree: (rank_to_index or None, [(block offsets, blob) per level]).");
}

}  // namespace headrace::bindings
