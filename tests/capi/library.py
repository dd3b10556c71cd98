"""libheadrace.so over ctypes: structures, handles, and errors that are raised."""

from __future__ import annotations

import ctypes as c
import re
from typing import TYPE_CHECKING, Any

from headrace import capi

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Batch", "Failed", "Library", "MountOptions", "Order", "StoreInfo"]


def codes() -> dict[str, int]:
    """The constants of headrace.h by name."""
    text = (capi.include_dir() / "headrace.h").read_text()
    return {
        name: int(value)
        for name, value in re.findall(r"^\s+(HR_\w+) = (-?\d+)", text, re.MULTILINE)
    }


class Failed(Exception):
    """A call returned a negative code."""

    def __init__(self, name: str, message: str, errno: int) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.errno = errno


class MountOptions(c.Structure):
    _fields_ = (
        ("size", c.c_size_t), ("timeout_s", c.c_double), ("give_up_s", c.c_double),
        ("queues", c.c_uint32), ("no_digests", c.c_uint32), ("host_nqn", c.c_char_p),
        ("job_folder", c.c_char_p),
    )  # fmt: skip


def mount_options(**changed: Any) -> MountOptions:
    values = {"size": c.sizeof(MountOptions), "timeout_s": 60.0, "give_up_s": 60.0, "queues": 2}
    return MountOptions(**(values | changed))


class StoreInfo(c.Structure):
    _fields_ = (
        ("size", c.c_size_t), ("samples", c.c_uint64), ("parts", c.c_uint32),
        ("segments", c.c_uint32), ("fingerprint", c.c_char * 40),
    )  # fmt: skip


class Batch(c.Structure):
    _fields_ = (
        ("size", c.c_size_t), ("samples", c.c_uint64), ("parts", c.c_uint64),
        ("buffer", c.POINTER(c.c_uint8)), ("buffer_bytes", c.c_uint64),
        ("offsets", c.POINTER(c.c_int64)), ("lengths", c.POINTER(c.c_int64)),
        ("labels", c.POINTER(c.c_int64)), ("indices", c.POINTER(c.c_int64)),
        ("epoch", c.c_uint64), ("position", c.c_uint64), ("failed", c.c_uint64),
        ("owner", c.c_void_p), ("pixels", c.c_void_p), ("pixel_bytes", c.c_uint64),
    )  # fmt: skip

    def content(self) -> list[tuple[int, int, list[bytes | None]]]:
        """(index, label, parts) of each sample; None for a part that failed."""
        out = []
        for i in range(self.samples):
            parts: list[bytes | None] = []
            for slot in range(i * self.parts, (i + 1) * self.parts):
                begin = c.addressof(self.buffer.contents) + self.offsets[slot]
                length = self.lengths[slot]
                parts.append(c.string_at(begin, length) if length >= 0 else None)
            out.append((self.indices[i], self.labels[i], parts))
        return out


class Images(c.Structure):
    _fields_ = (
        ("size", c.c_size_t), ("height", c.c_uint32), ("width", c.c_uint32), ("crop", c.c_uint32),
        ("short_side", c.c_uint32), ("scale", c.c_double * 2), ("ratio", c.c_double * 2),
        ("flip", c.c_double), ("flip_vertical", c.c_double), ("filter", c.c_uint32),
        ("dtype", c.c_uint32), ("channels_last", c.c_uint32), ("exact", c.c_uint32),
        ("orient", c.c_uint32), ("background", c.c_int32), ("mean", c.c_float * 3),
        ("std", c.c_float * 3), ("max_pixels", c.c_uint64), ("part", c.c_uint32),
        ("threads", c.c_uint32),
    )  # fmt: skip


def images(**changed: Any) -> Images:
    """HR_IMAGES_INIT with some fields changed."""
    values = {
        "size": c.sizeof(Images), "height": 224, "width": 224, "scale": (0.08, 1.0),
        "ratio": (3 / 4, 4 / 3), "filter": 1, "background": -1, "std": (1, 1, 1),
        "max_pixels": 89_478_485,
    }  # fmt: skip
    return Images(**(values | changed))


