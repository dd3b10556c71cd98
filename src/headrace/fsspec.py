"""Stores as a file system for fsspec: `fsspec.open("headrace://photos.hr/class0/1.png")`."""

from headrace.base.extras import import_extra

import_extra("fsspec", "headrace.fsspec")
from headrace.frameworks.fsspec import HeadraceFileSystem  # noqa: E402

__all__ = ["HeadraceFileSystem"]
