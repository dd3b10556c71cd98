// The exec family: nothing is changed; a program that the shim cannot be in is reported, so that
// the end of the run can say that something was not seen.
//
// That is told from the file's head, as the launcher does for the run's own command: no dynamic
// linker, another class or machine, a set-user bit, or an environment without the preload.
#include <elf.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "preload/export.h"
#include "preload/shim_calls.h"

extern char** environ;

namespace {

namespace shim = headrace::preload::shim;

bool is_preloaded(char* const* environment) {
  if (environment == nullptr) return false;
  for (; *environment != nullptr; ++environment) {
    if (strncmp(*environment, "LD_PRELOAD=", 11) == 0) {
      return strstr(*environment, shim::kShimName) != nullptr;
    }
  }
  return false;
}

#if defined(__x86_64__)
constexpr Elf64_Half kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr Elf64_Half kMachine = EM_AARCH64;
#else
constexpr Elf64_Half kMachine = EM_NONE;
#endif

// The kernel's: the library that records has a `pread` of its own.
long read_at(int fd, void* to, size_t bytes, off_t offset) {
  return syscall(SYS_pread64, fd, to, bytes, offset);
}

// Whether the shim will be in the program of this open file. Scripts: their interpreter is not
// looked for, nearly all are shells and Python.
bool is_visible(int fd) {
  struct stat status;
  if (shim::kernel_fstat(fd, &status) != 0) return true;  // the exec will say what is wrong
  if ((status.st_mode & S_ISUID) != 0 && status.st_uid != geteuid()) return false;
  if ((status.st_mode & S_ISGID) != 0 && status.st_gid != getegid()) return false;
  Elf64_Ehdr head;
  if (read_at(fd, &head, sizeof head, 0) != static_cast<long>(sizeof head)) return true;
  if (memcmp(head.e_ident, ELFMAG, SELFMAG) != 0) return true;
  if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_machine != kMachine) return false;
  for (unsigned i = 0; i < head.e_phnum && i < 64; ++i) {
    Elf64_Phdr segment;
    const auto at = static_cast<off_t>(head.e_phoff + i * sizeof segment);
    if (read_at(fd, &segment, sizeof segment, at) != static_cast<long>(sizeof segment)) break;
    if (segment.p_type == PT_INTERP) return true;
  }
  return false;
}

// The file that a name without a slash means, as the library will search for it.
int open_program(const char* name, bool searches) {
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  if (!searches || strchr(name, '/') != nullptr)
    return shim::kernel_open(AT_FDCWD, name, kFlags, 0);
  const char* at = getenv("PATH");
  const size_t name_bytes = strlen(name);
  while (at != nullptr && *at != '\0') {
    const char* end = strchrnul(at, ':');
    char path[512];
    const auto bytes = static_cast<size_t>(end - at);
    if (bytes > 0 && bytes + name_bytes + 2 <= sizeof path) {
      memcpy(path, at, bytes);
      path[bytes] = '/';
      memcpy(path + bytes + 1, name, name_bytes + 1);
      const int fd = shim::kernel_open(AT_FDCWD, path, kFlags, 0);
      if (fd >= 0) return fd;
    }
    at = *end == ':' ? end + 1 : nullptr;
  }
  return -1;
}

// Before the exec, which does not come back; nothing is held then. `vfork`ed children come here
// too.
void look(int fd, char* const* environment) {
  const int saved_errno = errno;
  if (!is_preloaded(environment) || (fd >= 0 && !is_visible(fd))) shim::report_blind();
  errno = saved_errno;
}

void look_at(const char* name, bool searches, char* const* environment) {
  if (name == nullptr) return;
  const int saved_errno = errno;
  const int fd = open_program(name, searches);
  // A program that is not there is not started; searches try one place after the other.
  if (fd >= 0) {
    look(fd, environment);
    shim::kernel_close(fd);
  }
  errno = saved_errno;
}

// Arguments of `execl` and its like, up to the null pointer.
int count(const char* first, va_list arguments) {
  int n = 0;
  for (const char* a = first; a != nullptr; a = va_arg(arguments, const char*)) ++n;
  return n;
}

}  // namespace

HEADRACE_EXPORT(int, execve, const char* path, char* const arguments[], char* const environment[]) {
  look_at(path, false, environment);
  return shim::calls().execve(path, arguments, environment);
}

HEADRACE_EXPORT(int, execv, const char* path, char* const arguments[]) {
  look_at(path, false, environ);
  return shim::calls().execve(path, arguments, environ);
}

HEADRACE_EXPORT(int, execvpe, const char* name, char* const arguments[],
                char* const environment[]) {
  look_at(name, true, environment);
  return shim::calls().execvpe(name, arguments, environment);
}

HEADRACE_EXPORT(int, execvp, const char* name, char* const arguments[]) {
  look_at(name, true, environ);
  return shim::calls().execvpe(name, arguments, environ);
}

HEADRACE_EXPORT(int, fexecve, int fd, char* const arguments[], char* const environment[]) {
  look(fd, environment);
  return shim::calls().fexecve(fd, arguments, environment);
}

HEADRACE_EXPORT(int, posix_spawn, pid_t* child, const char* path,
                const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                char* const arguments[], char* const environment[]) {
  look_at(path, false, environment);
  return shim::calls().posix_spawn(child, path, actions, attributes, arguments, environment);
}

HEADRACE_EXPORT(int, posix_spawnp, pid_t* child, const char* name,
                const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                char* const arguments[], char* const environment[]) {
  look_at(name, true, environment);
  return shim::calls().posix_spawnp(child, name, actions, attributes, arguments, environment);
}

// The variadic ones: their arguments as an array on the stack, as the library itself does.
#define HEADRACE_EXECL(symbol, first_argument, searches, call, environment_of)         \
  HEADRACE_EXPORT(int, symbol, const char* name, const char* first_argument, ...) {    \
    va_list list;                                                                      \
    va_start(list, first_argument);                                                    \
    const int n = count(first_argument, list);                                         \
    va_end(list);                                                                      \
    auto** arguments = static_cast<char**>(__builtin_alloca((n + 1) * sizeof(char*))); \
    va_start(list, first_argument);                                                    \
    arguments[0] = const_cast<char*>(first_argument);                                  \
    for (int i = 1; i <= n; ++i) arguments[i] = va_arg(list, char*);                   \
    char* const* environment = environment_of;                                         \
    va_end(list);                                                                      \
    look_at(name, searches, environment);                                              \
    return shim::calls().call(name, arguments, environment);                           \
  }

HEADRACE_EXECL(execl, first, false, execve, environ)
HEADRACE_EXECL(execlp, first, true, execvpe, environ)
HEADRACE_EXECL(execle, first, false, execve, va_arg(list, char* const*))
