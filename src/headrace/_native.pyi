from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


build_type: str

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], value: int = 0) -> int:
    """CRC-32C of a one-dimensional uint8 array, continued from `value`."""

def crc32c_blocks(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], block_bytes: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """
    CRC-32C of each block of `block_bytes` bytes; the last block may be short.
    """

crc32c_implementation: str

class MappedFile:
    """A file mapped read-only, whose pages may vanish."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        """Map the first `size` bytes of `fd`, which may be closed afterwards."""

    @property
    def data(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """uint8, shape (size,): what is mapped."""

    @property
    def damaged(self) -> int:
        """Pages that were gone when they were touched, and are zeros now."""

class Directory:
    """The sample directory of one segment, mapped."""

    @staticmethod
    def open(path: bytes) -> Directory: ...

    @staticmethod
    def from_fd(fd: int, label: str) -> Directory:
        """The directory in an open file; `fd` stays the caller's."""

    @property
    def samples(self) -> int: ...

    @property
    def extents(self) -> int: ...

    @property
    def has_crc(self) -> bool: ...

    @property
    def uuid(self) -> bytes: ...

    def header(self) -> bytes:
        """The header page: what the fingerprint is made of."""

    @property
    def part_names(self, /) -> list[bytes]: ...

    @property
    def class_names(self, /) -> list[bytes]: ...

    @property
    def labels(self, /) -> numpy.typing.NDArray[Any] | None:
        """Array of the labels as stored, or None."""

    @property
    def columns(self, /) -> dict[str, numpy.typing.NDArray[Any]]:
        """User columns by name."""

    def find(self, name: str | bytes) -> int:
        """The sample with this name, -1 where there is none."""

    def find_many(self, names: list[str] | list[bytes] | list[str | bytes]) -> numpy.typing.NDArray[numpy.int64]:
        """The samples with these names, -1 where there is none."""

    def name(self, index: int) -> bytes: ...

    def names(self, indices: numpy.typing.NDArray[numpy.int64]) -> list[bytes]: ...

    def index_at_rank(self, rank: int) -> int:
        """The sample at a rank of the sorted name order."""

    def children(self, prefix: bytes, first: int, limit: int) -> tuple[list[bytes], numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint8]]:
        """
        Entries of a folder (names, samples, ranks to go on at, kinds: 0 file, 1 folder, 2 file whose name others begin with).
        """

    def seek(self, key: bytes) -> int:
        """The first rank whose name is not less than `key`."""

    def lookup(self, path: bytes) -> tuple[int, int]:
        """The sample of this name and the first sample below it; -1 for none."""

    def lengths(self, indices: numpy.typing.NDArray[numpy.int64], part: int) -> numpy.typing.NDArray[numpy.int64]:
        """The length of a part of each sample in bytes, -1 where it has none."""

    def extents_of(self, indices: numpy.typing.NDArray[numpy.int64]) -> dict[str, numpy.typing.NDArray[numpy.int64]]:
        """
        Arrays by field (sample, part, volume, offset, length, crc, mtime_ns), one element per extent.
        """

    def verify(self) -> list[int]:
        """Offsets of the blocks that do not match their checksum."""

def build_names(blob: numpy.typing.NDArray[numpy.uint8], offsets: numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.int64] | None, list[tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8]]]]:
    """
    Builds the name tree: (rank_to_index or None, [(block offsets, blob) per level]).
    """

class SlowModel:
    """A simulated slow storage. Its state is shared with forked children."""

    def __init__(self, *, name: str, latency_median_s: float, latency_sigma: float, open_median_s: float, open_sigma: float, bandwidth_bytes_per_s: float, stream_bytes_per_s: float, parallelism: int, error_rate: float, seed: int, steps: Sequence[tuple[float, float]]) -> None: ...

    @property
    def label(self) -> str: ...

    @staticmethod
    def now_ns() -> int:
        """Nanoseconds of the steady clock."""

    def admit(self, now_ns: int, nbytes: int, opens: bool = False) -> tuple[int, int]:
        """
        A read that begins at `now_ns`: when it is done, and 0 or the errno it meets. Sleeps not.
        """

    def admit_open(self, now_ns: int) -> int:
        """An open or stat that begins at `now_ns`: when it is done. Sleeps not."""

    def open_delay(self) -> None:
        """Sleeps as long as an open takes."""

    def read_delay(self, nbytes: int) -> int:
        """Sleeps as long as a read takes; returns 0 or the errno that it meets."""

    def scale_latency(self, factor: float) -> None:
        """
        Multiplies latencies from now on, in all processes that share the model.
        """

    def latency_factor(self, now_ns: int) -> float: ...

    def stats(self) -> dict[str, Any]:
        """
        Requests, bytes, errors and delay_s of all processes that share the model.
        """

