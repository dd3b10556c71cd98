"""FileSystem: a store's answers to the kernel's requests.

Bytes in, bytes out: it owns no file descriptor and no thread, and is shared by all that serve. A store is
a snapshot, so whatever is said is true for as long as the mount lasts: the kernel keeps names, attributes,
listings and bytes, and asks once. What the kernel numbers is worked out from the number alone:

    1                       the root
    2                       the door, a folder that no listing shows (`.headrace`)
    16 + sample * p + part  a file; p parts in the store
    bit 62, depth, sample   a folder: the first `depth` components of the name of the first sample in it

Nothing is remembered of what the kernel looked up, and nothing has to be forgotten: a mount of a hundred
million files takes no more memory than one of ten.

Each byte is checked before it is handed out. A checksum covers a whole part of a sample. Parts up to 4 MiB
are read and checked whole, and the last ones are kept, because a program reads a file in several pieces. A
larger part is gone through once when it is first touched: its checksum is compared, and the checksums of its
blocks are remembered, with which every later range is checked. Parts above `check_bytes_max` come
unchecked, and the log says so.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.errors import CorruptSample, HeadraceError
from headrace.posix.mount import protocol
from headrace.posix.mount.protocol import ROOT, BadRequestError, MountRequest, Opcode, Reply
from headrace.store.folders import COMPONENT_BYTES_MAX, FolderTree
from headrace.store.store import CHECKED_RANGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.store import Store
    from headrace.store.folders import Entry

DOOR = 2
DOOR_NAME = b".headrace"  # holds every sample by its index; for those whose names cannot be paths
_FIRST_FILE = 16
_FOLDER_BIT = 1 << 62
_DEPTH_SHIFT = 44
_SAMPLE_MASK = (1 << _DEPTH_SHIFT) - 1
_FOLDERS_KEPT = 4096

_FOLDER_MODE = stat.S_IFDIR | 0o555
_FILE_MODE = stat.S_IFREG | 0o444

_log = logging.getLogger("headrace.mount")

VALID_S = 7 * 86400  # how long the kernel may keep an answer without asking again
BACKGROUND = 64  # read-ahead requests that the kernel may have under way
_ENTRY_BYTES, _PLUS_BYTES = 32, 160
"""Of the shortest entry in a listing: not more are looked up than fit into the answer."""

_LOGGED_AGAIN_S = 60.0  # a bad sample is named in the log once in so long
_LOGGED_MAX = 4096

_XATTR = b"user.headrace."


class FileSystem:
    """Answers requests with a store, which stays the caller's. All files have one owner and one time.

    `log_lines` gives the last lines of the log, for an extended attribute.
    """

    def __init__(
        self,
        store: Store,
        sample_bytes: SampleBytes,
        *,
        owner: tuple[int, int],
        mtime_ns: int,
        timeout_s: int = 120,
        log_lines: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._bytes = sample_bytes
        self._tree = FolderTree(store)
        self._parts = len(store.parts)
        self._owner = owner
        self._mtime_ns = mtime_ns
        # A few folders at a time: each look-up starts from one.
        self._folder_path = lru_cache(_FOLDERS_KEPT)(self._path_of_folder)
        self._timeout_s = timeout_s
        self._log_lines = log_lines
        self._logged: dict[object, float] = {}
        self._opens_are_skipped = False
        self._answers: dict[int, Callable[[MountRequest], bytes | memoryview]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.OPEN: self._open,
            Opcode.OPENDIR: self._open,
            Opcode.STATFS: self._statfs,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.READDIR: lambda request: self._list(request, plus=False),
            Opcode.READDIRPLUS: lambda request: self._list(request, plus=True),
            Opcode.INIT: self._init,
            Opcode.RELEASE: lambda _: b"",
            Opcode.RELEASEDIR: lambda _: b"",
            Opcode.DESTROY: lambda _: b"",
        }

    def answer(self, data: memoryview, before_waiting: Callable[[], None]) -> Reply | None:
        """The answer to one request; None where the kernel expects none.

        `before_waiting` is called before anything is read from the store.
        """
        request = protocol.parse(data)
        unique = request.unique
        if request.opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
            return None  # nothing is remembered; and a read that has begun is finished
        try:
            if request.opcode == Opcode.READ:
                return protocol.reply(unique, self._read(request, before_waiting))
            how = self._answers.get(request.opcode)
            if how is not None:
                return protocol.reply(unique, how(request))
            # ENOSYS to FLUSH: closing a file needs no word with us either.
            number = errno.EROFS if request.opcode in protocol.WRITING else errno.ENOSYS
        except HeadraceError as e:
            if self._first_time((request.node, type(e))):
                _log.error("%s", e)
            number = errno.EIO
        except OSError as e:
            number = e.errno or errno.EIO
        except BadRequestError as e:
            _log.error("request %d of %d bytes: %s", request.opcode, len(data), e)
            number = errno.EINVAL
        except Exception:  # noqa: BLE001 - whoever waits for an answer must get one
            _log.exception("request %d of node %d", request.opcode, request.node)
            number = errno.EIO
        return protocol.error_reply(unique, number)

    # -- the kernel's numbers ---------------------------------------------------------------------

    def _number(self, folder: bytes, entry: Entry) -> int:
        if not entry.is_folder:
            return _FIRST_FILE + entry.sample * self._parts + entry.part
        depth = folder.count(b"/") + 2 if folder else 1
        return _FOLDER_BIT | depth << _DEPTH_SHIFT | entry.sample

    def _file(self, node: int) -> tuple[int, int]:
        """The sample and the part of a file's number.

        Raises:
            OSError: it is no file's (EISDIR), or nobody's (ESTALE).
        """
        if _is_folder(node):
            raise _error(errno.EISDIR)
        sample, part = divmod(node - _FIRST_FILE, self._parts)
        if sample >= len(self._store):
            raise _error(errno.ESTALE)
        return sample, part

    def _path_of_folder(self, node: int) -> bytes:
        """The path of the folder of a number, b"" for the root.

        Raises:
            OSError: it is no folder's (ENOTDIR), or nobody's (ESTALE).
        """
        if node == ROOT:
            return b""
        if not node & _FOLDER_BIT:
            raise _error(errno.ENOTDIR)
        sample, depth = node & _SAMPLE_MASK, (node ^ _FOLDER_BIT) >> _DEPTH_SHIFT
        if sample >= len(self._store):
            raise _error(errno.ESTALE)
        return b"/".join(self._tree.name_of(sample).split(b"/")[:depth])

    def _attributes(self, node: int, size: int) -> bytes:
        """Of a file of `size` bytes, or a folder."""
        mode = _FOLDER_MODE if _is_folder(node) else _FILE_MODE
        return protocol.attributes(node, size, mode, self._mtime_ns, self._owner)

    def _file_bytes(self, node: int) -> int:
        entry = self._tree.file_at(*self._file(node))
        if entry is None:
            raise _error(errno.ESTALE)
        return entry.size

    # -- what there is --------------------------------------------------------------------------

    def _init(self, request: MountRequest) -> bytes:
        offer = protocol.parse_init(request.body)
        self._opens_are_skipped = offer.skips_opens
        answer = protocol.init_reply(offer, background=BACKGROUND, timeout_s=self._timeout_s)
        if not answer:
            _log.error(
                "the kernel speaks FUSE %d.%d, expected 7.31 or later (Linux 5.4)",
                offer.major, offer.minor,
            )  # fmt: skip
            raise _error(errno.EPROTO)
        return answer

    def _lookup(self, request: MountRequest) -> bytes:
        name = protocol.parse_name(request.body)
        if len(name) > COMPONENT_BYTES_MAX:
            raise _error(errno.ENAMETOOLONG)
        if request.node == DOOR:
            return self._entry(b"", self._through_the_door(name))
        folder = self._folder_path(request.node)
        entry = self._tree.resolve(folder + b"/" + name if folder else name)
        if entry is None and request.node == ROOT and name == DOOR_NAME:
            return protocol.entry_reply(DOOR, self._attributes(DOOR, 0), VALID_S)
        return self._entry(folder, entry)

    def _entry(self, folder: bytes, entry: Entry | None) -> bytes:
        if entry is None:
            return protocol.entry_reply(0, protocol.NO_ATTRIBUTES, VALID_S)
        node = self._number(folder, entry)
        return protocol.entry_reply(node, self._attributes(node, entry.size), VALID_S)

    def _through_the_door(self, name: bytes) -> Entry | None:
        """`INDEX`, or `INDEX.PART`."""
        digits, dot, part = name.partition(b".")
        if not digits.isdigit() or len(digits) > 18 or (dot and not part):
            return None
        sample = int(digits)
        if b"%d" % sample != digits or sample >= len(self._store):
            return None
        return self._tree.file_at(sample, self._tree.part_number(part))

    def _getattr(self, request: MountRequest) -> bytes:
        node, size = request.node, 0
        if not _is_folder(node):
            size = self._file_bytes(node)
        elif node != DOOR:
            self._folder_path(node)  # that it is one
        return protocol.attributes_reply(self._attributes(node, size), VALID_S)

    def _open(self, _: MountRequest) -> bytes:
        # There are no handles. Told so, the kernel opens files by itself from then on: 2 us, not 20.
        if self._opens_are_skipped:
            raise _error(errno.ENOSYS)
        return protocol.OPEN_REPLY

    def _statfs(self, _: MountRequest) -> bytes:
        volumes = (v for s in self._store.segments for v in s.entry.volumes)
        size = sum(v.bytes or 0 for v in volumes)
        return protocol.statfs_reply(size, len(self._store), COMPONENT_BYTES_MAX)

    # -- listings -------------------------------------------------------------------------------

    def _list(self, request: MountRequest, *, plus: bool) -> bytes:
        offset, left = protocol.parse_range(request.body)
        out: list[bytes] = []
        count = 1 + left // (_PLUS_BYTES if plus else _ENTRY_BYTES)
        for piece in self._listing(request.node, offset, count, plus=plus):
            left -= len(piece)
            if left < 0:
                break
            out.append(piece)
        return b"".join(out)

    def _listing(self, node: int, offset: int, count: int, *, plus: bool) -> Iterator[bytes]:
        """Entries behind an offset: `.` is 1, `..` is 2, and 3 + a place in the folder's listing."""
        nothing = protocol.entry_reply(0, protocol.NO_ATTRIBUTES, 0) if plus else b""
        for place, name in islice(enumerate((b".", b".."), 1), offset, None):
            # The parent's number is not known; nobody asks for it: the kernel has it.
            yield nothing + protocol.directory_entry(name, node, place, is_folder=True)
        if node == DOOR:
            return
        folder = self._folder_path(node)
        place = max(0, offset - 3)
        while place >= 0:
            page = self._tree.page(folder, place, count)
            for sample in page.hidden:
                if self._first_time(("hidden", sample)):
                    _log.warning(
                        "sample %d: its name %r cannot be a path here; read it as %s/%d",
                        sample, self._store.names[sample], DOOR_NAME.decode(), sample,
                    )  # fmt: skip
            for entry in page.entries:
                number = self._number(folder, entry)
                attributes = self._attributes(number, entry.size) if plus else b""
                head = protocol.entry_reply(number, attributes, VALID_S) if plus else b""
                yield head + protocol.directory_entry(
                    entry.name, number, 3 + entry.place, is_folder=entry.is_folder
                )
            place = page.place

    # -- bytes ----------------------------------------------------------------------------------

    def _read(self, request: MountRequest, before_waiting: Callable[[], None]) -> memoryview:
        offset, count = protocol.parse_range(request.body)
        file = self._file(request.node)
        kept = self._bytes.kept(*file, offset, count)
        if kept is not None:
            return kept
        before_waiting()
        return self._bytes.read(*file, self._file_bytes(request.node), offset, count)

    def _first_time(self, what: object) -> bool:
        """Whether something was not said lately."""
        now = time.monotonic()
        before = self._logged.get(what)
        if before is not None and now - before < _LOGGED_AGAIN_S:
            return False
        if len(self._logged) >= _LOGGED_MAX:
            self._logged.clear()
        self._logged[what] = now
        return True

    # -- extended attributes --------------------------------------------------------------------

    def _getxattr(self, request: MountRequest) -> bytes:
        size, name = protocol.parse_xattr(request.body)
        value = self._xattrs(request.node).get(name)
        if value is None:
            raise _error(errno.ENODATA)
        return _sized(value(), size)

    def _listxattr(self, request: MountRequest) -> bytes:
        size, _ = protocol.parse_xattr(request.body)
        return _sized(b"".join(name + b"\0" for name in self._xattrs(request.node)), size)

    def _xattrs(self, node: int) -> dict[bytes, Callable[[], bytes]]:
        store = self._store
        if node == ROOT:
            return {
                _XATTR + b"store": lambda: os.fsencode(store.path),
                _XATTR + b"fingerprint": store.fingerprint.encode,
                _XATTR + b"samples": lambda: b"%d" % len(store),
                _XATTR + b"pid": lambda: b"%d" % os.getpid(),
                _XATTR + b"log": lambda: self._log_lines().encode()[-_XATTR_BYTES_MAX:],
            }
        if _is_folder(node):
            return {}
        sample, part = self._file(node)
        attributes: dict[bytes, Callable[[], bytes]] = {
            _XATTR + b"index": lambda: b"%d" % sample,
            _XATTR + b"name": lambda: self._tree.name_of(sample),
        }
        checksum = self._bytes.checksum(sample, part)
        if checksum is not None:
            attributes[_XATTR + b"crc32c"] = lambda: b"%08x" % checksum
        segment = self._store.segment_of(sample)
        labels = segment.directory.labels
        label = -1 if labels is None else int(labels[sample - segment.base])
        if label >= 0:
            attributes[_XATTR + b"label"] = lambda: b"%d" % label
        return attributes


