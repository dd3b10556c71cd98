// What decoding JPEGs must cost at least, by plain libjpeg-turbo in threads: no headrace, no
// Python, no batches.
//
//   pixel_probe MODE THREADS SECONDS FILE...
//
// MODE `entropy`: Huffman decoding of the whole picture and no more, which no crop of a baseline
// file can avoid above its last row. `region`: a random crop as RandomResizedCrop draws it, its
// rows and columns decoded to RGB, not resized. Files are read into memory before the clock starts.
// Prints pictures a second and CPU seconds for each thousand.
#include <stdio.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

// After <stdio.h>, which it needs.
// clang-format off
#include <jpeglib.h>
// clang-format on

namespace {

using Bytes = std::vector<unsigned char>;

void region(jpeg_decompress_struct* info, std::mt19937* random, Bytes* row) {
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<>(low, high)(*random);
  };
  const double width = info->image_width, height = info->image_height;
  double w = width, h = height;
  for (int i = 0; i < 10; ++i) {
    const double area = width * height * uniform(0.08, 1),
                 aspect = std::exp(uniform(std::log(0.75), std::log(4. / 3)));
    const double x = std::round(std::sqrt(area * aspect)), y = std::round(std::sqrt(area / aspect));
    if (x <= width && y <= height) {
      w = x, h = y;
      break;
    }
  }
  const auto top = static_cast<JDIMENSION>(uniform(0, height - h + 1));
  auto left = static_cast<JDIMENSION>(uniform(0, width - w + 1)),
       columns = static_cast<JDIMENSION>(w);
  jpeg_start_decompress(info);
  if (columns < info->output_width) jpeg_crop_scanline(info, &left, &columns);
  row->resize(size_t{4} * info->output_width);
  if (top > 0) jpeg_skip_scanlines(info, top);
  for (JDIMENSION y = 0; y < static_cast<JDIMENSION>(h);) {
    JSAMPROW at = row->data();
    y += jpeg_read_scanlines(info, &at, 1);
  }
}

void decode(const Bytes& file, bool entropy, std::mt19937* random, Bytes* row) {
  jpeg_decompress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, file.data(), file.size());
  jpeg_read_header(&info, TRUE);
  info.out_color_space = JCS_EXT_RGBX;
  if (entropy) {
    jpeg_read_coefficients(&info);
  } else {
    region(&info, random, row);
  }
  jpeg_destroy_decompress(&info);
}

double cpu_seconds() {
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "usage: pixel_probe entropy|region THREADS SECONDS FILE...\n");
    return 2;
  }
  const bool entropy = std::string(argv[1]) == "entropy";
  const double seconds = std::atof(argv[3]);
  std::vector<Bytes> files;
  for (int i = 4; i < argc; ++i) {
    std::ifstream in(argv[i], std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::atomic<size_t> next{0};
  const double cpu = cpu_seconds();
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < std::atoi(argv[2]); ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      Bytes row;
      while (elapsed() < seconds) decode(files[next++ % files.size()], entropy, &random, &row);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto count = static_cast<double>(next);
  std::printf("%.1f %.4f\n", count / elapsed(), (cpu_seconds() - cpu) / count * 1000);
}
