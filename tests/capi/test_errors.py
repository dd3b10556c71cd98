"""Every code of headrace.h is met, with words that say what and where."""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from capi.library import Batch, Failed, MountOptions, StoreInfo, mount_options
from headrace.base.checksum import crc32c
from headrace.store.manifest import load_manifest

TESTS = str(Path(__file__).resolve().parents[1])


@contextlib.contextmanager
def failing(name, *words):
    with pytest.raises(Failed) as failed:
        yield failed
    assert failed.value.name == name, failed.value
    for word in words:
        assert word in failed.value.message


def volume_of(store):
    return store / load_manifest(store).segments[0].volumes[0].path


def directory_of(store):
    return store / load_manifest(store).segments[0].directory


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rewrite(store, change):
    """Changes the manifest and keeps its checksum right."""
    document = json.loads((store / "store.json").read_text())
    change(document)
    del document["crc32c"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["crc32c"] = f"{crc32c(canonical.encode()):08x}"
    (store / "store.json").write_text(json.dumps(document))


def test_every_code_has_a_name(library):
    for name, code in library.codes.items():
        if name.startswith("HR_ERR_") or name in ("HR_OK", "HR_END"):
            assert library.native.hr_code_name(ctypes.c_int(code)).decode() == name
    assert library.native.hr_code_name(ctypes.c_int(-99)) == b"an unknown code"


def test_what_the_caller_does_wrong(library, packed_photos):
    mount = library.mount(packed_photos)
    sequence = library.sequence(mount, 0)
    for name, arguments in (
        ("hr_mount", (None, None, None)), ("hr_unmount", (None,)), ("hr_close", (None,)),
        ("hr_open", (mount, None, None)), ("hr_sequence", (mount, 0, 0, 1, None)),
        ("hr_stat", (mount, None)), ("hr_batch_read", (sequence, ctypes.c_uint64(1), None)),
        ("hr_batch_release", (None,)), ("hr_sequence_close", (None,)), ("hr_sample_bytes", (None,)),
    ):  # fmt: skip
        with failing("HR_ERR_ARGUMENT", "is null"):
            library.call(name, *arguments)
    with failing("HR_ERR_ARGUMENT", "rank is 4 of a world of 4"):
        library.sequence(mount, 0, 4, 4)
    with failing("HR_ERR_ARGUMENT", "a batch of 0 samples"):
        library.batch(sequence, 0)
    with failing("HR_ERR_ARGUMENT", "the position is 37, expected 0 to 36"):
        library.set(sequence, "HR_SET_POSITION", 37)
    with failing("HR_ERR_ARGUMENT", "HR_TAIL_*"):
        library.set(sequence, "HR_SET_TAIL", 9)
    with failing("HR_ERR_ARGUMENT", "HR_SET_*"):
        library.call("hr_sequence_set", sequence, 99, ctypes.c_uint64(0))
    for wrong in ({"timeout_s": 0.0}, {"give_up_s": float("nan")}, {"queues": 0}, {"size": 3}):
        with failing("HR_ERR_ARGUMENT", "expected"):
            library.mount(packed_photos, mount_options(**wrong))
    with failing("HR_ERR_ARGUMENT", "HR_BATCH_INIT"):
        library.call("hr_batch_read", sequence, ctypes.c_uint64(1), ctypes.byref(Batch()))
    with failing("HR_ERR_ARGUMENT", "HR_STORE_INFO_INIT"):
        library.call("hr_stat", mount, ctypes.byref(StoreInfo()))
    batch = library.batch(sequence, 1)
    with failing("HR_ERR_ARGUMENT", "was not released"):
        library.call("hr_batch_read", sequence, ctypes.c_uint64(1), ctypes.byref(batch))
    library.release(batch)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_options_of_a_newer_header(library, packed_photos):
    class Newer(ctypes.Structure):
        _fields_ = (("known", MountOptions), ("more", ctypes.c_uint64))

    size = ctypes.sizeof(Newer)
    handle = ctypes.c_void_p()
    where = str(packed_photos).encode()
    silent = Newer(mount_options(size=size), 0)
    library.call("hr_mount", where, ctypes.byref(silent), ctypes.byref(handle))
    library.call("hr_unmount", handle)
    with failing("HR_ERR_VERSION", "newer"):
        library.call(
            "hr_mount",
            where,
            ctypes.byref(Newer(mount_options(size=size), 1)),
            ctypes.byref(handle),
        )


def test_stores_that_are_not_there(library, tmp_path, own_store):
    with failing("HR_ERR_NO_STORE", str(tmp_path / "none")) as failed:
        library.mount(tmp_path / "none")
    assert failed.value.errno == 2
    with failing("HR_ERR_NO_STORE", "headrace pack"):
        library.mount(tmp_path)
    directory_of(own_store).unlink()
    with failing("HR_ERR_NO_STORE", "sample directory is missing"):
        library.mount(own_store)


def test_samples_that_are_not_there(library, packed_photos):
    mount = library.mount(packed_photos)
    with failing("HR_ERR_NO_SAMPLE", "no sample named 'nobody'"):
        library.open(mount, b"nobody")
    handle = ctypes.c_void_p()
    with failing("HR_ERR_NO_SAMPLE", "36"):
        library.call("hr_open_index", mount, ctypes.c_uint64(36), ctypes.byref(handle))
    library.call("hr_unmount", mount)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: flip(s / "store.json", 40), "store.json"),
        (lambda s: (s / "store.json").write_text("{"), "unreadable"),
        (lambda s: flip(directory_of(s), 100), "segment"),
        (lambda s: flip(volume_of(s), 20), "header checksum"),
        (lambda s: volume_of(s).unlink(), "the volume is missing"),
        (lambda s: os.truncate(volume_of(s), 4096), "volume size in bytes"),
        (lambda s: os.truncate(directory_of(s), 4096), "file size in bytes"),
        (lambda s: rewrite(s, lambda d: d.update(fingerprint="0" * 32)), "fingerprint"),
        (lambda s: rewrite(s, lambda d: d.update(samples=1)), "samples is 1"),
        (lambda s: rewrite(s, lambda d: d.update(version=2)), "version is 2"),
        (lambda s: rewrite(s, lambda d: d["segments"][0].update(directory="../x")), "'/'"),
        (lambda s: rewrite(s, lambda d: d["segments"][0].update(uuid="0" * 32)), "uuid"),
        (lambda s: rewrite(s, lambda d: d["segments"][0]["volumes"][0].update(kind="x")), "kind"),
        (lambda s: rewrite(s, lambda d: d["segments"].append(d["segments"][0])), "samples"),
    ],
)  # fmt: skip
def test_damaged_stores(library, own_store, damage, words):
    damage(own_store)
    with failing("HR_ERR_CORRUPT_STORE", words):
        library.mount(own_store)


