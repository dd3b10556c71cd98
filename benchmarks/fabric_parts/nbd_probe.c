// What libnbd reaches: asynchronous random reads at a fixed depth over one connection, the fastest
// that its API has.
//
//   nbd_probe URI BLOCK DEPTH SECONDS
#include <libnbd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static unsigned in_flight;
static uint64_t done_reads;

static int on_done(void* user, int* error) {
  (void)user;
  if (*error) {
    fprintf(stderr, "a read failed: %s\n", strerror(*error));
    exit(1);
  }
  --in_flight;
  ++done_reads;
  return 1;  // libnbd retires the command
}

static uint64_t next_random(void) {
  static uint64_t state = 88172645463325252ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void check(int result) {
  if (result >= 0) return;
  fprintf(stderr, "%s\n", nbd_get_error());
  exit(1);
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const size_t block = strtoul(argv[2], NULL, 10);
  const unsigned depth = (unsigned)strtoul(argv[3], NULL, 10);
  const double seconds = strtod(argv[4], NULL);
  struct nbd_handle* nbd = nbd_create();
  nbd_set_request_structured_replies(nbd, 0);
  nbd_set_strict_mode(nbd, 0);
#ifdef LIBNBD_HAVE_NBD_SET_PREAD_INITIALIZE
  nbd_set_pread_initialize(nbd, 0);
#endif
  check(nbd_connect_uri(nbd, argv[1]));
  const uint64_t blocks = (uint64_t)nbd_get_size(nbd) / block;
  const size_t places = (32u << 20) / block;
  char* memory = malloc(places * block);
  memset(memory, 1, places * block);
  const double began = now_s(), cpu_began = cpu_s();
  double ended = began;
  size_t place = 0;
  while (ended - began < seconds) {
    for (int turn = 0; turn < 64; ++turn) {
      for (; in_flight < depth; ++in_flight) {
        const nbd_completion_callback callback = {.callback = on_done};
        char* dest = memory + place++ % places * block;
        const uint64_t at = next_random() % blocks * block;
        if (nbd_aio_pread(nbd, dest, block, at, callback, 0) < 0) check(-1);
      }
      check(nbd_poll(nbd, -1));
    }
    ended = now_s();
  }
  printf("{\"bytes\": %llu, \"seconds\": %f, \"reads\": %llu, \"client_cpu_s\": %f}\n",
         (unsigned long long)done_reads * block, ended - began, (unsigned long long)done_reads,
         cpu_s() - cpu_began);
  return 0;
}
