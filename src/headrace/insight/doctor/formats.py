"""Formats: what a sample is, by the end of its name or by its first bytes."""

from __future__ import annotations

from typing import Final

__all__ = ["family_of", "format_of", "format_of_bytes"]

_SUFFIXES: Final = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".jfif": "jpeg", ".png": "png", ".gif": "gif",
    ".webp": "webp", ".bmp": "bmp", ".tif": "tiff", ".tiff": "tiff", ".ppm": "ppm", ".pgm": "ppm",
    ".npy": "npy", ".npz": "npz",
    ".tar": "tar", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".mds": "mds", ".array_record": "array_record",
    ".arrayrecord": "array_record", ".h5": "hdf5", ".hdf5": "hdf5",
    ".txt": "text", ".json": "text", ".jsonl": "text", ".csv": "text", ".xml": "text", ".md": "text",
    ".wav": "audio", ".flac": "audio", ".mp3": "audio", ".ogg": "audio",
    ".mp4": "video", ".avi": "video", ".mkv": "video", ".webm": "video",
    ".pt": "torch", ".pth": "torch",
}  # fmt: skip

_IMAGES: Final = frozenset({"jpeg", "png", "gif", "webp", "bmp", "tiff", "ppm"})

_MAGICS: Final = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P6", "ppm"), (b"P5", "ppm"),
    (b"\x93NUMPY", "npy"), (b"PK\x03\x04", "npz"),
)  # fmt: skip


def format_of(name: str) -> str:
    """By a name's end: `jpeg`, `tar`, ...; `bytes` where it says nothing."""
    lower = name.lower()
    dot = lower.rfind(".")
    found = _SUFFIXES.get(lower[dot:]) if dot >= 0 else None
    if found is None and ".tfrecord" in lower:  # train.tfrecord-00001-of-00100
        return "tfrecord"
    return found or "bytes"


def format_of_bytes(head: bytes) -> str:
    """By a sample's first bytes; `bytes` where they say nothing."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _MAGICS if head.startswith(magic)), "bytes")


def family_of(name: str) -> str:
    """`image`, or the format itself."""
    return "image" if name in _IMAGES else name
