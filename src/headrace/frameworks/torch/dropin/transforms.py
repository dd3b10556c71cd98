"""Transforms: which of torchvision's native code takes over, and what they draw for a picture.

`plan_of` reads the user's transforms: those at the beginning that are known become one `NativePass` over each
picture, the rest runs in Python on what comes out. `views_of` does so for objects, too, that make several views
of a picture. `Cut` draws for one view, by torchvision's own `get_params` and `make_params` and by
`torch.rand(1)`, in its order, from torch's generator.

torchvision is never imported. Its classes are known by their modules and names; whatever is derived from them
is not known, as nobody can tell what it does.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch

from headrace.frameworks.torch.dropin import augmentations
from headrace.frameworks.torch.dropin.augmentations import name_of
from headrace.plane.augment import Op
from headrace.plane.images import Images

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLIPS: Final = {"RandomHorizontalFlip": 0, "RandomVerticalFlip": 1}
"""And their axes: columns, rows."""

_MOVING: Final = (Op.AFFINE, Op.AFFINE_BILINEAR)

_GEOMETRY: Final = (*_FLIPS, "Resize", "CenterCrop", "Pad", "RandomCrop", "RandomResizedCrop")

# torchvision's InterpolationMode, and Pillow's numbers for the same.
_FILTERS: Final[dict[Any, Any]] = {
    **{name: name for name in ("box", "bilinear", "hamming", "bicubic", "lanczos")},
    1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming",
}  # fmt: skip

_PIXELS_MAX: Final = 2 * 89_478_485
"""Pillow refuses pictures with more, unless it is told otherwise: it is asked about them."""


# -- what is recognised ----------------------------------------------------------------------------


class NativePass(NamedTuple):
    """What native code does with each picture, and what Python does afterwards."""

    images: Images
    drawn: list[tuple[str, Any]]
    """Transforms that say which pixels are taken and how they are augmented, by name, in their order."""
    pil: bool
    """What comes out is a PIL picture; otherwise a tensor."""
    wrap: Any
    """torchvision's ToImage, which gives tensors the class that it would have given them; or None."""
    taken: list[str]
    after: list[Any]
    """Transforms that run in Python."""