def test_floats_and_odd_names_do_not_break_the_manifests_checksum(library, own_store):
    """The checksum is of Python's form of the document: ours must be the same for all values."""
    odd = {"f": [0.1, 1e16, 1e-5, 1.0, -2.5e300], "ü\udc80\U0001f600": '\x7f\x1f"\\/', "n": None}
    rewrite(own_store, lambda d: d["segments"][0]["source"].update(odd))
    load_manifest(own_store)
    library.call("hr_unmount", library.mount(own_store))


def test_damaged_samples(library, own_store):
    with hr.open(own_store) as store:
        name = store.names[5]
        extent = store.segments[0].extents(5)[0]
    mount = library.mount(own_store)
    flip(volume_of(own_store), extent.offset)
    sample = library.open(mount, name.encode())
    with failing("HR_ERR_CORRUPT_SAMPLE", "sample 5", name, "checksum", "headrace repair"):
        library.read(sample, 3, 1)
    library.call("hr_close", sample)
    sequence = library.sequence(mount, 0)
    for _ in range(2):  # it stays where it is
        with failing("HR_ERR_CORRUPT_SAMPLE", "sample 5"):
            library.epoch(sequence, 36)
    assert library.get(sequence, "HR_SET_POSITION") == 0
    library.set(sequence, "HR_SET_ON_ERROR", library.codes["HR_ON_ERROR_MARK"])
    batch = library.batch(sequence, 36)
    assert (batch.failed, batch.samples) == (1, 36)
    assert [index for index, _, [data] in batch.content() if data is None] == [5]
    library.release(batch)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_a_source_that_changed(library, photos, tmp_path):
    import shutil

    copy = shutil.copytree(photos, tmp_path / "photos")
    index = tmp_path / "photos.index"
    hr.index(copy, index)
    mount = library.mount(index)
    with hr.open(index) as store:
        name = store.names[0]
    next(path for path in copy.rglob("*") if str(path).endswith(name)).write_bytes(b"other")
    sample = library.open(mount, name.encode())
    with failing("HR_ERR_SOURCE_CHANGED", "changed after it was indexed"):
        library.read(sample, 0, 1)
    library.call("hr_close", sample)
    library.call("hr_unmount", mount)
    shutil.rmtree(copy)
    with failing("HR_ERR_SOURCE_CHANGED", "gone"):
        library.mount(index)


def test_what_the_system_refuses(library, own_store):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest number that is free, whatever gaps there are: the limit is on numbers.
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with failing("HR_ERR_IO", "Too many open files") as failed:
            library.mount(own_store)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed.value.errno == 24


@pytest.mark.parametrize("where", ["s3://bucket/store", "https://host/store", "ftp://x"])
def test_what_only_python_can(library, where):
    with failing("HR_ERR_UNSUPPORTED", where):
        library.mount(where)


HUNGRY = """
import resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from capi.library import Library, Failed
library = Library(Path({library!r}))
mount = library.mount({store!r})
sequence = library.sequence(mount, 0)
batch = library.batch(sequence, 1)
library.release(batch)
library.set(sequence, "HR_SET_EPOCH", 1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
try:
    library.batch(sequence, 4)
except Failed as e:
    print(e.name)
"""


def test_out_of_memory_is_an_error_and_not_the_end(tmp_path):
    from headrace import capi

    samples = ({"name": str(i), "data": bytes(32 << 20)} for i in range(4))
    hr.pack(samples, tmp_path / "large.hr")
    program = HUNGRY.format(
        tests=TESTS,
        library=str(capi.library_dir() / "libheadrace.so"),
        store=str(tmp_path / "large.hr"),
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.strip() == "HR_ERR_MEMORY", ended.stderr


def test_a_forked_child_is_refused(library, packed_photos):
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {TESTS!r})\n"
        "from pathlib import Path\n"
        "from capi.library import Library, Failed\n"
        "from headrace import capi\n"
        "library = Library(capi.library_dir() / 'libheadrace.so')\n"
        f"mount = library.mount({str(packed_photos)!r})\n"
        "sequence = library.sequence(mount, 0)\n"
        "library.release(library.batch(sequence, 2))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: library.batch(sequence, 2)\n"
        "    except Failed as e: print(e.name, flush=True)\n"
        "    library.call('hr_sequence_close', sequence)\n"
        "    library.call('hr_unmount', mount)\n"
        "    os._exit(0)\n"
        "print(os.waitpid(pid, 0)[1], flush=True)\n"
        "library.release(library.batch(sequence, 2))\n"
        "library.call('hr_sequence_close', sequence)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.split() == ["HR_ERR_ARGUMENT", "0"], ended.stderr
