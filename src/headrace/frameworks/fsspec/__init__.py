"""fsspec over headrace stores: names as a hierarchy of folders, reads in native batches."""

from headrace.frameworks.fsspec.filesystem import HeadraceFile, HeadraceFileSystem

__all__ = ["HeadraceFile", "HeadraceFileSystem"]
