"""Stores as a file system for fsspec: `fsspec.open("headrace://photos.hr/class0/1.png")`."""

from headrace.frameworks.fsspec import HeadraceFileSystem

__all__ = ["HeadraceFileSystem"]