@dataclass
class _Prefix:
    """The known transforms so far."""

    form: Literal["pil", "uint8", "float32"] = "pil"
    size: tuple[int, int] | None = None
    """Height and width of every picture; None: they differ."""
    flipped: bool = False
    augmented: Literal["", "pixels", "erased"] = ""
    """What was done to the pixels since they were cut: what may come after it depends on that."""
    resized: bool = False
    filter: Any = "bilinear"
    normal: dict[str, Any] = field(default_factory=dict)
    wrap: Any = None

    def takes(self, name: str, one: Any) -> bool:  # noqa: PLR0911, PLR0912, C901 - a table
        """Whether native code does what this transform would do at this place; if so, it counts as taken."""
        if name in augmentations.NAMES:
            return self._augments(name, one)
        if self.augmented and name in _GEOMETRY:
            return name in _FLIPS and self.augmented == "pixels"
        if self.augmented == "erased":
            self.wrap = None if name == "ToPureTensor" else self.wrap
            return name in {"Identity", "ToPureTensor"}
        match name:
            case "RandomHorizontalFlip" | "RandomVerticalFlip":
                self.flipped = True
            case "Identity" | "RGB":  # the data set's own loader makes RGB
                pass
            case "CenterCrop":
                if self.normal:  # it pads with zeros, which are no longer black
                    return False
                self.size = sides_of(one.size)
            case "RandomCrop":
                if one.pad_if_needed or not self._pads(one):
                    return False
                self.size = sides_of(one.size)
            case "Pad":
                if not self._pads(one):
                    return False
                if self.size is not None:
                    more = 2 * (augmentations.padding_of(one) or 0)
                    self.size = (self.size[0] + more, self.size[1] + more)
            case "Resize" | "RandomResizedCrop":
                return self._resizes(one)
            case "ToTensor" | "PILToTensor":
                default = name != "ToTensor" or torch.get_default_dtype() is torch.float32
                if self.form != "pil" or not default:
                    return False
                self.form = "float32" if name == "ToTensor" else "uint8"
            case "ToImage":
                self.form = "uint8" if self.form == "pil" else self.form
                self.wrap = one
            case "ToPureTensor":
                self.wrap = None
            case "ToDtype" | "ConvertImageDtype":
                scaled = name == "ConvertImageDtype" or one.scale
                if self.form == "uint8" and one.dtype is torch.float32 and scaled:
                    self.form = "float32"
                return self.form != "pil" and one.dtype is getattr(torch, self.form)
            case "Normalize":
                mean, std = (
                    tuple(torch.as_tensor(each, dtype=torch.float64).flatten().tolist())
                    for each in (one.mean, one.std)
                )
                fits = len(mean) == len(std) == 3 and min(std) > 0
                if self.form != "float32" or self.normal or not fits:
                    return False
                self.normal = {"mean": mean, "std": std}
            case _:
                return False
        return True

    def _augments(self, name: str, one: Any) -> bool:
        if name == "RandomErasing":  # of tensors, which native code has written by then
            if self.form == "pil":
                return False
            self.augmented = "erased"
            return True
        erased = self.augmented == "erased"
        if erased or self.size is None or not augmentations.taken(name, one, self.form, self.size):
            return False
        self.augmented = "pixels"
        return True

    def _pads(self, one: Any) -> bool:
        """Whether it pads with what is still black, as much on all sides; or not at all."""
        padding = augmentations.padding_of(one)
        black = not self.normal and augmentations.pads_black(one)
        return padding == 0 or (padding is not None and padding > 0 and black)

    def _resizes(self, one: Any) -> bool:
        kernel = _FILTERS.get(getattr(one.interpolation, "value", one.interpolation))
        # Tensors are resized in the same way only where that is asked for, and by two filters.
        alike = self.form == "pil" or (
            self.form == "uint8" and one.antialias is True and kernel in {"bilinear", "bicubic"}
        )
        limited = one.size is None or getattr(one, "max_size", None) is not None
        # What was mirrored is resized to the mirrored result, but by a box, which is open at one end.
        one_sided = self.flipped and kernel == "box"
        if self.resized or kernel is None or not alike or limited or one_sided:
            return False
        self.resized, self.filter = True, kernel
        short_alone = name_of(one) == "Resize" and (isinstance(one.size, int) or len(one.size) == 1)
        self.size = None if short_alone else sides_of(one.size)
        return True


def plan_of(transform: Any) -> NativePass | str:
    """Return what native code can take over of a data set's transform; or why nothing."""
    waiting = list(_flat(transform))
    prefix, drawn, taken = _Prefix(), [], []
    while waiting and prefix.takes(name := name_of(waiting[0]), waiting[0]):
        one = waiting.pop(0)
        taken.append(label_of(one))
        if name in _GEOMETRY or name in augmentations.NAMES:
            drawn.append((name, one))
    if prefix.size is None:
        if waiting:
            return f"{label_of(waiting[0])}, which it does not know, comes before pictures have one size"
        return "the transforms give pictures of different sizes"
    images = Images(
        size=prefix.size, crop="stretch", filter=prefix.filter, exact=True, max_pixels=_PIXELS_MAX,
        dtype="float32" if prefix.form == "float32" else "uint8",
        layout="nhwc" if prefix.form == "pil" else "nchw", **prefix.normal,
    )  # fmt: skip
    return NativePass(images, drawn, prefix.form == "pil", prefix.wrap, taken, waiting)


def _flat(transform: Any) -> Iterator[Any]:
    """The transforms of Composes within one another, in their order."""
    if name_of(transform) == "Compose" or type(transform) is torch.nn.Sequential:
        for one in getattr(transform, "transforms", transform):
            yield from _flat(one)
    elif transform is not None:
        yield transform


