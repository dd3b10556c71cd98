/* headrace.h: samples of a store for programs in C and C++. No Python anywhere in the process.
 *
 * The calls are DLFS's, one to one (docs/howto/c.md): mount a store, open, read and close single
 * samples by name, or make a seeded sequence and take mini-batches of it without any names. One
 * seed gives one global order, on all ranks and in all languages: batches of this library and of
 * headrace's Python loader are the same, byte for byte.
 *
 * Every function returns HR_OK (0), a count, HR_END, or a negative code; `hr_last_error` has the
 * words. No exception and no signal comes out of a call.
 *
 * Threads: a mount and a sample may be used by several threads at once. A sequence may too: each
 * call takes the next batch, and all threads go through its epochs together (hr_batch_read).
 * Handles must not be used while, or after, another thread closes them.
 *
 * Fork: what was mounted before a fork is refused by the child (HR_ERR_ARGUMENT): mount anew.
 *
 * Memory: what was opened of a mount keeps what it needs. `hr_unmount` may come before
 * `hr_close`, `hr_sequence_close` and `hr_batch_release`, and each handle is closed once.
 *
 * Structures begin with their size, so that programs that were built with an older header work with
 * a newer library: use the _INIT values.
 */
#ifndef HEADRACE_H
#define HEADRACE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HR_API __attribute__((visibility("default")))
#else
#define HR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something is added; what is there is never changed or taken away within one file name
 * of the library. */
#define HR_ABI_VERSION 2
HR_API uint32_t hr_abi_version(void);

/* -- codes ------------------------------------------------------------------------------------ */

enum {
  HR_OK = 0,
  HR_END = 1,                 /* the epoch is over; who asks again begins the next one */
  HR_ERR_ARGUMENT = -1,       /* the caller's mistake */
  HR_ERR_NO_STORE = -2,       /* there is no store, or a file of it is missing */
  HR_ERR_NO_SAMPLE = -3,      /* no sample of this name or index */
  HR_ERR_CORRUPT_STORE = -4,  /* the store is damaged or contradicts itself */
  HR_ERR_CORRUPT_SAMPLE = -5, /* a sample's bytes differ from its checksum */
  HR_ERR_SOURCE_CHANGED = -6, /* a file is not as it was when it was indexed */
  HR_ERR_IO = -7,             /* the system refused: see hr_last_errno */
  HR_ERR_TIMEOUT = -8,        /* a deadline passed; the call may be made again */
  HR_ERR_FABRIC = -9,         /* a target cannot be reached, refuses, or breaks the protocol */
  HR_ERR_UNSUPPORTED = -10,   /* Python's headrace can do this, this library cannot */
  HR_ERR_VERSION = -11,       /* the structure is of a newer header, and says something new */
  HR_ERR_MEMORY = -12,        /* out of memory */
  HR_ERR_INTERNAL = -13,      /* a mistake of ours */
  HR_ERR_PICTURE = -14        /* a sample is no picture that can be decoded */
};

/* The name of a code: "HR_ERR_IO". Never null. */
HR_API const char *hr_code_name(int code);
/* What the last call of this thread that failed met: what, where, found, expected, what to do.
 * Never null; valid until this thread's next call that fails. */
HR_API const char *hr_last_error(void);
/* Its errno value, 0 where the system had no part in it. */
HR_API int hr_last_errno(void);

/* -- mount ------------------------------------------------------------------------------------ */

typedef struct hr_mount_handle hr_mount_t;

typedef struct hr_mount_options {
  size_t size; /* sizeof(hr_mount_options) */
  /* Of a target: control commands and connecting. Of a batch: until all its reads are there. */
  double timeout_s;
  /* A target that is gone for so long fails its reads, or leaves them to the next place. */
  double give_up_s;
  /* Connections to each target. */
  uint32_t queues;
  /* 1: no digests are offered to targets. Samples have checksums of their own. */
  uint32_t no_digests;
  /* Who we are to targets; null: made of the machine's identity, as Python's headrace does it. */
  const char *host_nqn;
  /* For headrace://job: the meeting folder; null: $HEADRACE_JOB_FOLDER. */
  const char *job_folder;
} hr_mount_options;

