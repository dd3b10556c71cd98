// Batches of known content: what sample `index` holds is a function of it, so is what is right.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/arena.h"
#include "io/batch.h"
#include "testing/store_builder.h"

namespace headrace::testing {

// What sample `index` holds in `part`: of many lengths, some empty.
inline std::string content(int64_t index, uint64_t part) {
  std::mt19937 random(static_cast<unsigned>(index * 7 + static_cast<int64_t>(part)));
  return random_bytes(random, index % 9 == 4 ? 0 : random() % 5000);
}

// A batch of these samples, with gaps between them.
inline std::shared_ptr<io::Batch> make_batch(const std::vector<int64_t>& indices,
                                             uint64_t parts = 1) {
  auto batch = std::make_shared<io::Batch>();
  batch->parts = parts;
  batch->samples = indices.size();
  batch->indices = indices;
  std::string all = "gap";
  for (const int64_t index : indices) {
    batch->labels.push_back(index % 10 - 1);
    for (uint64_t p = 0; p < parts; ++p) {
      const std::string bytes = content(index, p);
      batch->offsets.push_back(static_cast<int64_t>(all.size()));
      batch->lengths.push_back(static_cast<int64_t>(bytes.size()));
      all += bytes + "gap";
    }
  }
  const BufferPtr buffer = Arena::make(0)->acquire(all.size());
  std::memcpy(buffer->data, all.data(), all.size());
  batch->buffer = buffer;
  batch->bytes = all.size();
  return batch;
}

}  // namespace headrace::testing
