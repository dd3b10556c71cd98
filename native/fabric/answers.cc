#include "fabric/answers.h"

namespace headrace::fabric {

void Answers::ended(const Piece& piece, int error) {
  io::RemoteResult result;
  if (piece.batch->ended(piece.number, error, &result)) add(piece.batch, result);
}

void Answers::finished(const std::shared_ptr<ReadBatch>& batch, size_t number, int error) {
  add(batch, {number, 0, error});
}

void Answers::add(const std::shared_ptr<ReadBatch>& batch, const io::RemoteResult& result) {
  if (result.error != 0) {
    ++counters_->failed;
  } else if (result.bytes > 0) {
    ++counters_->reads;
    counters_->bytes += result.bytes;
  }
  if (told_.empty() || told_.back().first != batch) told_.push_back({batch, {}});
  told_.back().second.push_back(result);
}

void Answers::tell() {
  for (const auto& [batch, results] : told_) batch->requests().finish_many(results);
  told_.clear();
}

}  // namespace headrace::fabric