class Order(c.Structure):
    _fields_ = (
        ("size", c.c_size_t), ("kind", c.c_uint32), ("block_samples", c.c_uint64),
        ("window_blocks", c.c_uint64), ("resident", c.POINTER(c.c_uint64)),
        ("resident_ranges", c.c_uint64), ("resident_epochs", c.c_uint64),
    )  # fmt: skip


class Library:
    """The calls, with negative codes raised as `Failed`."""

    def __init__(self, path: Path) -> None:
        self.native = c.CDLL(str(path))
        self.codes = codes()
        for name in ("hr_last_error", "hr_code_name"):
            getattr(self.native, name).restype = c.c_char_p
        for name in ("hr_read", "hr_sample_index", "hr_sample_bytes"):
            getattr(self.native, name).restype = c.c_int64

    def call(self, name: str, *arguments: Any) -> int:
        code = int(getattr(self.native, name)(*arguments))
        if code < 0:
            raise Failed(
                self.native.hr_code_name(c.c_int(code)).decode(),
                self.native.hr_last_error().decode(),
                self.native.hr_last_errno(),
            )
        return code

    def mount(self, where: Any, options: MountOptions | None = None) -> c.c_void_p:
        handle = c.c_void_p()
        given = None if options is None else c.byref(options)
        self.call("hr_mount", str(where).encode(), given, c.byref(handle))
        return handle

    def info(self, mount: c.c_void_p) -> StoreInfo:
        info = StoreInfo(size=c.sizeof(StoreInfo))
        self.call("hr_stat", mount, c.byref(info))
        return info

    def open(self, mount: c.c_void_p, name: bytes) -> c.c_void_p:
        handle = c.c_void_p()
        self.call("hr_open", mount, name, c.byref(handle))
        return handle

    def read(self, sample: c.c_void_p, offset: int, size: int) -> bytes:
        buffer = c.create_string_buffer(max(1, size))
        got = self.call("hr_read", sample, c.c_uint64(offset), buffer, c.c_size_t(size))
        return buffer.raw[:got]

    def sequence(self, mount: c.c_void_p, seed: int, rank: int = 0, world: int = 1) -> c.c_void_p:
        handle = c.c_void_p()
        self.call(
            "hr_sequence",
            mount,
            c.c_uint64(seed),
            c.c_uint32(rank),
            c.c_uint32(world),
            c.byref(handle),
        )
        return handle

    def order(
        self,
        sequence: c.c_void_p,
        kind: str,
        resident: tuple[tuple[int, int], ...] = (),
        **changed: int,
    ) -> None:
        """Sets the order: HR_ORDER_INIT with some fields changed."""
        numbers = [number for each in resident for number in each]
        order = Order(
            size=c.sizeof(Order), kind=self.codes[f"HR_ORDER_{kind.upper()}"],
            resident=(c.c_uint64 * len(numbers))(*numbers), resident_ranges=len(resident),
            **({"resident_epochs": 1} | changed),
        )  # fmt: skip
        self.call("hr_sequence_order", sequence, c.byref(order))

    def set(self, sequence: c.c_void_p, what: str, value: int) -> None:
        self.call("hr_sequence_set", sequence, self.codes[what], c.c_uint64(value))

    def get(self, sequence: c.c_void_p, what: str) -> int:
        value = c.c_uint64()
        self.call("hr_sequence_get", sequence, self.codes[what], c.byref(value))
        return value.value

    def batch(self, sequence: c.c_void_p, n: int) -> Batch | None:
        """The next batch, None at the end of an epoch. Release it."""
        batch = Batch(size=c.sizeof(Batch))
        code = self.call("hr_batch_read", sequence, c.c_uint64(n), c.byref(batch))
        return None if code == self.codes["HR_END"] else batch

    def release(self, batch: Batch) -> None:
        self.call("hr_batch_release", c.byref(batch))

    def epoch(self, sequence: c.c_void_p, n: int) -> list[tuple[int, int, list[bytes | None]]]:
        """The samples of what is left of the epoch."""
        out: list[tuple[int, int, list[bytes | None]]] = []
        while (batch := self.batch(sequence, n)) is not None:
            out += batch.content()
            self.release(batch)
        return out
