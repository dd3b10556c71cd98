"""A store's files, changed by somebody who can write checksums: opened, or refused with one of our errors.

The first byte names the file (manifest, directory, volume) and how it is changed: the rest of the input is
the file, without or with checksums that are made good again, as whoever makes a hostile store would do; or
the rest is a list of changes: values of the manifest, bytes of the directory or the volume. The other files
are as they were written.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _native, api
from headrace.base.checksum import crc32c
from headrace.errors import HeadraceError
from headrace.store.format import CHECKSUM_BLOCK_BYTES, PAGE_BYTES
from headrace.store.manifest import _document_crc, fingerprint_of
from headrace.store.pack import index, pack
from headrace.store.summary import summarise
from headrace.store.verify import verify
from store.reference import open_either

NAMES = ("store.json", "segment-0000.hrd", "segment-0000-0000.hrv")
SAMPLES = 5


@functools.cache
def store(*, packed: bool) -> tuple[Path, dict[str, bytes]]:
    """The folder in which all inputs are tried, and the store as it was written: packed, or over a folder."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    samples = [
        (f"a/{i}.é", {"jpg": bytes(range(9 * i)), "cls": b"%d" % i}, i % 2) for i in range(SAMPLES)
    ]
    if packed:
        pack(samples, folder / "s.hr")
    else:
        (folder / "tree/a").mkdir(parents=True)
        for i in range(SAMPLES):
            (folder / f"tree/a/{i}.é").write_bytes(bytes(9 * i))
        index(folder / "tree", folder / "s.hr")
    return folder / "s.hr", {p.name: p.read_bytes() for p in (folder / "s.hr").iterdir()}


def seeds() -> list[bytes]:
    files = store(packed=True)[1]
    assert sorted(files) == sorted(NAMES)
    assert sorted(store(packed=False)[1]) == sorted(NAMES[:2])
    changes = [
        bytes([first + over, *rest])
        for first, rest in ((6, range(9)), (7, (16, 3, 1, 17, 9, 2)), (8, (0, 20, 1)))
        for over in (0, 9)
    ]
    return [bytes([which]) + files[NAMES[which % 3]] for which in range(6)] + changes


def one_input(data: bytes) -> str:
    which = data[0] % 18 if data else 0
    folder, files = store(packed=which < 9)
    which %= 9
    name = NAMES[which % 3] if NAMES[which % 3] in files else NAMES[1]
    content = data[1:]
    if which == 6:
        content = other_values(files[name], content)
    elif which >= 7:
        content = other_bytes(files[name], content)
    if which >= 3:
        content = (good_manifest, good_directory, good_page)[NAMES.index(name)](content)
    changed = {**files, name: content}
    if name == NAMES[1] and which >= 3:  # the manifest of a hostile store fits its directory
        changed["store.json"] = fitting(files["store.json"], content)
    for name, each in changed.items():
        (folder / name).write_bytes(each)
    outcomes = {read(folder, reference=reference) for reference in (False, True)}
    try:
        verify(folder)
    except HeadraceError:
        outcomes.add("refused")
    return "accepted" if outcomes == {"accepted"} else "refused"


def read(folder: Path, *, reference: bool) -> str:
    """All of a store, in every way there is."""
    try:
        with open_either(folder, reference=reference) as opened:
            names = list(opened.names)
            summarise(opened)
            assert opened.columns.keys() is not None
            if opened.labels is not None:
                assert len(opened.labels) == len(names)
            opened.resident_ranges()
            for number, name in enumerate(names[: 2 * SAMPLES]):
                assert opened.find(name) in range(len(names))
                for part in opened.parts_of(number):
                    opened.read(number, part=part)
            if not reference:
                assert sum(len(b) for b in api.loader(opened, batch_size=2, seed=1)) == len(names)
    except HeadraceError:
        return "refused"
    return "accepted"


VALUES = (
    None, True, -1, 0, 1, 2, 1 << 40, 1 << 63, 1 << 64, 0.5, float("nan"), "", "/", "..", "a\0b",
    "\ud800", "x" * 300, [], [[]], {}, {"a": 1}, "file", "tree", "packed", "object", "f" * 32,
    "segment-0000.hrd", "/etc/passwd",
)  # fmt: skip


def other_values(data: bytes, changes: bytes) -> bytes:
    """The document with other values: where each is, and which, is two bytes of `changes`."""
    document = json.loads(data)
    for where, what in zip(changes[::2], changes[1::2], strict=False):
        places: list[tuple[Any, Any]] = []
        below = [document]
        while below:
            inner = below.pop()
            for key in inner if isinstance(inner, dict) else range(len(inner)):
                places.append((inner, key))
                if isinstance(inner[key], (dict, list)):
                    below.append(inner[key])
        inner, key = places[where % len(places)]
        inner[key] = copy.deepcopy(VALUES[what % len(VALUES)])
    return json.dumps(document).encode()


def other_bytes(data: bytes, changes: bytes) -> bytes:
    """The file with other bytes: where each is takes two bytes of `changes`, and what it is one.

    Half of them are behind the header pages, which are mostly empty.
    """
    out = bytearray(data)
    for high, low, byte in zip(changes[::3], changes[1::3], changes[2::3], strict=False):
        first = 2 * PAGE_BYTES if high & 0x80 and len(out) > 2 * PAGE_BYTES else 0
        out[first + ((high & 0x7F) << 8 | low) % min(len(out) - first, 1500)] = byte
    return bytes(out)


def good_manifest(data: bytes) -> bytes:
    """The document with its checksum as it should be; as it is where it is none."""
    try:
        document = json.loads(data)
        document.pop("crc32c", None)
        document["crc32c"] = _document_crc(document)
        return json.dumps(document).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def good_page(data: bytes) -> bytes:
    """A file whose first page has the checksum that it should have."""
    page = data[:12] + bytes(4) + data[16:PAGE_BYTES]
    return data[:12] + crc32c(page).to_bytes(4, "little") + data[16:] if len(data) >= 16 else data


def good_directory(data: bytes) -> bytes:
    """A directory whose checksums, and whose size, are what they should be."""
    if len(data) < 2 * PAGE_BYTES:
        return good_page(data)
    data = data[:16] + struct.pack("<Q", len(data)) + data[24:]
    payload = int.from_bytes(data[72:80], "little")
    if PAGE_BYTES < payload < len(data):
        sums = _native.crc32c_blocks(np.frombuffer(data[payload:], np.uint8), CHECKSUM_BLOCK_BYTES)
        raw = sums.astype("<u4").tobytes()
        data = data[:PAGE_BYTES] + raw + data[PAGE_BYTES + len(raw) :]
        data = data[:56] + struct.pack("<QI", len(sums), crc32c(raw)) + data[68:]
    return good_page(data)


def fitting(manifest: bytes, directory: bytes) -> bytes:
    """The manifest, with what it says of the directory as the directory has it."""
    document = json.loads(manifest)
    samples, extents = struct.unpack_from("<QQ", directory.ljust(PAGE_BYTES), 24)
    segment = document["segments"][0]
    segment |= {"directory_bytes": len(directory), "samples": samples, "extents": extents}
    document["samples"] = samples
    document["fingerprint"] = fingerprint_of([directory])
    return good_manifest(json.dumps(document).encode())
