#include "fabric/outgoing.h"

#include <algorithm>
#include <cassert>

namespace headrace::fabric {
namespace {

// What has gone is dropped when it is at least this much: rarely enough to cost nothing.
constexpr size_t kCompactBytes = 64 << 10;
constexpr size_t kCompactPieces = 1024;

}  // namespace

void Outgoing::append(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  text_.insert(text_.end(), bytes.begin(), bytes.end());
  bytes_ += bytes.size();
  if (!empty() && pieces_.back().is_text()) {
    pieces_.back().size += bytes.size();
  } else {
    pieces_.push_back({nullptr, bytes.size(), 0});
  }
}

void Outgoing::borrow(std::span<const std::byte> payload, uint16_t tag) {
  assert(!payload.empty());
  pieces_.push_back({payload.data(), payload.size(), tag});
  bytes_ += payload.size();
}

void Outgoing::borrow(const FileRange& payload, uint16_t tag) {
  assert(payload.fd >= 0 && payload.bytes > 0);
  pieces_.push_back({nullptr, payload.bytes, tag, payload.fd, payload.offset});
  bytes_ += payload.bytes;
}

FileRange Outgoing::file() const {
  if (empty() || !pieces_[head_].is_file()) return {};
  const Piece& piece = pieces_[head_];
  return {piece.fd, piece.offset + head_gone_, piece.size - head_gone_};
}

size_t Outgoing::gather(std::span<iovec> parts) const {
  size_t used = 0;
  size_t text_at = text_gone_;
  size_t gone = head_gone_;
  for (size_t i = head_; i < pieces_.size() && used < parts.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (piece.is_file()) break;
    const size_t size = piece.size - gone;
    const std::byte* data = piece.is_text() ? &text_[text_at] : piece.borrowed + gone;
    if (piece.is_text()) text_at += size;
    parts[used++] = {const_cast<std::byte*>(data), size};
    gone = 0;
  }
  return used;
}

void Outgoing::sent(size_t count, std::vector<uint16_t>* released) {
  assert(count <= bytes_);
  bytes_ -= count;
  while (count > 0) {
    const Piece& piece = pieces_[head_];
    const size_t step = std::min(count, piece.size - head_gone_);
    if (piece.is_text()) text_gone_ += step;
    head_gone_ += step;
    count -= step;
    if (head_gone_ < piece.size) break;
    if (!piece.is_text()) released->push_back(piece.tag);
    ++head_;
    head_gone_ = 0;
  }
  compact();
}

void Outgoing::clear(std::vector<uint16_t>* released) {
  for (size_t i = head_; i < pieces_.size(); ++i) {
    if (!pieces_[i].is_text()) released->push_back(pieces_[i].tag);
  }
  *this = {};
}

void Outgoing::compact() {
  if (text_gone_ == text_.size() || text_gone_ >= kCompactBytes) {
    text_.erase(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(text_gone_));
    text_gone_ = 0;
  }
  if (empty() || head_ >= kCompactPieces) {
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }
}

}  // namespace headrace::fabric
