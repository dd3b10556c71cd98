// FileWork: the files of one job as the reader's threads see them: how far each one is.
//
// Guarded by the reader's mutex, except for `paths`, which never change. Every file ends as kDone
// or kTaken, with its bytes or an errno in the batch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/file_job.h"

namespace headrace::io {

enum class FileState : uint8_t { kNew, kLooking, kLooked, kReading, kDone, kTaken };

struct FileWork {
  // `known`: what each file is, where somebody has looked already; empty where nobody has.
  FileWork(std::vector<std::string> names, std::vector<FileIdentity> known);

  // The next file to look at, or (once laid out) to read; none is left: no value.
  std::optional<size_t> claim();
  // Lays out the files that were looked at, as many as fit into `bytes_max`; those larger than
  // `file_bytes_max` are refused. Returns the bytes that their buffer needs.
  uint64_t lay_out(uint64_t file_bytes_max, uint64_t bytes_max);
  // Files that were looked at will not be read.
  void refuse_all(int error);
  // Nobody wants the file: it is done with unless its read has begun.
  void give_up(size_t index);
  void end(size_t index, int error);

  bool may_be_laid_out() const { return !laid_out && looks_left == 0; }

  const std::vector<std::string> paths;
  std::vector<FileState> states;
  std::shared_ptr<FileBatch> batch;
  size_t looks_left = 0;  // files that are new or being looked at
  size_t left = 0;        // files that are not done
  bool laid_out = false;
  unsigned waiting = 0;
  std::condition_variable ready;

 private:
  size_t next_look_ = 0;
  size_t next_read_ = 0;
};

}  // namespace headrace::io
