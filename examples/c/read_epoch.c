/* Read epochs of a store from C: mount, sequence, batches; print the sum of all checksums.
 *
 *   cc read_epoch.c $(headrace config --cflags --libs) -o read_epoch
 *   ./read_epoch photos.hr                                # a packed store
 *   ./read_epoch 'nvme+tcp://node1:4420/nqn.2026-11.io.example:photos?ns=1'
 *   ./read_epoch headrace://job
 *
 * Options: -b samples per batch, -s seed, -r rank, -w world, -e epochs, -v a line for each sample.
 */
#include <headrace.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct options {
  uint64_t batch, seed, epochs;
  uint32_t rank, world;
  int verbose;
};

static int failed(const char *what) {
  fprintf(stderr, "read_epoch: %s: %s\n", what, hr_last_error());
  return 1;
}

/* Adds a batch's checksums to `sum`; returns its bytes. */
static uint64_t take(const hr_batch *batch, const struct options *options, uint64_t *sum) {
  uint64_t bytes = 0;
  for (uint64_t slot = 0; slot < batch->samples * batch->parts; ++slot) {
    const uint64_t sample = slot / batch->parts;
    const size_t length = (size_t)batch->lengths[slot];
    const uint32_t crc = hr_crc32c(0, batch->buffer + batch->offsets[slot], length);
    *sum += crc;
    bytes += length;
    if (options->verbose) {
      printf("%" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64 " %zu %08" PRIx32 "\n", batch->epoch,
             batch->position + sample, batch->indices[sample], batch->labels[sample], length, crc);
    }
  }
  return bytes;
}

static int read_epochs(hr_mount_t *mount, const struct options *options) {
  hr_sequence_t *sequence;
  hr_batch batch = HR_BATCH_INIT;
  uint64_t samples = 0, bytes = 0, sum = 0;
  int code = hr_sequence(mount, options->seed, options->rank, options->world, &sequence);
  if (code != HR_OK) return failed("sequence");
  for (uint64_t epoch = 0; epoch < options->epochs; ++epoch) {
    while ((code = hr_batch_read(sequence, options->batch, &batch)) == HR_OK) {
      samples += batch.samples;
      bytes += take(&batch, options, &sum);
      hr_batch_release(&batch);
    }
    if (code != HR_END) break;
  }
  hr_sequence_close(sequence);
  if (code != HR_END) return failed("batch");
  printf("%" PRIu64 " samples, %" PRIu64 " bytes, sum of checksums %016" PRIx64 "\n", samples, bytes,
         sum);
  return 0;
}

int main(int argc, char **argv) {
  struct options options = {64, 0, 1, 0, 1, 0};
  hr_mount_t *mount;
  int status;
  for (int letter; (letter = getopt(argc, argv, "b:s:r:w:e:v")) != -1;) {
    const uint64_t value = optarg != NULL ? strtoull(optarg, NULL, 10) : 0;
    switch (letter) {
      case 'b': options.batch = value; break;
      case 's': options.seed = value; break;
      case 'r': options.rank = (uint32_t)value; break;
      case 'w': options.world = (uint32_t)value; break;
      case 'e': options.epochs = value; break;
      case 'v': options.verbose = 1; break;
      default: return 2;
    }
  }
  if (optind + 1 != argc) {
    fprintf(stderr, "usage: read_epoch [-b N] [-s SEED] [-r RANK] [-w WORLD] [-e EPOCHS] [-v] STORE\n");
    return 2;
  }
  if (hr_mount(argv[optind], NULL, &mount) != HR_OK) return failed(argv[optind]);
  status = read_epochs(mount, &options);
  hr_unmount(mount);
  return status;
}
