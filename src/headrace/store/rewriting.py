"""JPEGs that are rewritten while they are packed, so that every epoch decodes them with less work.

`lossless` keeps each DCT coefficient, and with them every pixel: progressive files become baseline,
Huffman codes are made for the picture, and a restart marker stands every 128 pixels, so that a crop is
found without decoding what lies above or beside it. `short=512,quality=92` reduces pictures first, and
is lossy. Metadata stay. `decoded` stores the pixels themselves, of PNGs and others too, reduced or not. What is
odd with a file leaves it as it is: nothing here refuses a sample. Native code does the work, without the
interpreter's lock. `BrokenPictures` notices what any pack can see of pictures without decoding them.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.base.text import bytes_text, count_text, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

_OTHER, _REWRITTEN = (_native.rewrite_outcomes.index(name) for name in ("no JPEG", "rewritten"))
_EXPECTED = (
    "'lossless', 'short=PIXELS,quality=1 to 100' (such as 'short=512,quality=92'), 'decoded', or "
    "'decoded,short=PIXELS'"
)
_SHORT_MAX = 1 << 14


@dataclass(slots=True)
class RewrittenImages:
    """What became of the JPEGs among the samples; with `decoded`, of all pictures."""

    recipe: str
    """`lossless` or `decoded`; or `short=512,quality=92` or `decoded,short=256`, which are lossy."""
    rewritten: int = 0  # how many were rewritten
    bytes_before: int = 0  # of these, in the source
    bytes_after: int = 0  # of these, in the store
    kept: dict[str, int] = field(default_factory=dict)  # how many were kept as they are, by reason

    @property
    def lossy(self) -> bool:
        """Whether rewritten pictures have other pixels than those of the source."""
        return "short=" in self.recipe

    def to_json(self) -> dict[str, Any]:
        """As it stands in `store.json`, and in the journal."""
        return asdict(self)

    def add(self, other: RewrittenImages) -> None:
        """Counts others too."""
        self.rewritten += other.rewritten
        self.bytes_before += other.bytes_before
        self.bytes_after += other.bytes_after
        for reason, count in other.kept.items():
            self.kept[reason] = self.kept.get(reason, 0) + count

    def lines(self) -> list[str]:
        """What a person is told."""
        how = f"lossy, {self.recipe}" if self.lossy else "without loss"
        what = "pictures as pixels" if self.recipe.startswith("decoded") else "JPEGs"
        text = f"rewrote {count_text(self.rewritten)} {what} ({how})"
        if self.rewritten:
            text += f": {bytes_text(self.bytes_before)} became {bytes_text(self.bytes_after)}"
        reasons = ", ".join(f"{count_text(n)} {reason}" for reason, n in sorted(self.kept.items()))
        return [text, f"kept as they are: {reasons}"] if reasons else [text]


def recorded_images(source: Mapping[str, Any]) -> RewrittenImages | None:
    """What a segment's `source` in `store.json` says; None where it says nothing of the kind."""
    images = source.get("images")
    if not isinstance(images, dict) or not isinstance(images.get("recipe"), str):
        return None
    numbers = tuple(images.get(name, 0) for name in ("rewritten", "bytes_before", "bytes_after"))
    kept = images.get("kept", {})
    if not isinstance(kept, dict) or not all(
        type(each) is int and each >= 0 for each in (*numbers, *kept.values())
    ):
        return None
    return RewrittenImages(images["recipe"], numbers[0], numbers[1], numbers[2], dict(kept))


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How pictures are rewritten. Threads may share it."""

    short: int = 0  # pixels that the short side has at most; 0: nothing is lost
    quality: int = 92  # libjpeg's, 1 to 100, of what is reduced
    decoded: bool = False  # pictures are stored as their pixels (PPM)

    @staticmethod
    def parse(text: str) -> ImageRecipe:
        """Of `lossless`, `short=512,quality=92` (`quality` may be left out), `decoded` or `decoded,short=256`.

        Raises ValueError if it is none of these, or this build has no libjpeg-turbo.
        """
        first, _, rest = text.partition(",")
        decoded = first.strip() == "decoded"
        recipe = ImageRecipe(decoded=decoded)
        if text not in {"lossless", "decoded"}:
            pairs = [each.partition("=") for each in (rest if decoded else text).split(",")]
            options = {name.strip(): value.strip() for name, _, value in pairs}
            numbers = {name: int(v) for name, v in options.items() if v.isascii() and v.isdigit()}
            known = {"short"} if decoded else {"short", "quality"}
            odd = len(options) < len(pairs) or len(numbers) < len(options) or numbers.keys() - known
            if odd or "short" not in numbers:
                raise ValueError(f"images is {text!r}, expected {_EXPECTED}")
            recipe = ImageRecipe(**numbers, decoded=decoded)
            if not (1 <= recipe.short <= _SHORT_MAX and 1 <= recipe.quality <= 100):
                raise ValueError(
                    f"images is {text!r}, expected short from 1 to {_SHORT_MAX:,}, quality to 100"
                )
        recipe.rewrite(memoryview(b""), np.zeros(0, np.uint64), np.zeros(0, np.uint32))
        return recipe

    def __str__(self) -> str:
        if self.decoded:
            return f"decoded,short={self.short}" if self.short else "decoded"
        return f"short={self.short},quality={self.quality}" if self.short else "lossless"

    def rewrite(
        self, data: memoryview, length: NDArray[np.uint64], crc: NDArray[np.uint32]
    ) -> tuple[memoryview, NDArray[np.uint64], NDArray[np.uint32], RewrittenImages]:
        """Extents as they are packed; those that are no JPEGs, or odd ones, as they were.

        `data` has their bytes back to back, `length` and `crc` are (extents,) of each. Returns the same of
        what is packed, and what became of the JPEGs.
        """
        images = RewrittenImages(str(self))
        after, lengths, outcomes = _native.rewrite_pictures(
            data, length, self.short, self.quality, self.decoded
        )
        kept = np.bincount(outcomes, minlength=len(_native.rewrite_outcomes)).tolist()
        images.rewritten = kept[_REWRITTEN]
        for number, count in enumerate(kept):
            if count and number not in (_OTHER, _REWRITTEN):
                images.kept[_native.rewrite_outcomes[number]] = count
        if not images.rewritten:
            return data, length, crc, images
        changed = outcomes == _REWRITTEN
        images.bytes_before = int(length[changed].sum())
        images.bytes_after = int(lengths[changed].sum())
        view, crc = memoryview(after.data), crc.copy()
        ends = np.cumsum(lengths.astype(np.int64)).tolist()
        for i in np.flatnonzero(changed).tolist():
            crc[i] = crc32c(view[ends[i] - int(lengths[i]) : ends[i]])
        return view, lengths, crc, images

    def rewrite_one(self, data: bytes) -> bytes:
        """One sample's bytes as they are packed."""
        lengths = np.array([len(data)], np.uint64)
        return bytes(self.rewrite(memoryview(data), lengths, np.zeros(1, np.uint32))[0])