#define HR_MOUNT_OPTIONS_INIT \
  { sizeof(hr_mount_options), 60.0, 60.0, 2, 0, NULL, NULL }

/* Opens a store and reads its directory:
 *   a folder                          a packed store, or an index over local files
 *   nvme+tcp://host:port/nqn?ns=1     a store on an NVMe/TCP namespace
 *   headrace://job                    the store that a job's nodes have staged together
 * `options` may be null. */
HR_API int hr_mount(const char *where, const hr_mount_options *options, hr_mount_t **mount);
HR_API int hr_unmount(hr_mount_t *mount);

typedef struct hr_store_info {
  size_t size; /* sizeof(hr_store_info) */
  uint64_t samples;
  uint32_t parts; /* of each sample; 1 unless samples have several */
  uint32_t segments;
  char fingerprint[40]; /* names the content: 32 hexadecimal digits */
} hr_store_info;

#define HR_STORE_INFO_INIT                \
  {                                       \
    sizeof(hr_store_info), 0, 0, 0, { 0 } \
  }

HR_API int hr_stat(hr_mount_t *mount, hr_store_info *info);

/* -- single samples --------------------------------------------------------------------------- */

typedef struct hr_sample_handle hr_sample_t;

/* The index of the sample of this name. */
HR_API int hr_find(hr_mount_t *mount, const char *name, uint64_t *index);
/* Opens the first part of a sample, by name or by index. Reads nothing yet. */
HR_API int hr_open(hr_mount_t *mount, const char *name, hr_sample_t **sample);
HR_API int hr_open_index(hr_mount_t *mount, uint64_t index, hr_sample_t **sample);
HR_API int64_t hr_sample_index(const hr_sample_t *sample);
HR_API int64_t hr_sample_bytes(const hr_sample_t *sample);
/* *label is -1 where it has none. */
HR_API int hr_sample_label(const hr_sample_t *sample, int64_t *label);
/* Copies bytes from `offset` on; returns how many, fewer only at the sample's end, 0 at or behind
 * it. The checksum is verified for samples up to 4 MiB and for whole reads of larger ones; other
 * ranges of larger ones come as they are. */
HR_API int64_t hr_read(hr_sample_t *sample, uint64_t offset, void *buffer, size_t bytes);
HR_API int hr_close(hr_sample_t *sample);

/* -- sequences -------------------------------------------------------------------------------- */

typedef struct hr_sequence_handle hr_sequence_t;

/* The shuffled order of `seed`, an exact permutation of all samples in each epoch, of which rank
 * `rank` of `world` takes its slices; hr_sequence_order sets another. Begins with epoch 0. All
 * ranks must ask for batches of the same sizes. */
HR_API int hr_sequence(hr_mount_t *mount, uint64_t seed, uint32_t rank, uint32_t world,
                       hr_sequence_t **sequence);

enum {
  HR_SET_EPOCH = 1,    /* the next batch is this epoch's first, for all threads */
  HR_SET_POSITION = 2, /* global position in the epoch at which to go on: what HR_SET_POSITION of
                          hr_sequence_get said; any world size may go on from it */
  HR_SET_TAIL = 3,     /* one of HR_TAIL_*; default: exact for one rank, padded for several */
  HR_SET_ON_ERROR = 4, /* HR_ON_ERROR_FAIL (default), HR_ON_ERROR_MARK */
  HR_SET_BUFFER_BYTES = 5,   /* memory for batches that are read ahead; default 64 MiB */
  HR_SET_READS_IN_FLIGHT = 6 /* 0 (default): as many as the engine finds right */
};