def label_of(transform: Any) -> str:
    """A transform in `explain`: its class, and its size if it has one."""
    name = getattr(transform, "__name__", type(transform).__name__)
    if name_of(transform) == "RandomApply":
        return f"{name}({', '.join(map(label_of, transform.transforms))})"
    if name_of(transform) not in _GEOMETRY or not hasattr(transform, "size"):
        return str(name)
    height, width = sides_of(transform.size)
    return f"{name}({height})" if height == width else f"{name}({height}, {width})"


def sides_of(size: Any) -> tuple[int, int]:
    """Height and width as torchvision means them: one number, a list of one, or two."""
    sides = [size] if isinstance(size, int) else list(size)
    return int(sides[0]), int(sides[-1])


# -- several views of a picture ----------------------------------------------------------------------


class NativeViews(NamedTuple):
    """What becomes of a picture: one result, or several, as self-supervised training takes them."""

    passes: list[NativePass]
    """Of each view, in the order in which they are drawn."""
    order: list[int] | None = None
    """Which of them stands at each place of what is returned; None: there is one, and no list."""
    kind: type = list
    name: str = ""
    """Of the object that makes the views."""

    def joined(self, views: list[Any]) -> Any:
        """What the user's transform returns, of the views as they were drawn."""
        return views[0] if self.order is None else self.kind(views[i] for i in self.order)

    def __str__(self) -> str:
        texts = Counter(", ".join(each.taken) for each in self.passes)
        if self.order is None:
            return next(iter(texts))
        each = "; ".join(f"{count} by {text}" for text, count in texts.items())
        return f"{self.name}'s {len(self.passes)} views ({each})"


def views_of(transform: Any) -> NativeViews | str:
    """Return what native code can take over of a data set's transform; or why nothing.

    What an object of the user's own does with the pipelines that it holds is seen by calling a copy of it,
    with stand-ins for them and for the picture. If it asks for nothing else, draws nothing and stays as it is,
    it does the same with every picture.
    """
    flat, trial = list(_flat(transform)), _Trial()
    own = flat[0] if len(flat) == 1 and not name_of(flat[0]) else None
    copy = trial.copied(own)
    if not trial.holds or type(copy) is _StandIn:
        plan = plan_of(transform)
        return plan if isinstance(plan, str) else NativeViews([plan])
    name = label_of(own)
    before = _generators()
    try:
        result = copy(trial.picture)
        changed = not trial.is_copy(copy, own)
    except (Exception, _AskedError) as e:  # noqa: BLE001 - whatever the user's code raises
        return (
            f"{name} does more with a picture than give it to transforms ({type(e).__name__}: {e})"
        )
    finally:
        if drawn := _generators() != before:
            _generators(before)
    if drawn or changed:
        return f"{name} {'draws numbers of its own' if drawn else 'changes as it is called'}"
    several = type(result) in (list, tuple)
    order = [trial.number_of(view) for view in (result if several else [result])]
    if sorted(order) != list(range(len(trial.views))):
        return f"{name} returns something else than its transforms' results, each once, in a list"
    passes = []
    for number, (pipeline, _) in enumerate(trial.views, 1):
        plan = plan_of(pipeline)
        if isinstance(plan, str):
            return f"in view {number} of {name} {plan}"
        passes.append(plan)
    return NativeViews(passes, order if several else None, type(result), name)


def _generators(to: Any = None) -> Any:
    """The states of the generators that transforms draw from; or set them."""
    if to is not None:
        name, keys, *rest = to[2]
        torch.set_rng_state(torch.frombuffer(bytearray(to[0]), dtype=torch.uint8))
        random.setstate(to[1])
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002 - of old transforms
    numpys: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *rest = numpys
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, keys.tobytes(), *rest)


class _AskedError(BaseException):
    """A stand-in was asked for something; no `except Exception` of the user's may hide that."""


class _StandIn:
    """Stands for a picture, a view, or whatever is not known, and shows nothing of it."""

    def __getattribute__(self, name: str) -> Any:
        raise _AskedError(f"it asks for {name}")