# -- what is seen on the way -----------------------------------------------------------------------

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG"
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xae\x42\x60\x82"
_SCAN: Final = 0xDA
_HEAD_BYTES: Final = 12


@dataclass(slots=True)
class BrokenPictures:
    """Samples that are empty, beside pictures, and JPEGs and PNGs without an end."""

    pictures: int = 0  # how many there were
    empty: list[int] = field(default_factory=list)
    """Samples of one part that are empty, by their numbers."""
    cut_off: list[int] = field(default_factory=list)
    """Samples with a picture that is cut off, likewise."""

    def look(
        self, first: int, counts: NDArray[np.int64], length: NDArray[np.uint64], data: memoryview
    ) -> None:
        """Look at consecutive samples from number `first` on; see `PackedSamples`. `data` has their bytes."""
        samples = first + np.repeat(np.arange(len(counts)), counts)
        self.empty += samples[(length == 0) & (np.repeat(counts, counts) == 1)].tolist()
        at = np.flatnonzero(length >= _HEAD_BYTES)
        ends = np.cumsum(length.astype(np.int64))
        whole = np.frombuffer(data, np.uint8)
        heads = whole[(ends - length.astype(np.int64))[at, None] + np.arange(4)]
        tails = whole[ends[at, None] - np.arange(8, 0, -1)]
        for head, end in ((_JPEG, _JPEG_END), (_PNG, _PNG_END)):
            alike = (heads[:, : len(head)] == np.frombuffer(head, np.uint8)).all(1)
            self.pictures += int(alike.sum())
            ended = (tails[:, 8 - len(end) :] == np.frombuffer(end, np.uint8)).all(1)
            for i in at[alike & ~ended].tolist():
                if not _has_end(bytes(data[ends[i] - int(length[i]) : ends[i]]), end):
                    self.cut_off.append(int(samples[i]))

    def notes(self, name: Callable[[int], bytes]) -> list[str]:
        """What the report says, given samples' names by number."""
        kinds = (("empty", self.empty), ("cut off", self.cut_off))
        broken = [f"{count_text(len(each))} {what} ({printable(os.fsdecode(name(each[0])))} first)"
                  for what, each in kinds if each]  # fmt: skip
        if not self.pictures or not broken:
            return []
        return [f"pictures are broken: {', '.join(broken)}; headrace verify --decode names all"]


def _has_end(picture: bytes, end: bytes) -> bool:
    """Whether an end marker stands somewhere behind the header; many files go on behind it."""
    at = 2
    while end == _JPEG_END and picture[at : at + 1] == b"\xff" and picture[at + 1] != _SCAN:
        at += 2 + int.from_bytes(picture[at + 2 : at + 4])  # a thumbnail has an end of its own
    return picture.find(end, at) >= 0