/* What becomes of positions that do not fill a batch of every rank. */
enum {
  HR_TAIL_EXACT = 1, /* shared out as evenly as possible; last batches may be smaller, even empty */
  HR_TAIL_PAD = 2,   /* filled up from the epoch's beginning */
  HR_TAIL_DROP = 3   /* left out */
};

enum {
  HR_ON_ERROR_FAIL = 1, /* hr_batch_read fails and stays where it is: the next call reads again */
  HR_ON_ERROR_MARK = 2  /* the sample's length is -1; the others are delivered */
};

HR_API int hr_sequence_set(hr_sequence_t *sequence, int what, uint64_t value);
HR_API int hr_sequence_get(hr_sequence_t *sequence, int what, uint64_t *value);
HR_API int hr_sequence_close(hr_sequence_t *sequence);

/* Orders: which sample comes when, as Python's headrace.order has them. An epoch has as many
 * positions as there are samples, in each of them. */
enum {
  HR_ORDER_SHUFFLED = 1,   /* an exact permutation of all samples in each epoch (default) */
  HR_ORDER_SEQUENTIAL = 2, /* sample i at position i */
  HR_ORDER_BLOCKED = 3,    /* blocks of neighbours shuffled, and samples within windows of them */
  HR_ORDER_OPPORTUNISTIC = 4, /* in the first epochs, what is near comes first */
  HR_ORDER_BALANCED = 5       /* each class of labels equally often; labels below 0 never */
};

/* All ranks, and a sequence that goes on where another stopped, must say the same. */
typedef struct hr_order {
  size_t size;            /* sizeof(hr_order) */
  uint32_t kind;          /* one of HR_ORDER_* */
  uint64_t block_samples; /* of HR_ORDER_BLOCKED: consecutive samples of a block */
  uint64_t window_blocks; /* and blocks of which the samples are shuffled together */
  /* Of HR_ORDER_OPPORTUNISTIC: ranges of samples that are near, ascending: range r is
   * resident[2 * r] to resident[2 * r + 1] - 1. They are copied. */
  const uint64_t *resident;
  uint64_t resident_ranges;
  uint64_t resident_epochs; /* that begin with what is near: the first with these ranges, each later
                               one with what the one before ended with; others are shuffled */
} hr_order;

#define HR_ORDER_INIT \
  { sizeof(hr_order), HR_ORDER_SHUFFLED, 0, 0, NULL, 0, 1 }

/* Sets the order, once hr_sequence has made the sequence and before its first batch is asked for. A
 * balanced order reads all labels, and keeps 8 bytes a sample. Of a blocked order, windows are read
 * whole, as far as they are this rank's, and up to three are in memory: what they are is chosen
 * with it, whatever HR_SET_BUFFER_BYTES is. */
HR_API int hr_sequence_order(hr_sequence_t *sequence, const hr_order *order);

/* Part p of sample i: slot s = i * parts + p, bytes buffer[offsets[s]] .. + lengths[s]; a missing
 * part has length 0. Slots lie in any order, perhaps with gaps. */
typedef struct hr_batch {
  size_t size; /* sizeof(hr_batch) */
  uint64_t samples;
  uint64_t parts;
  const uint8_t *buffer;
  uint64_t buffer_bytes;
  const int64_t *offsets; /* samples * parts */
  const int64_t *lengths; /* samples * parts */
  const int64_t *labels;  /* samples; -1: none */
  const int64_t *indices; /* samples: which they are in the store */
  uint64_t epoch;
  uint64_t position;  /* global, of the first sample */
  uint64_t failed;    /* samples whose length is -1 */
  void *owner;        /* the library's */
  const void *pixels; /* of sample i from i * pixel_bytes on; null without hr_sequence_images */
  uint64_t pixel_bytes;
} hr_batch;

#define HR_BATCH_INIT \
  { sizeof(hr_batch), 0, 0, NULL, 0, NULL, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, 0 }