@dataclass
class _Pipeline:
    """Stands for a pipeline: may be called with the picture's stand-in."""

    trial: _Trial
    pipeline: Any

    def __call__(self, picture: Any) -> _StandIn:
        if picture is not self.trial.picture:
            raise _AskedError("a transform gets something else")
        self.trial.views.append((self.pipeline, view := _StandIn()))
        return view


_PLAIN: Final = (type(None), bool, int, float, str, bytes, set)

_COPIED_MAX: Final = 1000
"""Of what an object holds; for the rest stands something that shows nothing."""


class _Trial:
    """A call of a copy of the user's object.

    Attributes:
        picture: what it is called with.
        views: which pipelines were called, and what they gave.
        holds: whether it holds any.
    """

    def __init__(self) -> None:
        self.picture = _StandIn()
        self.views: list[tuple[Any, _StandIn]] = []
        self.holds = False
        self._copies: dict[int, Any] = {}

    def copied(self, one: Any) -> Any:
        """A copy as deep as objects of Python's go, with stand-ins in it."""
        kind = type(one)
        if kind in _PLAIN:
            return set(one) if kind is set else one
        if id(one) in self._copies:
            return self._copies[id(one)]
        copy: Any = _StandIn()
        holds = kind in (list, tuple, dict, OrderedDict)
        if name_of(one) or kind is torch.nn.Sequential:
            copy, self.holds = _Pipeline(self, one), True
        elif len(self._copies) + (len(one) if holds else 0) > _COPIED_MAX:
            pass
        elif kind in (list, tuple):
            copy = kind(map(self.copied, one))
        elif holds:
            copy = kind((key, self.copied(value)) for key, value in one.items())
        elif hasattr(one, "__dict__"):
            try:
                copy = object.__new__(kind)
            except TypeError:  # it is more than Python shows of it
                return self._copies.setdefault(id(one), copy)
            self._copies[id(one)] = copy  # it may hold itself
            vars(copy).update((key, self.copied(value)) for key, value in vars(one).items())
        return self._copies.setdefault(id(one), copy)

    def is_copy(self, copy: Any, one: Any) -> bool:
        """Whether a copy is still what `copied` made of something."""
        if type(one) in _PLAIN:
            return type(copy) is type(one) and bool(copy == one)
        if copy is not self._copies.get(id(one)):
            return False
        if type(copy) in (_StandIn, _Pipeline):
            return True
        if isinstance(copy, (list, tuple)):
            return len(copy) == len(one) and all(map(self.is_copy, copy, one))
        ours, theirs = (copy, one) if isinstance(copy, dict) else (vars(copy), vars(one))
        return list(ours) == list(theirs) and all(map(self.is_copy, ours.values(), theirs.values()))

    def number_of(self, view: Any) -> int:
        """Which of the views something is; -1: none."""
        return next((i for i, (_, each) in enumerate(self.views) if each is view), -1)


# -- where a picture is cut ------------------------------------------------------------------------


