// Requests are cut into commands of whole blocks that cover them exactly.
#include "fabric/read_pieces.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>

using namespace headrace;
using namespace headrace::fabric;

namespace {

std::shared_ptr<ReadBatch> batch_of(std::vector<io::RemoteRequest> requests) {
  const size_t count = requests.size();
  return std::make_shared<ReadBatch>(
      std::make_shared<io::RemoteRequests>(std::move(requests), std::vector<std::string>(count),
                                           nullptr, std::make_shared<io::RemoteInbox>(), 0),
      0);
}

// Each byte of a volume has its own address as `dest`, so that a piece can be checked by numbers.
std::byte* const kBase = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);

void check_covers(const NamespaceGeometry& volume, uint64_t offset, uint64_t length,
                  uint32_t command_bytes, uint64_t expected) {
  CAPTURE(offset);
  CAPTURE(length);
  const auto batch = batch_of({{0, offset, length, kBase}});
  std::vector<Piece> pieces;
  const size_t count = cut(volume, command_bytes, batch, 0, &pieces);
  CHECK(count == pieces.size());
  uint64_t at = 0;
  for (const Piece& piece : pieces) {
    CHECK(piece.place.dest.data() == kBase + at);
    CHECK(piece.slba * volume.block_bytes + piece.place.skip == volume.first_byte + offset + at);
    CHECK(piece.bytes == piece.blocks * volume.block_bytes);
    CHECK(piece.bytes <= std::max(command_bytes, volume.block_bytes));
    CHECK(piece.place.skip + piece.place.dest.size() <= piece.bytes);
    CHECK(piece.slba + piece.blocks <= volume.blocks);
    at += piece.place.dest.size();
  }
  CHECK(at == expected);
}

}  // namespace

TEST_CASE("any range is covered by whole blocks, once") {
  const NamespaceGeometry volume{1, 512, 100};
  for (const uint32_t command_bytes : {1u, 512u, 1000u, 4096u, 1u << 20}) {
    for (const uint64_t offset : {0, 1, 511, 512, 513, 5000}) {
      for (const uint64_t length : {1, 511, 512, 513, 1024, 10000}) {
        check_covers(volume, offset, length, command_bytes, length);
      }
    }
  }
}

TEST_CASE("what lies behind the end does not arrive, of a namespace or of a window") {
  const NamespaceGeometry whole{1, 512, 10};
  check_covers(whole, 5000, 1000, 4096, 120);
  check_covers(whole, 5120, 1, 4096, 0);
  check_covers(whole, UINT64_MAX - 5, 10, 4096, 0);
  const NamespaceGeometry window{1, 512, 10, 700, 1000};
  check_covers(window, 0, 5000, 1024, 1000);
  check_covers(window, 999, 5, 1024, 1);
  check_covers(window, 1000, 5, 1024, 0);
  const NamespaceGeometry beyond{1, 512, 10, 6000, 100};
  const auto batch = batch_of({{0, 0, 100, kBase}});
  std::vector<Piece> pieces;
  CHECK(cut(beyond, 4096, batch, 0, &pieces) == 0);
}

TEST_CASE("a request ends with its last command, with the error of any") {
  const auto batch = batch_of({{0, 0, 2048, kBase}, {0, 0, 512, kBase}});
  std::vector<Piece> pieces;
  REQUIRE(cut({1, 512, 100}, 512, batch, 0, &pieces) == 4);
  REQUIRE(cut({1, 512, 100}, 512, batch, 1, &pieces) == 1);
  io::RemoteResult result;
  CHECK(!batch->ended(0, 0, &result));
  CHECK(!batch->ended(0, EIO, &result));
  CHECK(batch->ended(1, 0, &result));
  CHECK(result.number == 1);
  CHECK(result.bytes == 512);
  CHECK(result.error == 0);
  CHECK(!batch->ended(0, 0, &result));
  CHECK(batch->ended(0, 0, &result));
  CHECK(result.number == 0);
  CHECK(result.error == EIO);
}