class RemoteRequests:
    """Ranges of remote volumes to be read. Each must be finished once."""

    @property
    def count(self) -> int: ...

    @property
    def volumes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64, each request's volume: its number within the catalog."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64, in the volume."""

    @property
    def lengths(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64, bytes."""

    def path(self, i: int) -> bytes:
        """The volume's path: a URL."""

    def dest(self, i: int) -> memoryview:
        """
        Writable memory for request i, of its length. Stays valid as long as it is held.
        """

    def open(self, i: int) -> bool:
        """
        Whether request i still wants an answer: it is not finished, and somebody waits.
        """

    def finish(self, i: int, nbytes: int, errno: int = 0) -> bool:
        """
        Request i brought `nbytes` into `dest(i)`, or met `errno`. The first call counts; False for the others, and when nobody waits any more. Any thread may call.
        """

    def finish_with(self, i: int, buffer: Any, errno: int = 0) -> bool:
        """
        The same for bytes that lie in `buffer`: copies them, without the interpreter's lock.
        """

def fabric_check_common(header: bytes, *, to_host: bool, established: bool, hdgst: bool, ddgst: bool, alignment: int, capsule_data_max: int, data_max: int) -> tuple[int, int, int, int, int]:
    """
    What the native receiver says of a PDU's first 8 bytes: (status, info, header, padding and data bytes).
    """

class FabricExports:
    """Namespaces that a target's queues read from."""

    def __init__(self) -> None: ...

    def add(self, nsid: int, fd: int, nbytes: int, block_bytes: int) -> None:
        """Exports what `fd` (duplicated) is open for."""

    def remove(self, nsid: int) -> None: ...

    def set_written(self, nsid: int, nbytes: int) -> None:
        """
        Only the first `nbytes` are there: reads beyond are answered as unwritten.
        """

class FabricTargetQueues:
    """The threads that serve a target's I/O queues."""

    def __init__(self, *, loops: int = 1, readers: int = 16, cache_bytes: int = 0) -> None: ...

    def adopt(self, *, fd: int, entries: int, dgst: int, hpda: int, flow_control: bool, exports: FabricExports, association: int, before: bytes) -> None:
        """Takes a connected socket over after its Connect was answered."""

    def close(self) -> None:
        """Closes all queues and ends the threads."""

    def drop(self, association: int) -> None:
        """Closes an association's queues, soon."""

    def figures(self) -> dict[str, int]: ...

class FabricInitiator:
    """Reads ranges of NVMe/TCP namespaces over connected queues."""

    def __init__(self, *, command_timeout_s: float = 10.0, read_deadline_s: float = 60.0, reads_in_flight: int = 256) -> None: ...

    def add_target(self, transfer_max: int) -> int:
        """Returns the number of a new target."""

    def add_volume(self, url: str, target: int, nsid: int, block_bytes: int, blocks: int, first_byte: int = 0, bytes: int | None = None) -> None:
        """A namespace, or a window of it, under a name."""

    def attach(self, *, target: int, label: int, fd: int, entries: int, dgst: int, cpda: int, flow_control: bool, data_max: int) -> None:
        """Takes a connected socket over after Connect has succeeded."""

    def give_up(self, target: int, errno: int) -> None:
        """
        A target's reads fail with this from now on, until a queue is attached.
        """

    def take_lost(self) -> list[tuple[int, int, str]]:
        """Queues that ended since the last call: target, label, why."""

    @property
    def lost_event(self) -> int:
        """A descriptor that is readable while `take_lost` has something."""

    def turn(self, reads_in_flight: int) -> None: ...

    def close(self) -> None: ...

    def figures(self) -> dict[str, int]: ...

    def read_many(self, url: str, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dest: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], deadline_s: float) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Reads ranges into `dest`, one behind the other. int64 for each: bytes that arrived, or -errno.
        """

    def read_each(self, urls: Sequence[str], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dests: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]], deadline_s: float) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The same for ranges of several volumes, each into memory of its own."""