class Cut:
    """One picture's way through what is drawn for it. Pairs are of columns and rows.

    Attributes:
        given: the cut as native code takes it.
        steps: the same in Pillow's words: methods of a picture, and what they are given.
        outside: it reaches beyond the picture, where torchvision pads, and is no window that is moved.
        augmentations: steps that native code takes afterwards, see `headrace.plane.augment`.
        erased: what torch erases of the tensor, each as `erasing_of` gives it.
    """

    def __init__(self, plan: NativePass, width: int, height: int) -> None:
        self.steps: list[tuple[str, tuple[Any, ...]]] = []
        self._size = [width, height]
        self._start, self._length = [0, 0], [width, height]
        self._resized: list[int] | None = None
        self._first = [0, 0]
        self._flip = [0, 0]
        self.augmentations: list[list[float]] = []
        self.erased: list[tuple[int, int, int, int, Any]] = []
        for name, one in plan.drawn:
            self._take(plan, name, one)
        whole, moved = [width, height], self._moved_inside([width, height])
        resized = self._resized or self._length
        self.outside = any(
            start < 0 or start + length > side
            for start, length, side in (
                *zip(self._start, self._length, whole, strict=True),
                *zip(self._first, self._size, resized, strict=True),
            )
        )
        self.given = [
            *whole, *self._start, *self._length, *resized, *self._first, *self._flip,
        ]  # fmt: skip
        if any(moved) and not self.outside:
            self.augmentations.insert(0, [Op.AFFINE, 1, 0, moved[0], 0, 1, moved[1]])

    def _moved_inside(self, whole: list[int]) -> list[int]:
        """Move a window that reaches beyond the picture back into it.

        Returns:
            How far what is cut has to be moved again, once it was mirrored.
        """
        begin, sides = (
            (self._start, whole) if self._resized is None else (self._first, self._resized)
        )
        if any(part > side for part, side in zip(self._size, sides, strict=True)):
            return [0, 0]
        moved = []
        for axis, (part, side) in enumerate(zip(self._size, sides, strict=True)):
            inside = min(max(begin[axis], 0), side - part)
            moved.append((begin[axis] - inside) * (-1 if self._flip[axis] else 1))
            begin[axis] = inside
        return moved

    def _take(self, plan: NativePass, name: str, one: Any) -> None:
        """Draw what a transform draws, and do to the pairs what it would do to the picture."""
        width, height = self._size
        if name in _FLIPS:
            if bool(torch.rand(1) < one.p):
                self._mirror(_FLIPS[name])
        elif name == "Resize":
            self._resize(plan, _resized(one.size, width, height))
        elif name == "CenterCrop":
            rows, columns = sides_of(one.size)
            self._crop(_middle(width, columns), _middle(height, rows), columns, rows)
        elif name == "Pad":
            padding = augmentations.padding_of(one) or 0
            self._crop(-padding, -padding, width + 2 * padding, height + 2 * padding)
        elif name == "RandomErasing":
            if (erased := augmentations.erasing_of(one, width, height)) is not None:
                self.erased.append(erased)
        elif name in augmentations.NAMES:
            self.augmentations += augmentations.steps_of(name, one, width, height)
        else:
            top, left, rows, columns = augmentations.crop_of(name, one, width, height)
            self._crop(left, top, columns, rows)
            if name == "RandomResizedCrop":
                self._resize(plan, sides_of(one.size)[::-1])

    def _mirror(self, axis: int) -> None:
        # What looks at pixels one by one, or at all alike, may as well come after a flip.
        if any(step[0] in _MOVING for step in self.augmentations):
            width, height = self._size
            numbers = ([-1, 0, width, 0, 1, 0], [1, 0, 0, 0, -1, height])[axis]
            self.augmentations.append([Op.AFFINE, *numbers])
        else:
            self._flip[axis] ^= 1
            self.steps.append(("transpose", (axis,)))

    def _crop(self, left: int, top: int, columns: int, rows: int) -> None:
        begin = self._start if self._resized is None else self._first
        for axis, (start, length) in enumerate(((left, columns), (top, rows))):
            # Where the picture was mirrored before, the cut lies at the other end.
            begin[axis] += self._size[axis] - start - length if self._flip[axis] else start
        self._size = [columns, rows]
        if self._resized is None:
            self._length = [columns, rows]
        self.steps.append(("crop", ((left, top, left + columns, top + rows),)))

    def _resize(self, plan: NativePass, size: tuple[int, int]) -> None:
        self._resized, self._size = list(size), list(size)
        self.steps.append(("resize", (size, _FILTERS_OF_PILLOW[plan.images.filter])))


_FILTERS_OF_PILLOW: Final = {name: value for value, name in _FILTERS.items() if value != name}


def _resized(size: Any, width: int, height: int) -> tuple[int, int]:
    """Width and height after a Resize; of one that names the short side, the long one is cut off to a pixel."""
    if not isinstance(size, int) and len(size) == 2:
        return int(size[1]), int(size[0])
    short = sides_of(size)[0]
    long = int(short * max(width, height) / min(width, height))
    return (short, long) if width <= height else (long, short)


def _middle(side: int, part: int) -> int:
    """Where a CenterCrop begins; negative where it pads."""
    return -((part - side) // 2) if part > side else round((side - part) / 2.0)
