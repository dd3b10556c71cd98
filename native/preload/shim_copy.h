// Opening a file's copy in the place of the original, or finding that it cannot be.
#pragma once

#include <sys/stat.h>

#include <cstdint>

#include "preload/shim_path.h"
#include "preload/shim_plane.h"

namespace headrace::preload::shim {

// A descriptor of the file's copy, as `openat(folder, path, flags)` would give one of the original;
// -1: open the original. errno is not touched.
int open_copy(const Plane& plane, const Named& named, int folder, const char* path, int flags);

// What the storage says of a file's original; false: nothing.
bool ask(const BoardFile& file, int folder, const char* path, struct stat* now);
// The same for who looks at an open file: a moment after this thread has asked it is unchanged as
// far as this machine knows, its own changes among it. Another's are seen when the moment is over.
bool ask_again(const BoardFile& file, const char* path, struct stat* now);

// Whether this is the file that was copied.
bool is_same_file(const BoardFile& file, const struct stat& now);
// And as it was then. The change time too: whoever may no longer read it must find that out.
bool is_unchanged(const BoardFile& file, const struct stat& now);

// Whether an open with these flags only reads, and asks for nothing that a copy cannot give.
bool is_plain_read(int flags);
// Whether it may change the file.
bool may_write(int flags);

// Tells the daemon of an original that was opened, and lets it cost what it would.
void opened_original(const Plane& plane, const Named& named, int fd, int flags);

// The original's figures in the place of its copy's.
void describe(const BoardFile& file, struct stat* status);

}  // namespace headrace::preload::shim
