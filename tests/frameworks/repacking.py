"""A file system for fsspec's abstract tests, which write what they then read.

Writing is ours, for the tests only: files are noted, and packed into a new store when something is read
next. Everything that reads is `HeadraceFileSystem` itself.
"""

from __future__ import annotations

import io

import headrace as hr
from headrace.fsspec import HeadraceFileSystem

KEEP = ".keep"  # a store has at least one sample


class RepackingFileSystem(HeadraceFileSystem):
    """`HeadraceFileSystem` over one store that is packed again after each change."""

    protocol = "headrace"
    cachable = False

    def __init__(self, root, **options):
        super().__init__(**options)
        self.root = self._strip_protocol(str(root))
        self.files: dict[str, bytes] = {KEEP: b""}
        self.packs = 0
        self._stale = True

    def _split(self, path):
        if self._stale:
            self.invalidate_cache()
            hr.pack(sorted(self.files.items()), self.root, overwrite=True)
            self._stale = False
            self.packs += 1
        return super()._split(path)

    def _note(self, path, data):
        self.files[self._strip_protocol(path).removeprefix(self.root + "/")] = bytes(data)
        self._stale = True

    def pipe_file(self, path, value, mode="overwrite", **_):
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        self._note(path, value)

    def touch(self, path, **_):
        self._note(path, b"")

    def put_file(self, lpath, rpath, *_, **__):
        import pathlib

        if not pathlib.Path(lpath).is_dir():
            self._note(rpath, pathlib.Path(lpath).read_bytes())

    def cp_file(self, path1, path2, **_):
        if not self.isdir(path1):
            self._note(path2, self.cat_file(path1))

    def mkdir(self, path, *_, **__):
        """A store has no empty folders."""

    makedirs = mkdir

    def rm(self, path, **_):
        for each in [path] if isinstance(path, str) else path:
            inner = self._strip_protocol(each).removeprefix(self.root + "/")
            for name in list(self.files):
                if name == inner or name.startswith(inner + "/"):
                    del self.files[name]
        self._stale = True

    def _open(self, path, mode="rb", *args, **options):
        if mode == "rb":
            return super()._open(path, mode, *args, **options)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        return _Written(self, path)


class _Written(io.BytesIO):
    def __init__(self, fs, path):
        super().__init__()
        self._fs, self._path = fs, path

    def close(self):
        if not self.closed:
            self._fs.pipe_file(self._path, self.getvalue())
        super().close()