/* This rank's next mini-batch of `n` samples, fewer at the end of an epoch. HR_END: the epoch
 * `batch->epoch` is over, nothing was delivered. While batches are of one size, those that follow
 * are read ahead. A batch must be released before the structure is used again.
 *
 * Threads that share a sequence share its samples: each goes to one of them. When all samples of an
 * epoch were handed out, every thread gets HR_END once, and the next epoch begins when a thread
 * that got it asks again; a thread that comes later gets HR_END first. A thread that begins late
 * gets the HR_END of each epoch that is over since the sequence was made, or since HR_SET_EPOCH or
 * HR_SET_POSITION: so that loops over the same number of epochs in all threads end together, and
 * deliver each epoch once. A program that starts new threads for each epoch sets HR_SET_EPOCH
 * before it starts them. */
HR_API int hr_batch_read(hr_sequence_t *sequence, uint64_t n, hr_batch *batch);
HR_API int hr_batch_release(hr_batch *batch);

/* -- pictures --------------------------------------------------------------------------------- */

enum { HR_CROP_RANDOM = 0, HR_CROP_CENTER = 1, HR_CROP_STRETCH = 2 };
enum {
  HR_FILTER_BOX = 0,
  HR_FILTER_BILINEAR = 1,
  HR_FILTER_HAMMING = 2,
  HR_FILTER_BICUBIC = 3,
  HR_FILTER_LANCZOS = 4
};
enum { HR_UINT8 = 0, HR_FLOAT16 = 1, HR_BFLOAT16 = 2, HR_FLOAT32 = 3 };

/* What pictures become: the fields of Python's headrace.Images, with its defaults and its results.
 */
typedef struct hr_images {
  size_t size; /* sizeof(hr_images) */
  uint32_t height, width;
  uint32_t crop;              /* one of HR_CROP_* */
  uint32_t short_side;        /* of HR_CROP_CENTER; 0: 8/7 of the larger side */
  double scale[2], ratio[2];  /* of HR_CROP_RANDOM */
  double flip, flip_vertical; /* probabilities */
  uint32_t filter;            /* one of HR_FILTER_* */
  uint32_t dtype;             /* HR_UINT8, or (value / 255 - mean) / std in another */
  uint32_t channels_last;     /* 0: planes of red, green and blue; 1: three values a pixel */
  uint32_t exact;             /* 1: JPEGs are decoded at their full size always */
  uint32_t orient;            /* 1: turned upright as EXIF says */
  int32_t background;         /* 0xRRGGBB behind transparent pixels; -1: transparency is left out */
  float mean[3], std[3];
  uint64_t max_pixels; /* pictures with more are refused before memory is taken for them */
  uint32_t part;       /* of each sample: which is the picture */
  uint32_t threads;    /* that decode; 0: as many as this process has processors */
} hr_images;

#define HR_IMAGES_INIT                                                                             \
  {                                                                                                \
    sizeof(hr_images), 224, 224, HR_CROP_RANDOM, 0, {0.08, 1.0}, {3.0 / 4.0, 4.0 / 3.0}, 0.0, 0.0, \
        HR_FILTER_BILINEAR, HR_UINT8, 0, 0, 0, -1, {0.0f, 0.0f, 0.0f}, {1.0f, 1.0f, 1.0f},         \
        89478485, 0, 0                                                                             \
  }

/* From the next batch on, the library's threads decode pictures into `pixels`, ahead of the caller;
 * null: no more. A picture that cannot be decoded fails its batch with HR_ERR_PICTURE, or is
 * marked: its length is -1 and its pixels are zeros. */
HR_API int hr_sequence_images(hr_sequence_t *sequence, const hr_images *images);

/* CRC-32C (Castagnoli) of some bytes: the checksum that samples have. `crc` continues an earlier
 * call's, or is 0. */
HR_API uint32_t hr_crc32c(uint32_t crc, const void *data, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