_XATTR_BYTES_MAX = 64 << 10


def _is_folder(node: int) -> bool:
    return node < _FIRST_FILE or bool(node & _FOLDER_BIT)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _sized(value: bytes, size: int) -> bytes:
    """As the caller's buffer wants it: the length only where it has none."""
    if not size:
        return protocol.xattr_size_reply(len(value))
    if len(value) > size:
        raise _error(errno.ERANGE)
    return value


BLOCK_BYTES = 64 << 10
"""What one remembered checksum covers: 4 bytes of memory for it, and the least that is read at once."""

_STEP_BYTES = 4 << 20  # read at once when a large part is gone through; a multiple of `BLOCK_BYTES`
_CHUNK_BYTES = 1 << 20
"""Of a large part that is read front to back, so much at a time: eight of the kernel's reads of 128 KiB."""

_SUMS_MAX = 1024  # large parts whose checksums are remembered: 64 MiB of them at 1 GiB each
_LOCKS = 64

_WHOLE = -1


class SampleBytes:
    """Reads ranges; keeps whole parts that were read last, and checks parts up to `check_bytes_max`.

    Shared by threads. Two that want the same part wait for one read.
    """

    def __init__(
        self, store: Store, *, kept_bytes: int = 64 << 20, check_bytes_max: int = 1 << 30
    ) -> None:
        self._store = store
        self._kept_bytes = kept_bytes
        self._check_bytes_max = check_bytes_max
        self._kept: OrderedDict[tuple[int, int, int], memoryview] = OrderedDict()
        self._held_bytes = 0
        self._sums: OrderedDict[tuple[int, int], NDArray[np.uint32]] = OrderedDict()
        self._ends: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._unchecked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        # Taken before one of those, never after.
        self._chunk_locks = [threading.Lock() for _ in range(_LOCKS)]
        self._local = store.objects is None

    def kept(self, sample: int, part: int, start: int, count: int) -> memoryview | None:
        """A range, if what it lies in is in memory: a whole part, or a chunk of a large one."""
        with self._lock:
            for chunk in (_WHOLE, start // _CHUNK_BYTES):
                data = self._kept.get((sample, part, chunk))
                if data is None:
                    continue
                begin = start if chunk == _WHOLE else start % _CHUNK_BYTES
                if chunk != _WHOLE and begin + count > len(data) and len(data) == _CHUNK_BYTES:
                    return None  # it goes on in the next chunk
                self._kept.move_to_end((sample, part, chunk))
                return data[begin : begin + count]
        return None

    def read(self, sample: int, part: int, size: int, start: int, count: int) -> memoryview:
        """At most `count` bytes of a part of `size` bytes, from `start` on; fewer at its end.

        Raises CorruptSample if the bytes differ from their checksum, and HeadraceError if they
        cannot be read.
        """
        count = max(0, min(count, size - start))
        if not count:
            return memoryview(b"")
        if size <= CHECKED_RANGE_BYTES:
            return self._whole(sample, part)[start : start + count]
        if size <= self._check_bytes_max and self._has_checksum(sample):
            return self._large(sample, part, size, start, count)
        self._say_unchecked(sample, part, size)
        return self._range(sample, part, start, count)

    def _whole(self, sample: int, part: int) -> memoryview:
        with self._locks[hash((sample, part)) % _LOCKS]:
            key = (sample, part, _WHOLE)
            with self._lock:
                data = self._kept.get(key)
            if data is None:
                # A copy: what the reader hands out may be a small piece of a large buffer.
                data = memoryview(bytes(self._range(sample, part, 0, -1)))
                self._keep(key, data)
        return data

    def _keep(self, key: tuple[int, int, int], data: memoryview) -> None:
        if len(data) > self._kept_bytes:
            return
        with self._lock:
            if key not in self._kept:
                self._kept[key] = data
                self._held_bytes += len(data)
            while self._held_bytes > self._kept_bytes:
                _, old = self._kept.popitem(last=False)
                self._held_bytes -= len(old)

    def _goes_on(self, key: tuple[int, int], start: int, count: int) -> bool:
        """Whether a range follows the one before, about: the kernel reads ahead in two requests."""
        with self._lock:
            before = self._ends.get(key)
            self._ends[key] = start + count
            while len(self._ends) > _SUMS_MAX:
                self._ends.popitem(last=False)
        return before is not None and abs(start - before) <= 4 * BLOCK_BYTES

    def _large(self, sample: int, part: int, size: int, start: int, count: int) -> memoryview:
        """A range of a large part. What is read front to back is read in chunks, which are kept."""
        first = start // _CHUNK_BYTES
        in_one_chunk = (start + count - 1) // _CHUNK_BYTES == first
        if not self._goes_on((sample, part), start, count) or not in_one_chunk:
            return self._checked_range(sample, part, size, start, count)
        with self._chunk_locks[hash((sample, part)) % _LOCKS]:
            data_of_range = self.kept(sample, part, start, count)
            if data_of_range is None:
                begin = first * _CHUNK_BYTES
                length = min(_CHUNK_BYTES, size - begin)
                data = self._checked_range(sample, part, size, begin, length)
                self._keep((sample, part, first), data)
                data_of_range = data[start - begin : start - begin + count]
        return data_of_range

    def _checked_range(
        self, sample: int, part: int, size: int, start: int, count: int
    ) -> memoryview:
        sums = self._block_sums(sample, part, size)
        first = start // BLOCK_BYTES
        end = min(size, -(-(start + count) // BLOCK_BYTES) * BLOCK_BYTES)
        data = self._range(sample, part, first * BLOCK_BYTES, end - first * BLOCK_BYTES)
        checksums = _native.crc32c_blocks(np.frombuffer(data, np.uint8), BLOCK_BYTES)
        if not np.array_equal(checksums, sums[first : first + len(checksums)]):
            raise self._corrupt(sample, "a block that was read before", "other bytes now")
        begin = start - first * BLOCK_BYTES
        return data[begin : begin + count]

    def _block_sums(self, sample: int, part: int, size: int) -> NDArray[np.uint32]:
        """The checksums of a part's blocks, once the whole part has been found good."""
        key = (sample, part)
        with self._locks[hash(key) % _LOCKS]:
            with self._lock:
                known = self._sums.get(key)
                if known is not None:
                    self._sums.move_to_end(key)
                    return known
            crc, pieces = 0, []
            for start in range(0, size, _STEP_BYTES):
                data = np.frombuffer(self._range(sample, part, start, _STEP_BYTES), np.uint8)
                crc = _native.crc32c(data, crc)
                pieces.append(_native.crc32c_blocks(data, BLOCK_BYTES))
            expected = self.checksum(sample, part) or 0
            if crc != expected:
                raise self._corrupt(sample, f"{expected:08x}", f"{crc:08x}")
            sums = np.concatenate(pieces)
            with self._lock:
                self._sums[key] = sums
                while len(self._sums) > _SUMS_MAX:
                    self._sums.popitem(last=False)
            return sums

    def _range(self, sample: int, part: int, start: int, count: int) -> memoryview:
        """Bytes as the store reads them: checked where they are a whole part with a checksum."""
        store = self._store
        if not self._local:
            size = None if count < 0 else count
            return store.read(sample, start, size, part=store.parts[part])
        catalog = store.catalog
        batch = catalog.read_one(sample, part, start, count)
        if batch.failed:
            raise store.failure_error(sample, catalog.failures(batch)[0])
        return memoryview(batch.data).toreadonly()  # type: ignore[arg-type]  # numpy's stubs lag

    def checksum(self, sample: int, part: int) -> int | None:
        """The crc32c of a part; None where the store has none."""
        segment = self._store.segment_of(sample)
        if not segment.directory.has_crc:
            return None
        wanted = os.fsencode(self._store.parts[part])
        names = segment.directory.part_names
        return next(e.crc or 0 for e in segment.extents(sample) if names[e.part] == wanted)

    def _has_checksum(self, sample: int) -> bool:
        return self._store.segment_of(sample).directory.has_crc

    def _corrupt(self, sample: int, expected: str, actual: str) -> CorruptSample:
        name = self._store.names[sample]
        return CorruptSample(
            f"{self._store.path}: sample {sample} ({name!r}) has the checksum {actual}, expected "
            f"{expected}.",
            path=self._store.path,
            next_step=f"Run `headrace verify {self._store.path}` to list every bad sample.",
            index=sample,
            name=name,
        )

    def _say_unchecked(self, sample: int, part: int, size: int) -> None:
        with self._lock:
            if (sample, part) in self._unchecked or len(self._unchecked) >= _SUMS_MAX:
                return
            self._unchecked.add((sample, part))
        why = "the store has no checksums"
        if self._has_checksum(sample):
            why = f"it is larger than {self._check_bytes_max:,} bytes (--check-up-to)"
        _log.warning(
            "sample %d (%r, %s bytes) is delivered unchecked: %s", sample,
            self._store.names[sample], f"{size:,}", why,
        )  # fmt: skip
