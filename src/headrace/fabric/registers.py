"""Registers: the properties of a controller, and what writing CC does to CSTS."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Cap", "Cc", "Csts", "Property", "Registers"]


class Property(IntEnum):
    """Offsets."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C


class Cc:
    """Bits of Controller Configuration."""

    EN = 1
    SHN_MASK = 3 << 14
    SHN_NORMAL = 1 << 14
    IOSQES_64 = 6 << 16
    IOCQES_16 = 4 << 20


class Csts:
    """Bits of Controller Status."""

    RDY = 1
    CFS = 2
    SHST_MASK = 3 << 2
    SHST_COMPLETE = 2 << 2


class Cap:
    """Controller Capabilities."""

    @staticmethod
    def make(entries: int, timeout_s: float) -> int:
        """Queues of so many entries, contiguous, the NVM command set."""
        return entries - 1 | 1 << 16 | int(timeout_s * 2) << 24 | 1 << 37

    @staticmethod
    def entries_max(cap: int) -> int:
        """MQES."""
        return (cap & 0xFFFF) + 1

    @staticmethod
    def timeout_s(cap: int) -> float:
        """TO: the longest that enabling takes."""
        return (cap >> 24 & 0xFF) / 2


class Registers:
    """A controller's properties.

    Args:
        cap: fixed.
        version: VS.
    """

    def __init__(self, cap: int, version: int) -> None:
        self.cap = cap
        self.version = version
        self.cc = 0
        self.csts = 0

    @property
    def ready(self) -> bool:
        """Whether commands that are not Fabrics commands are taken."""
        return bool(self.csts & Csts.RDY) and not self.csts & Csts.SHST_MASK

    def get(self, offset: int, *, wide: bool) -> int | None:
        """A property's value, None if there is none at this offset and size."""
        if wide:
            return self.cap if offset == Property.CAP else None
        values = {Property.VS: self.version, Property.CC: self.cc, Property.CSTS: self.csts}
        return next((value for at, value in values.items() if at == offset), None)

    def set(self, offset: int, value: int, *, wide: bool) -> bool:
        """Writes a property; False if there is none to be written here.

        Enabling and shutting down are done at once: there is nothing to flush.
        """
        if wide or offset != Property.CC:
            return False
        was_enabled = self.cc & Cc.EN
        self.cc = value & 0xFFFFFFFF
        if self.cc & Cc.EN:
            self.csts = Csts.RDY if not was_enabled else self.csts
        else:
            self.csts = 0
        if self.cc & Cc.SHN_MASK:
            self.csts |= Csts.SHST_COMPLETE
        return True
