"""Which files this process has mapped, and where: tells a mapped buffer's place in its file."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mapping:
    """Addresses `begin` to `end - 1` show the file at `path` from `offset` on."""

    begin: int
    end: int
    offset: int
    path: str


class Mappings:
    """The files that are mapped now.

    Args:
        text: as the kernel writes it into `/proc/self/maps`; read from there if not given.
    """

    def __init__(self, text: bytes | None = None) -> None:
        if text is None:
            with open("/proc/self/maps", "rb") as f:
                text = f.read()
        self._found: list[Mapping] = []
        for line in text.splitlines():
            self._add(line)
        self._begins = [m.begin for m in self._found]

    def find(self, address: int, size: int) -> tuple[str, int] | None:
        """File and offset of the `size` bytes at `address`; None where no one file holds them."""
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address + size > self._found[at].end:
            return None
        mapping = self._found[at]
        return mapping.path, address - mapping.begin + mapping.offset

    def _add(self, line: bytes) -> None:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            return
        # A deleted file has no path that another process could open.
        if fields[5].endswith(b" (deleted)"):
            return
        begin, end = (int(x, 16) for x in fields[0].split(b"-"))
        offset = int(fields[2], 16)
        path = fields[5].replace(b"\\012", b"\n").decode(errors="surrogateescape")
        last = self._found[-1] if self._found else None
        if last and (last.path, last.end, last.offset + last.end - last.begin) == (
            path,
            begin,
            offset,
        ):
            # The kernel splits a mapping where advice or protection differs.
            self._found[-1] = Mapping(last.begin, end, last.offset, path)
        else:
            self._found.append(Mapping(begin, end, offset, path))