class FabricFailover:
    """
    Reads volumes that lie in several places: the first that has the bytes.
    """

    def __init__(self, engine: FabricInitiator, last: object | None = None) -> None:
        """
        engine: reads the places. last: reads, by the volume's path, what no place has.
        """

    def add_volume(self, path: str, places: Sequence[str]) -> None:
        """
        A volume, and the URLs of its copies in the order in which they are asked.
        """

    def close(self) -> None:
        """Later reads fail with ECANCELED."""

    def figures(self) -> dict[str, int]: ...

    def read_many(self, path: str, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dest: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], deadline_s: float) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Reads ranges into `dest`, one behind the other. int64 for each: bytes that arrived, or -errno.
        """

class RankBarrier:
    """Where a benchmark's ranks of one host meet."""

    @staticmethod
    def create(ranks: int, led: bool) -> RankBarrier:
        """For so many processes; `led`: nobody goes on before `release`."""

    @staticmethod
    def attach(fd: int, index: int) -> RankBarrier:
        """
        Another process's, by its descriptor; this one is the `index`-th there.
        """

    @property
    def fd(self) -> int:
        """For others to open; -1 in those that opened it."""

    def arrive(self, ends: tuple[int, int]) -> None:
        """
        Say when this rank's step ended, and when it would have without the harness's delays.
        """

    def wait(self, until_ns: int) -> tuple[int, int] | None:
        """The latest moments of all; None: not until then, or a signal came."""

    def wait_host(self, until_ns: int) -> tuple[int, int] | None:
        """For the leader: the latest moments of its host; None as for `wait`."""

    @property
    def missing(self) -> int:
        """The first who has not arrived in this turn; -1: all have."""

    def release(self, ends: tuple[int, int]) -> None:
        """
        For the leader: let the host go on, with the latest moments of all hosts.
        """

def retired_buffers() -> list[int]:
    """Identities of shared buffers that were unmapped since the last call."""

