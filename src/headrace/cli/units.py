"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["binary_text", "bytes_of", "bytes_text", "count_text", "duration_text"]

_PREFIXES = ("", "k", "M", "G", "T", "P")
_MINUTE_S = 60
_HOUR_S = 3600


def _scaled(value: float, unit: str) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    digits = 0 if power == 0 or value >= 99.5 else 1
    return f"{value:.{digits}f} {_PREFIXES[power]}{unit}".rstrip()


def bytes_text(value: float) -> str:
    """1234567 -> '1.2 MB': decimal, as disks and networks count."""
    return _scaled(value, "B")


def binary_text(power_of_two: int) -> str:
    """65536 -> '64 KiB': for sizes that are powers of two."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if power_of_two < 1024:
            return f"{power_of_two} {unit}"
        power_of_two //= 1024
    return f"{power_of_two} TiB"


def bytes_of(text: str) -> int:
    """`8G`, `512M`, `1024` in bytes.

    Raises:
        ValueError: the text is no size.
    """
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    number, shift = text.strip().upper().removesuffix("IB").removesuffix("B"), 0
    if number and number[-1] in units:
        number, shift = number[:-1], units[number[-1]]
    try:
        return int(float(number) * (1 << shift))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size, expected bytes, or as 512M, 8G") from None


def count_text(value: int) -> str:
    """1234567 -> '1,234,567'."""
    return f"{value:,}"


def duration_text(seconds: float) -> str:
    """83.2 -> '1:23', 3.21 -> '3.2 s'."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR_S:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
