// The C library's own functions behind those that the shim replaces.
//
// Looked up once, by the constructor: looking up takes locks. A call that comes before it (from
// another library's constructor) goes to the kernel by itself where that is the same, and looks up
// where it isn't.
#pragma once

#include <spawn.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/types.h>

#include <cstdint>

namespace headrace::preload::shim {

struct Calls {
  int (*open)(const char*, int, ...);
  int (*openat)(int, const char*, int, ...);
  FILE* (*fopen)(const char*, const char*);
  FILE* (*freopen)(const char*, const char*, FILE*);
  FILE* (*fdopen)(int, const char*);
  int (*fstat)(int, struct stat*);
  int (*fstatat)(int, const char*, struct stat*, int);
  int (*statx)(int, const char*, int, unsigned, struct statx*);
  int (*access)(const char*, int);
  int (*faccessat)(int, const char*, int, int);
  int (*euidaccess)(const char*, int);
  int (*execve)(const char*, char* const[], char* const[]);
  int (*execvpe)(const char*, char* const[], char* const[]);
  int (*fexecve)(int, char* const[], char* const[]);
  int (*posix_spawn)(pid_t*, const char*, const posix_spawn_file_actions_t*,
                     const posix_spawnattr_t*, char* const[], char* const[]);
  int (*posix_spawnp)(pid_t*, const char*, const posix_spawn_file_actions_t*,
                      const posix_spawnattr_t*, char* const[], char* const[]);
  ssize_t (*read)(int, void*, size_t);
  ssize_t (*pread)(int, void*, size_t, off_t);
  off_t (*lseek)(int, off_t, int);
  int (*flock)(int, int);
  int (*fcntl)(int, int, ...);
  int (*lockf)(int, int, off_t);
  int (*ioctl)(int, unsigned long, ...);
  ssize_t (*copy_file_range)(int, off_t*, int, off_t*, size_t, unsigned);
  int (*fsync)(int);
  int (*fdatasync)(int);
  int (*syncfs)(int);
  ssize_t (*fgetxattr)(int, const char*, void*, size_t);
  ssize_t (*flistxattr)(int, char*, size_t);
  int (*fsetxattr)(int, const char*, const void*, size_t, int);
  int (*fremovexattr)(int, const char*);
  int (*fchmod)(int, mode_t);
  int (*fchown)(int, uid_t, gid_t);
  int (*futimens)(int, const timespec*);
  int (*futimes)(int, const timeval*);
  int (*fstatfs)(int, struct statfs*);
  int (*fstatvfs)(int, struct statvfs*);
  int (*chroot)(const char*);
};

// All of them.
const Calls& calls();

// -- the kernel itself, for what the shim does on its own; errno is set as always -----------------

int kernel_open(int folder, const char* path, int flags, mode_t mode);
int kernel_close(int fd);
int kernel_fstat(int fd, struct stat* status);
int kernel_fstatat(int folder, const char* path, struct stat* status, int flags);

// Writes a number's digits, without the library's printf; returns where they end.
char* decimal(char* out, uint64_t value);

// "/proc/PROCESS/fd/FD" into at least 64 bytes.
void descriptor_path(char* out, uint32_t process, uint32_t fd);

// -- of the library that stands in the process: one that serves files, or one that records
// ----------

// What its file's name begins with.
extern const char kShimName[];
// A program is started that it will not be in.
void report_blind();

}  // namespace headrace::preload::shim