class Batch:
    """Bytes of some samples in one buffer."""

    @staticmethod
    def lent(*, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], labels: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], parts: int, way: bytes) -> Batch:
        """
        A batch in memory that `data` keeps, uint8, as long as anybody looks at it; the rest as its properties give it. ValueError: samples lie outside.
        """

    @property
    def data(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """uint8, the used bytes of the buffer."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, samples x parts: where each slot starts in `data`."""

    @property
    def lengths(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, samples x parts."""

    @property
    def indices(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, one per sample."""

    @property
    def labels(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, one per sample, -1: none."""

    @property
    def samples(self) -> int: ...

    @property
    def parts(self) -> int: ...

    @property
    def ready_ns(self) -> int:
        """When it was there, of the steady clock."""

    @property
    def way(self) -> bytes:
        """
        How it came: BatchWay of batch.h, as it lies in memory. Nanoseconds and bytes.
        """

    def held(self, ns: int) -> None:
        """Notes that a limit on rates held it back before it was submitted."""

    def made_of(self, read: Batch | None, ram_bytes: int) -> None:
        """
        Notes that it was made of a batch that was read and of samples in memory.
        """

    def came_from(self, tier: int) -> None:
        """Notes that what was read came from a nearer tier, by its number."""

    @property
    def failed(self) -> int: ...

    @property
    def stats(self, /) -> dict[str, int]:
        """Reads by route, and bytes asked for."""

    @property
    def shared(self, /) -> tuple[int, int, int] | None:
        """
        The buffer's memfd, identity and size in bytes; None in private memory.
        """

    def abandon(self) -> None:
        """Never recycle the buffer: somebody may look at it for ever."""

class Catalog:
    """Directories and volumes of an open store."""

    def __init__(self, segments: list[tuple[Directory, list[tuple[str, bytes, int, int]]]], remote: Any = None) -> None:
        """
        segments: [(Directory, [(kind, path, bytes, mtime_ns or -1), ...]), ...]; kind is file, tree or remote. remote: what reads the remote ones.
        """

    @property
    def samples(self) -> int: ...

    @property
    def part_names(self, /) -> list[bytes]: ...

    @property
    def open_per_read(self) -> bool: ...

    def read_one(self, index: int, part: int = -1, start: int = 0, size: int = -1, verify: bool = True) -> Batch:
        """
        Reads one sample (its first part when `part` is -1) in the calling thread.
        """

    def filled_up(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], read: Batch | None, positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Batch:
        """
        A batch of all these samples, of which `read` has those at `positions`; None: of none. The others have their labels, and no bytes.
        """

    def failures(self, batch: Batch) -> list[dict[str, Any]]:
        """What went wrong in a batch, one dict per slot."""

class Job:
    """A submitted batch."""

    def wait(self, seconds: float) -> Batch:
        """The batch, or None when `seconds` are over. Delivers once."""

    def waiting_for(self) -> str: ...

    @property
    def done(self) -> bool: ...

class Reader:
    """Reads submitted batches ahead, in order."""

    def __init__(self, catalog: Catalog, *, parts: Sequence[int], engine: str, direct: str, queue_depth: int, threads: int, workers: int, reads_in_flight: int = 0, budget_bytes: int, verify: bool, deadline_s: float = 300.0, simulate: SlowModel | None = None, remote: Any = None, shared: bool = False, done_fd: int = -1) -> None: ...

    def submit(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, sizes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Job:
        """
        Queues one batch; returns at once. `starts`, `sizes`: bytes to read of each sample's only part.
        """

    def gather(self, pieces: list[tuple[Batch, int, int]]) -> Batch:
        """Copies [(batch, start, stop), ...] into one new batch."""

    def turn(self, reads_in_flight: int | None = None, buffer_bytes: int | None = None) -> None:
        """
        Sets the knobs that are given, at any time: reads in flight of all workers together, and bytes of batches that are read or ready.
        """

    def stats(self) -> dict[str, Any]:
        """
        What it did since it was made, and what it holds now: see ReaderStats in reader.h.
        """

    @property
    def batches_ahead(self) -> int:
        """How many batches should be submitted ahead so that no worker runs dry."""

    def close(self, seconds: float = 5.0) -> bool:
        """
        Ends the threads. False: one did not answer in time and was left behind.
        """

    @property
    def engine_name(self) -> str: ...

    @property
    def engine_reason(self) -> str: ...

    @property
    def mapped_bytes(self) -> int: ...

class FileBatch:
    """The files of one job in one buffer."""

    @property
    def data(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """uint8, the used bytes of the buffer."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, one per file."""

    @property
    def lengths(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, 0 where errors is not."""

    @property
    def errors(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32, errno per file; 0: read."""

    @property
    def ready_ns(self) -> int:
        """
        When the last file was there, of the steady clock; a simulated one: when it was due.
        """

    @property
    def size(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def mtime_ns(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def ctime_ns(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def ino(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def dev(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

class FileBytes:
    """The bytes of one file: a read-only buffer, for memoryview()."""

    def same_as(self, fd: int) -> bool:
        """Whether an open file is the one that was read."""

    def __len__(self) -> int: ...

class FileJob:
    """Files that are being read."""

    def __len__(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def wait(self, seconds: float) -> FileBatch | None:
        """All files, when all are finished; None when `seconds` are over."""

    def take(self, index: int, seconds: float) -> FileBytes | int:
        """
        One file if its path still names what was read, else an errno. Waits for a read that has begun; one that has not is given up (ECANCELED).
        """

    def forget(self, index: int) -> None:
        """Nobody will take this file."""

class FileReader:
    """Reads whole files by path, ahead of their user."""

    def __init__(self, *, reads_in_flight: int = 16, buffer_bytes: int = 67108864, cold: str = 'direct', simulate: SlowModel | None = None, simulated_roots: Sequence[str] = []) -> None:
        """
        `simulate`: files below `simulated_roots` (resolved paths) take their time.
        """

    def submit(self, paths: list[bytes], known: numpy.typing.NDArray[numpy.int64] | None = None) -> FileJob:
        """
        Queues some files; returns at once. `known`: (files, 5), the dev, ino, size, mtime_ns and ctime_ns of files that need no look: one that is another by now is ESTALE.
        """

    def turn(self, *, reads_in_flight: int | None = None, buffer_bytes: int | None = None, cold: str | None = None) -> None:
        """Changes what is given, at once."""

    @property
    def reads_in_flight(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    def stats(self, /) -> dict[str, Any]:
        """Figures since the first submit; times in seconds."""

    def close(self, seconds: float = 5.0) -> bool:
        """
        Ends the threads. False: one did not answer in time and was left behind.
        """

def changed_just_now(ctime_ns: int) -> bool:
    """Whether a file with this ctime may be changed again without a new one."""

def look_at_files(paths: list[bytes], seconds_max: float) -> tuple[int, float]:
    """
    Opens files to see whether all of their bytes lie in the page cache, up to the first that does not, or while `seconds_max` last: how many do, and the seconds that it took.
    """

class Noise:
    """Incompressible bytes: a function of pool, key and position."""

    def __init__(self, words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """uint64, shape (131072,): the pool."""

    def fill(self, key: int, position: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """The bytes of a file from a position on."""

class FileLayout:
    """What a generated file consists of."""

    def __init__(self, runs: Sequence[tuple[int, Sequence[tuple[int, int, bytes]]]], checksum: int, patches: Sequence[int]) -> None:
        """
        `runs` of (times, pieces), each piece (kind, bytes, text); see PieceRun of headrace.bench.content.
        """

    @property
    def nbytes(self) -> int:
        """Of the finished file."""

class FileWriter:
    """Writes generated files, whole or not at all."""

    def __init__(self, noise: Noise, direct: bool) -> None:
        """`direct`: past the page cache, where that is possible."""

    def write(self, layouts: Sequence[FileLayout], keys: Sequence[int], paths: Sequence[bytes]) -> tuple[int, int]:
        """
        Writes files; returns how many were, and the errno of the one that was not, or 0.
        """

def lock_wait_ns(sleep_ns: int) -> int:
    """
    Sleeps without the interpreter's lock, and says how long it waited to have it again.
    """

class Permutation:
    """A keyed permutation of [0, n) in O(1) memory."""

    def __init__(self, n: int, key: int) -> None: ...

    @property
    def n(self) -> int:
        """The number of elements."""

    @property
    def key(self) -> int:
        """The 64-bit key."""

    def range(self, start: int, stop: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The indices at positions start to stop - 1."""

    def at(self, positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The index at each position (int64)."""

    def inverse(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The position of each index (int64)."""

    def __getstate__(self) -> tuple[int, int]: ...

    def __setstate__(self, state: tuple[int, int]) -> None: ...

def order_hash(position_start: int, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Sum over the batch of a hash of (position, index), mod 2^64."""

class BlockedOrder:
    """See headrace.order.Blocked."""

    def __init__(self, samples: int, block_samples: int, window_blocks: int, seed: int) -> None: ...

    def indices(self, epoch: int, start: int, stop: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The samples at positions start to stop - 1."""

    def window_at(self, epoch: int, position: int) -> tuple[int, int]:
        """The positions (start, stop) of the window that holds one."""

    def __getstate__(self) -> tuple[int, int, int, int]: ...

    def __setstate__(self, state: tuple[int, int, int, int]) -> None: ...

class OpportunisticOrder:
    """See headrace.order.Opportunistic."""

    def __init__(self, samples: int, resident: Sequence[tuple[int, int]], seed: int, epochs: int) -> None: ...

    def indices(self, epoch: int, start: int, stop: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The samples at positions start to stop - 1."""

    @property
    def parts(self) -> int:
        """Epochs that begin with a part that was not first before."""

    def part(self, number: int) -> tuple[int, int]:
        """
        Where a part begins and ends when the resident samples are numbered first.
        """

    def __getstate__(self) -> tuple[int, list[tuple[int, int]], int, int]: ...

    def __setstate__(self, state: tuple[int, Sequence[tuple[int, int]], int, int]) -> None: ...

class BalancedOrder:
    """See headrace.order.Balanced."""

    def __init__(self, labels: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int, length: int) -> None: ...

    def indices(self, epoch: int, start: int, stop: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The samples at positions start to stop - 1."""

    @property
    def classes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """The labels that are drawn, ascending."""

    @property
    def starts(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """
        Where each class's members begin when all are counted, and where they end.
        """

    def __getstate__(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], int, int]: ...

    def __setstate__(self, state: tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], int, int]) -> None: ...

def decode_picture(recipe: PictureRecipe, encoded: bytes, seed: int, epoch: int, index: int, steps: Annotated[NDArray[numpy.float64], dict(shape=(None, None, 7), order='C', device='cpu', writable=False)] | None = None) -> bytes:
    """
    One picture, in the calling thread. ValueError: why it cannot be decoded.
    """

def augmentation(name: str, magnitude: float, width: int, height: int) -> list[float]:
    """
    The step of one of the operators of torchvision's policies: see steps.h.
    """

@overload
def blend_pictures(one: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu')], other: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu')], share: float) -> None: ...

@overload
def blend_pictures(one: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], other: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], share: float) -> None:
    """
    Gives each of two pictures its share of itself and the rest of the other, in place.
    """

def picture_size(encoded: bytes) -> tuple[int, int] | None:
    """Width and height, as the header says; None: it cannot be read here."""

def rewrite_pictures(pictures: bytes | bytearray | memoryview, lengths: numpy.typing.NDArray[numpy.uint64], short_side: int, quality: int, decoded: bool = False) -> tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8]]:
    """
    Pictures as they are quicker to decode, everything else as it is: their bytes back to back, their lengths, and an index into `rewrite_outcomes` of each. See rewrite.h.
    """

rewrite_outcomes: tuple[str, ...]

class PictureRecipe:
    """What pictures become: see recipe.h."""

    @staticmethod
    def make(images: object, *, height: int, width: int, flip: float, flip_vertical: float, short_side: int, keep_short: int, background: int, blur_kernel: int, erase_value: int) -> PictureRecipe:
        """Of a headrace.Images. ValueError: it cannot be done."""

    @property
    def output_bytes(self) -> int: ...

    def draw(self, width: int, height: int, seed: int, epoch: int, index: int) -> tuple[float, float, float, float, int, int, bool, bool]:
        """
        Where a picture of this size is cut: origin, scale and first output of x and y; flips.
        """

    def steps(self, seed: int, epoch: int, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), writable=False)] | None:
        """
        What is done to pictures after that: float64, shape (pictures, steps, 7), in the order of augment.h's Step; None: nothing ever is.
        """

class DecodeJob:
    """A batch that is being decoded."""

    def wait(self, seconds: float) -> bool:
        """Whether it is done, after at most so many seconds."""

    @property
    def done(self) -> bool: ...

    @property
    def pixels(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """uint8, shape (samples, bytes of one), once it is done."""

    def output(self, output: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """The same of each picture's n-th output."""

    def let_go(self) -> None:
        """Lets go of the encoded bytes; no picture can be replaced any more."""

    @property
    def reduced(self, /) -> Batch:
        """
        The batch with its pictures as PPM, reduced, but for those that cannot be decoded here.
        """

    @property
    def masks(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """uint8, shape (samples, pixels of one), likewise."""

    @property
    def mappings(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None, None), writable=False)]:
        """float64, shape (samples, 6): see decode.h."""

    @property
    def failures(self, /) -> list[tuple[int, str, bool]]:
        """
        Samples that could not be decoded, why, and whether that is their masks' fault. Their pixels are zeros.
        """

    def replace(self, sample: int, rgb: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, 3), order='C', device='cpu', writable=False)], output: int = 0) -> str:
        """
        Puts a picture that was decoded elsewhere in a sample's place: uint8, shape (height, width, 3). Returns why its mask could not be decoded; '': it was, or there is none.
        """

    @property
    def times(self, /) -> tuple[float, float, float, float]:
        """
        When it began and ended, monotonic; seconds of threads and of processors that it took.
        """

class DecodePool:
    """Threads that decode pictures."""

    def __init__(self, threads: int, retained_bytes: int, kept_bytes: int = 0, shared: bool = False, done_fd: int = -1) -> None: ...

    @property
    def kept(self) -> tuple[int, int]:
        """Pictures that are kept decoded, and their bytes."""

    def keeps(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Whether each of these pictures is kept: uint8, 1 or 0."""

    def submit(self, recipe: PictureRecipe, seed: int, epoch: int, batch: Batch, part: int, mask_part: int | None = None, mask_fill: int = 0) -> DecodeJob:
        """Queues one batch; returns at once."""

    def reduce(self, recipe: PictureRecipe, batch: Batch, part: int) -> DecodeJob:
        """
        Queues a batch whose pictures become what `keep_short` keeps of them; see `DecodeJob.reduced`.
        """

    def submit_given(self, recipes: Sequence[PictureRecipe], pictures: tuple[bytes, ...], cuts: Annotated[NDArray[numpy.int32], dict(shape=(None, 12), order='C', device='cpu', writable=False)], steps: Annotated[NDArray[numpy.float64], dict(shape=(None, None, 7), order='C', device='cpu', writable=False)] | None = None) -> DecodeJob:
        """
        The same for encoded pictures, bytes each, of which each is decoded once and becomes an output by each recipe, cut as given: int32, shape (pictures x recipes, 12), in the order of recipe.h's Cut; steps: float64, shape (pictures x recipes, of each, 7), in the order of augment.h's Step.
        """

    def turn(self, threads: int) -> None: ...

    @property
    def mapped_bytes(self) -> int: ...

    def stats(self) -> dict[str, Any]: ...

class Assembler:
    """Puts batches together from what several tiers have read."""

    def __init__(self, retained_bytes: int, shared: bool = False) -> None: ...

    @property
    def mapped_bytes(self) -> int: ...

    def assemble(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], parts: list[tuple[Batch, NDArray[numpy.int64]]]) -> Batch:
        """
        One batch of [(batch, positions), ...]; a batch that fits whole is not copied.
        """

class Hits:
    """What a look-up in a cache found; keeps its memory."""

    @property
    def indices(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, as asked."""

    @property
    def missing(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64, positions in `indices` that are not held."""

    @property
    def missing_count(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Of what is held; known when a cache looked it up, or it was gathered."""

class SampleCache:
    """Samples in memory, within a quota."""

    def __init__(self, *, samples: int, parts: int, quota_bytes: int, shared: bool = False) -> None: ...

    def insert(self, batch: Batch) -> int:
        """Copies what is not held and still fits; returns the number of samples."""

    def look_up(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Hits:
        """Which samples are held."""

    def gather(self, hits: Hits, misses: Batch | None) -> Batch:
        """One batch of what was held and what was read for the rest."""

    def set_quota(self, bytes: int) -> None:
        """A smaller quota gives memory back at once."""

    @property
    def quota_bytes(self) -> int: ...

    @property
    def held_samples(self) -> int: ...

    @property
    def mapped_bytes(self) -> int: ...

    @property
    def delivered_bytes(self) -> int: ...

    @property
    def version(self) -> int:
        """Changes when slabs come or go."""

    def slabs(self) -> list[Slab]:
        """
        The memory that others may map, as it is now: the index, number 0, and the slabs.
        """

class Slab:
    """Memory of a cache; mapped as long as this lives."""

    @property
    def number(self) -> int:
        """0: the index."""

    @property
    def identity(self) -> int: ...

    @property
    def fd(self) -> int:
        """-1: private memory."""

    @property
    def bytes(self) -> int: ...

class DirectWriter:
    """Appends samples to a file past the page cache."""

    def __init__(self, path: str, offset: int) -> None: ...

    def append(self, batch: Batch, positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        Writes samples behind those before and returns the crc32c of each slot.
        """

    @property
    def direct(self) -> bool:
        """Whether writes still go past the page cache."""

def failed_samples(batch: Batch) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """int64, ascending: samples of a batch that could not be read."""

def write_samples(fd: int, offset: int, batch: Batch, positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """Writes samples back to back and returns the crc32c of each slot."""

class CacheView:
    """A cache in shared memory, as another process sees it."""

    def __init__(self, fd: int, bytes: int, *, samples: int, parts: int) -> None:
        """
        Maps the index. ValueError for memory that is not sealed and allocated.
        """

    def add_slab(self, number: int, fd: int, bytes: int) -> None:
        """Maps a slab."""

    def drop_slab(self, number: int) -> None:
        """What look-ups found there stays valid."""

    def look_up(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Hits:
        """Which samples are held."""

    @property
    def samples(self) -> int: ...

    @property
    def parts(self) -> int: ...

    @property
    def mapped_bytes(self) -> int:
        """Address space of index and slabs; the memory is the owner's."""

class GatherJob:
    """A batch of held samples that was submitted."""

    def take(self) -> Batch:
        """The batch, once."""

    @property
    def done(self) -> bool: ...

    @property
    def bytes(self) -> int:
        """Of its samples; known when it is done."""

class Gatherer:
    """Puts batches of held samples together ahead."""

    def __init__(self, budget_bytes: int, threads: int) -> None: ...

    def submit(self, hits: Hits) -> GatherJob:
        """Queues a batch of which nothing is missing; returns at once."""

    def gather(self, hits: Hits, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], labels: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Batch:
        """One batch of what is held and what was read for the rest."""

    def set_budget(self, bytes: int) -> None:
        """Bytes of batches that are gathered or wait to be taken."""

    def close(self) -> None:
        """Ends the threads; batches can be taken still."""

    @property
    def mapped_bytes(self) -> int: ...

def register_string_kernel(framework_library: str, shares: bool) -> str:
    """
    Registers TensorFlow's operation HeadraceStrings; returns why it cannot be had, or ''.
    """

class FileBoard:
    """
    Which files there are, and where each can be opened fastest, in shared memory for programs that were not changed.
    """

    def __init__(self, paths: Sequence[bytes], stats: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], full_stats: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, roots: Sequence[tuple[bytes, bytes]] = (), tiers: Sequence[bytes] = (), immutable: bool = False) -> None:
        """
        Absolute paths. stats (n, 4): st_dev, st_ino, st_size, mtime_ns. full_stats (n, 9): st_mode, st_nlink, st_uid, st_gid, atime_ns, ctime_ns, st_blocks, st_blksize, 1 where the path is a symbolic link to what the figures describe. roots: (as programs may spell it, what stands for it in `paths`). tiers: folders of `place_path`'s files.
        """

    def place(self, file: int, fd: int) -> None:
        """The copy is the memfd `fd`, which stays open until `withdraw`."""

    def place_path(self, file: int, path: bytes) -> None:
        """The copy is this file below one of `tiers`."""

    def withdraw(self, file: int) -> None:
        """Before the copy is closed or removed."""

    def placed(self, file: int) -> bool: ...

    def find(self, path: bytes) -> int:
        """The file's number; -1: none."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def fd(self) -> int:
        """Shared memory that others can only read."""

    @property
    def inode(self) -> int:
        """By which others know it."""

class SlowMemory:
    """A simulated storage as the processes of one run share it."""

    def __init__(self, *, open_ns: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], read_ns: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], servers: int, link_bytes_per_s: int, stream_bytes_per_s: int, seed: int) -> None:
        """Latencies: 1,024 quantiles each, ascending. 0: unbounded."""

    @property
    def fd(self) -> int: ...

    @property
    def inode(self) -> int: ...

class RunPage:
    """Where the programs of one run find board and ring."""

    def __init__(self, slow: SlowMemory | None = None) -> None: ...

    def publish(self, process: int, board_fd: int, board_inode: int, ring_fd: int, ring_inode: int) -> None:
        """
        Descriptors of this process; copies in memory are descriptors of `process`.
        """

    def clear(self) -> None:
        """From now on the originals are opened."""

    @property
    def epoch(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def inode(self) -> int: ...

class OpenFollower:
    """A second reader of a ring of opens."""

    def __init__(self, board_fd: int, ring_fd: int) -> None: ...

    def take(self) -> list[bytes]:
        """Paths that were opened for reading since the last call, in that order."""

def open_counts(fd: int) -> dict[str, int]:
    """The `counts` of a ring that another process made."""

class OpenRing:
    """What programs opened, told without waiting."""

    def __init__(self, capacity: int = 65536) -> None: ...

    def take(self, timeout_s: float) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        int64, shape (k, 4): file number or -1, process id, what, position in the ring; oldest first. Waits for the first; k = 0 when none came.
        """

    @property
    def lost(self) -> int:
        """Reports overwritten before they were taken."""

    @property
    def counts(self) -> dict[str, int]:
        """Totals, exact also where reports were lost; bytes are of whole files."""

    @property
    def capacity(self) -> int: ...

    @property
    def fd(self) -> int:
        """Shared memory that others may write."""

    @property
    def inode(self) -> int:
        """By which others know it."""

    ORIGINAL: int = 0

    COPY: int = 1

    WRITING: int = 2

    UNKNOWN: int = 3

    REFUSED: int = 4

    ATTACHED: int = 5

    BLIND: int = 6

def best_fit(sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], capacity: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    The bin of each piece, placed in this order: the fullest that it fits into, else a new one.
    """

def shared_period(parts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int16], dict(shape=(None,))]:
    """
    The source at each position of one period of a mixture of so many parts of each source.
    """

def cut_documents(starts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], block: int, documents: int, length: int, windows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """The documents that may have a part in these windows, window by window."""

def cut_windows(starts: numpy.typing.NDArray[numpy.int64], block: int, documents: int, length: int, windows: numpy.typing.NDArray[numpy.int64], sizes: numpy.typing.NDArray[numpy.int64]) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64]]:
    """
    The pieces of these windows: row, place, document, start and count of each. `sizes` are those of `cut_documents`.
    """

@overload
def place_tokens(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], dtype: str, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dests: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> bool: ...

@overload
def place_tokens(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], dtype: str, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dests: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> bool:
    """
    Copies piece i, `counts[i]` tokens of `dtype` from byte `offsets[i]` of `data` on, to place `dests[i]` of `rows`. False: a token does not fit.
    """
