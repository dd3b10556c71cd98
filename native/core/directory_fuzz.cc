// Fuzzes the sample directory: open, then every accessor, on hostile bytes.
//
// An input is a whole .hrd file. The mutator knows the format: it starts from valid files, changes
// fields, section entries, section bytes or anything, and recomputes the checksums most of the
// time, because a file that fails its checksum reaches nothing behind it. Allowed outcomes: the
// accessor returns something in range, or it throws headrace::Error.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "core/error.h"
#include "testing/directory_builder.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using headrace::Directory;
using headrace::testing::DirectoryImage;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

template <class F>
void attempt(F&& action) {
  try {
    action();
  } catch (const headrace::Error& error) {
    require(error.kind == headrace::ErrorKind::kCorruptStore,
            "only CorruptStore leaves an accessor");
  }
}

void visit_sample(const Directory& directory, uint64_t sample, std::vector<std::string>* names) {
  attempt([&] {
    const auto [first, last] = directory.extents_of(sample);
    require(first < last && last <= directory.extents(), "extents lie inside the directory");
    for (uint64_t e = first; e < std::min(last, first + 8); ++e) {
      directory.extent(e);
      directory.part(e);
    }
  });
  directory.prefetch_sample(sample);
  attempt([&] { directory.label(sample); });
  attempt([&] {
    std::string name;
    directory.name(sample, &name);
    require(name.size() <= headrace::kNameBytesMax, "names are not too long");
    names->push_back(name);
  });
  attempt([&] {
    require(directory.index_at_rank(sample) < directory.samples(), "an index is in range");
  });
}

void visit(const Directory& directory) {
  std::vector<std::string> names{"", "folder/7919.x", std::string(70000, 'z'), "s00000001"};
  const uint64_t n = directory.samples();
  for (uint64_t i = 0; i < std::min<uint64_t>(n, 40); ++i) visit_sample(directory, i, &names);
  for (const uint64_t i : {n / 3, n / 2, n - 1}) {
    if (i < n) visit_sample(directory, i, &names);
  }
  const std::vector<std::string_view> queries(names.begin(), names.end());
  attempt([&] {
    std::vector<int64_t> found(queries.size());
    directory.find(queries, found);
    for (const int64_t index : found) {
      require(index >= -1 && index < static_cast<int64_t>(n), "a found index is in range");
    }
  });
  for (const std::string_view query : queries) {
    attempt([&] { require(directory.seek(query) <= n, "a rank is in range"); });
    attempt([&] {
      const auto [file, folder] = directory.lookup(query);
      require(file < static_cast<int64_t>(n) && folder < static_cast<int64_t>(n), "in range");
    });
    attempt([&] {
      uint64_t rank = 0;
      for (const auto& child : directory.children(query.substr(0, query.size() / 2), 0, 50)) {
        require(child.sample < n && child.next_rank > rank, "a listing goes forward");
        rank = child.next_rank;
      }
    });
  }
  for (const auto& column : directory.columns()) {
    attempt([&] {
      const std::byte* bytes = directory.column_bytes(column);
      volatile uint8_t sum = 0;
      for (uint64_t i = 0; i < column.count * column.width; ++i) {
        sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(bytes[i]));
      }
    });
  }
  directory.damaged_blocks();
  attempt([&] { directory.assert_whole(); });
}

DirectoryImage seed_image(uint32_t seed) {
  using namespace headrace::testing;
  const size_t counts[] = {0, 1, 2, 15, 16, 17, 40, 257};
  const size_t n = counts[seed % 8];
  DirectorySpec spec = (seed / 8) % 2 == 0 ? plain_spec(n) : full_spec(n);
  spec.index_width = 2 + (seed / 16) % 7;
  return build_directory(spec);
}

// One change that is likely to matter.
void mutate(DirectoryImage* image, std::mt19937& random) {
  static constexpr uint64_t kTempting[] = {0,     1,        2,   7,          8,          15,
                                           16,    63,       64,  255,        4096,       65535,
                                           65536, 1u << 31, ~0u, 1ull << 48, 1ull << 63, ~0ull};
  const auto pick = [&](uint64_t limit) { return limit == 0 ? 0 : random() % limit; };
  const auto tempting = [&](uint64_t old) -> uint64_t {
    switch (pick(5)) {
      case 0:
        return old + 1;
      case 1:
        return old - 1;
      case 2:
        return image->bytes.size() - pick(80);
      case 3:
        return old ^ (1ull << pick(64));
      default:
        return kTempting[pick(std::size(kTempting))];
    }
  };
  const uint64_t sections = std::min<uint64_t>(image->sections(), 60);
  switch (pick(8)) {
    case 0: {  // a number of the header
      static constexpr uint64_t kFields[] = {16, 24, 32, 48, 56, 72};
      const uint64_t at = kFields[pick(std::size(kFields))];
      image->put(at, tempting(image->get<uint64_t>(at)));
      break;
    }
    case 1: {
      static constexpr uint64_t kFields[] = {8, 40, 44, 68};
      const uint64_t at = kFields[pick(std::size(kFields))];
      image->put(at, static_cast<uint32_t>(tempting(image->get<uint32_t>(at))));
      break;
    }
    case 2: {  // a number of a section entry
      if (sections == 0) break;
      const uint64_t at = 128 + 64 * pick(sections) + 8 + 8 * pick(4);
      image->put(at, tempting(image->get<uint64_t>(at)));
      break;
    }
    case 3: {  // kind, width, parameters
      if (sections == 0) break;
      const uint64_t at = 128 + 64 * pick(sections) + (pick(2) == 0 ? 4 * pick(2) : 32 + pick(8));
      image->put(at, static_cast<uint8_t>(tempting(image->get<uint8_t>(at))));
      break;
    }
    case 4: {  // two entries change places, or one covers another
      if (sections < 2) break;
      std::byte* table = image->bytes.data() + 128;
      std::byte* a = table + 64 * pick(sections);
      std::byte* b = table + 64 * pick(sections);
      if (pick(2) == 0) {
        std::swap_ranges(a, a + 64, b);
      } else if (a != b) {
        std::memcpy(a, b, 64);
      }
      break;
    }
    default: {  // bytes of one section, in place
      if (sections == 0) break;
      const uint64_t entry = 128 + 64 * pick(sections);
      const uint64_t at = image->get<uint64_t>(entry + 8);
      const uint64_t size = image->get<uint64_t>(entry + 16);
      if (at >= image->bytes.size() || size == 0 || size > image->bytes.size() - at) break;
      const uint64_t start = pick(size);
      const uint64_t span = std::min<uint64_t>(size - start, 1 + pick(64));
      LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(image->bytes.data() + at + start), span, span);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("directory_fuzz", MFD_CLOEXEC);
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  std::shared_ptr<Directory> directory;
  attempt([&] { directory = Directory::open(fd, "fuzz.hrd"); });
  if (directory != nullptr) visit(*directory);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::mt19937 random(seed);
  DirectoryImage image;
  if (size < 4096 || random() % 256 == 0) {
    image = seed_image(static_cast<uint32_t>(random()));
  } else {
    image.bytes.assign(reinterpret_cast<std::byte*>(data),
                       reinterpret_cast<std::byte*>(data) + size);
  }
  if (image.bytes.size() > max_size) image.bytes.resize(max_size);
  if (image.bytes.size() < 4096) return LLVMFuzzerMutate(data, size, max_size);
  if (random() % 32 == 0) {  // anything at all
    std::memcpy(data, image.bytes.data(), image.bytes.size());
    return LLVMFuzzerMutate(data, image.bytes.size(), max_size);
  }
  for (unsigned changes = 1 + random() % 3; changes > 0; --changes) mutate(&image, random);
  if (random() % 16 != 0 && !image.seal()) image.seal_header();
  std::memcpy(data, image.bytes.data(), image.bytes.size());
  return image.bytes.size();
}
