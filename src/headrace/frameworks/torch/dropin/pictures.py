"""Pictures: `decode="native"` over torchvision's ImageFolder and its transforms, which stay the user's objects.

`NativePictures` stands where torch fetches samples. Random numbers are drawn by torchvision's own functions
(`transforms.Cut`), from the generator that torch uses in the process that fetches: crops and flips are torch's.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils import data as torch_data

from headrace import _native
from headrace.frameworks.torch.dropin.transforms import (
    Cut,
    NativePass,
    NativeViews,
    label_of,
    views_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.plane.images import Images

log = logging.getLogger("headrace.torch")

_FOLDER: Final = "torchvision.datasets.folder"


def folder_of(dataset: Any) -> Any:
    """Return the ImageFolder (or DatasetFolder) that a data set is, or is a Subset of.

    Raises:
        ValueError: it is none, or one that makes its samples in a way of its own; says what to do.
    """
    folder = dataset
    while type(folder) is torch_data.Subset:
        folder = folder.dataset
    kind, loader = type(folder), getattr(folder, "loader", None)
    get = getattr(kind, "__getitem__", None)
    why = None
    if isinstance(folder, torch_data.IterableDataset):
        why = "is iterable"
    elif getattr(get, "__module__", "") != _FOLDER or hasattr(kind, "__getitems__"):
        why = "makes its samples by a __getitem__ that is not torchvision's"
    elif not all(hasattr(folder, name) for name in ("samples", "transform", "target_transform")):
        why = "has no samples, transform and target_transform as torchvision's ImageFolder has them"
    elif getattr(loader, "__module__", "") != _FOLDER or getattr(loader, "__name__", "") not in (
        "default_loader",
        "pil_loader",
    ):
        why = f"loads its files by {getattr(loader, '__qualname__', loader)}"
    if why is not None:
        raise ValueError(
            f'decode="native": the data set, {kind.__qualname__}, {why}. Give torchvision\'s '
            "ImageFolder or DatasetFolder with its default loader, or a torch Subset of one; or pack the "
            "pictures (headrace.pack) and give the store, with decode=headrace.Images(...); or leave "
            "decode= out."
        )
    return folder


# -- samples ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Source:
    """One sample that was read."""

    path: str
    target: Any
    encoded: bytes
    size: tuple[int, int]
    loaded: Any = None
    """The picture by the data set's own loader, where native code cannot read the header."""


_View = tuple[_Source, NativePass]
"""A picture, and what becomes of it."""


class NativePictures:
    """A data set of pictures as torch's fetcher sees it. Made for one process, or pickled to it.

    Attributes:
        dataset: the user's.
        waited_s: how long the fetching thread has waited for threads that decode.
        cpu_s: their processor time.

    Raises:
        ValueError: the data set is not recognised.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.waited_s = self.cpu_s = 0.0
        self._folder = folder_of(dataset)
        self._recipes: dict[Images, _native.PictureRecipe] = {}
        self._pool: _native.DecodePool | None = None
        self._pid = 0
        self._after_draws = False
        self._fallbacks = 0

    @property
    def plan(self) -> NativeViews | str:
        """What native code does, or why nothing. Anew each time: transforms may be changed between batches."""
        return views_of(self._folder.transform)

    def explain(self, num_workers: int) -> str:
        """One line: what was taken over, and what was not."""
        plan = self.plan
        if isinstance(plan, str):
            return f'decode="native": off, because {plan}; torch decodes as before'
        threads = _threads(num_workers)
        count = f"{threads} native thread{'s' if threads > 1 else ''}"
        where = f"{num_workers} workers, {count} each" if num_workers else count
        after = list(dict.fromkeys(label_of(one) for each in plan.passes for one in each.after))
        text = f'decode="native": {plan} run in {where}'
        if after:
            runs = "runs" if len(after) == 1 else "run"
            text += f"; {', '.join(after)} {runs} after them in Python"
        return text

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Return the samples of a batch; an error is raised where, and as, the data set would raise it."""
        plan = self.plan
        if isinstance(plan, str):
            return [self.dataset[index] for index in indices]
        sources: list[_Source] = []
        failure = None
        try:
            for index in indices:
                sources.append(self._read(index))  # noqa: PERF401 - those before an error count
        except Exception as e:  # noqa: BLE001 - raised once the samples before it were made
            failure = e
        made: list[Any] = []
        targets: list[Any] = []
        each, todo = len(plan.passes), [(source, one) for source in sources for one in plan.passes]
        while (begin := len(made)) < len(todo):
            alone = self._after_draws or begin % each
            self._make(todo[begin : begin + 1] if alone else todo[begin:], each, made, targets)
        if failure is not None:
            raise failure
        return [
            (plan.joined(made[i * each : (i + 1) * each]), target)
            for i, target in enumerate(targets)
        ]

    def _read(self, index: Any) -> _Source:
        dataset = self.dataset
        while type(dataset) is torch_data.Subset:
            index, dataset = dataset.indices[index], dataset.dataset
        path, target = dataset.samples[index]
        with open(path, "rb") as f:  # noqa: PTH123 - as torchvision opens it, which read-ahead serves
            encoded = f.read()
        size = _native.picture_size(encoded)
        if size is not None:
            return _Source(path, target, encoded, size)
        picture = self._load(path, "its header cannot be read")
        return _Source(path, target, encoded, picture.size, picture)

    def _make(self, todo: list[_View], each: int, made: list[Any], targets: list[Any]) -> None:
        """Make the first of these views, at least one; all `each` of a picture, if there are so many.

        All are drawn before the first is decoded. Where something that runs in Python afterwards draws from
        the same generator, what was drawn for the next ones is void: they are drawn again, and from then on
        one after the other.
        """
        cuts, states = _drawn(todo, each)
        across = each if len(cuts) % each == 0 else 1
        job = self._decoded(todo, cuts, across)
        refused = {i: reason for i, reason, _ in job.failures}
        outputs = [
            job.output(k).view(plan.images.numpy_dtype).reshape(-1, *plan.images.shape)
            for k, (_, plan) in enumerate(todo[:across])
        ]
        serial = self._folder.target_transform is not None or any(plan.after for _, plan in todo)
        for i, (cut, (source, plan)) in enumerate(zip(cuts, todo, strict=False)):
            picture, k = divmod(i, across)
            if picture in refused:
                views = cuts[picture * across : (picture + 1) * across]
                reason = "" if any(each.outside for each in views) else refused[picture]
                try:
                    job.replace(picture, self._loaded(source, cut, reason), k)
                except Exception:
                    torch.set_rng_state(states[i])  # torch draws for a picture once it was loaded
                    raise
            if serial:
                torch.set_rng_state(states[i + 1])
            pixels = outputs[k][picture]
            sample: Any = torch.from_numpy(pixels)
            if plan.pil:
                from PIL import Image  # what comes out is a picture of Pillow's: it is there

                sample = Image.fromarray(pixels)
            for top, left, rows, columns, value in cut.erased:
                sample[..., top : top + rows, left : left + columns] = value
            made.append(self._finished(plan, sample))
            if len(made) % each == 0:
                transform = self._folder.target_transform
                targets.append(source.target if transform is None else transform(source.target))
            if serial and not torch.equal(torch.get_rng_state(), states[i + 1]):
                self._after_draws = True
                break

    def _finished(self, plan: NativePass, sample: Any) -> Any:
        if plan.wrap is not None:
            sample = plan.wrap(sample)
        for transform in plan.after:
            sample = transform(sample)
        return sample

    def _decoded(self, todo: list[_View], cuts: list[Cut], across: int) -> _native.DecodeJob:
        """Have the views of pictures decoded, `across` of each."""
        images = [plan.images for _, plan in todo[:across]]
        for each in images:
            if each not in self._recipes:
                self._recipes[each] = each.recipe()
        recipes = [self._recipes[each] for each in images]
        if self._pool is None or self._pid != os.getpid():
            info = torch_data.get_worker_info()
            kept = 4 * len(cuts) // across * sum(recipe.output_bytes for recipe in recipes)
            self._pool = _native.DecodePool(_threads(0 if info is None else info.num_workers), kept)
            self._pid = os.getpid()
        encoded, given = [], []
        for i in range(0, len(cuts), across):
            source, views = todo[i][0], cuts[i : i + across]
            # Nothing of a picture is decoded here if a view of it reaches beyond it.
            encoded.append(b"" if any(cut.outside for cut in views) else source.encoded)
        for i, cut in enumerate(cuts):
            _, height, width = images[i % across].planes
            whole = [*(width, height), 0, 0, *(width, height) * 2, 0, 0, 0, 0]
            given.append(whole if cut.outside else cut.given)
        most = max(len(cut.augmentations) for cut in cuts)
        steps = np.zeros((len(cuts), most, 7)) if most else None
        for i, cut in enumerate(cuts):
            if cut.augmentations and steps is not None:
                steps[i, : len(cut.augmentations)] = cut.augmentations
        begun_s = time.perf_counter()
        job = self._pool.submit_given(recipes, tuple(encoded), np.array(given, np.int32), steps)
        while not job.wait(1.0):  # signals are handled in between
            pass
        self.waited_s += time.perf_counter() - begun_s
        self.cpu_s += job.times[3]
        return job

    def _loaded(self, source: _Source, cut: Cut, reason: str) -> Any:
        """What native code did not decode, by the data set's own loader, which may raise anything.

        Returns:
            uint8, shape (height, width, 3): the picture; or, where it is padded, what is cut out of it.
        """
        source.loaded = picture = source.loaded or self._load(source.path, reason)
        if cut.outside:
            for method, arguments in cut.steps:
                picture = getattr(picture, method)(*arguments)
        elif reason:
            self._fallbacks += 1
            if self._fallbacks == 1:
                log.warning(
                    'decode="native": Pillow decodes what headrace\'s own decoders do not, %s first (%s)',
                    source.path, reason,
                )  # fmt: skip
        return np.ascontiguousarray(np.asarray(picture, np.uint8))

    def _load(self, path: Any, reason: str) -> Any:
        try:
            return self._folder.loader(path)
        except Exception as e:
            e.add_note(f"headrace could not decode {path} either: {reason}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recipes": {}, "_pool": None}


def _drawn(todo: list[_View], each: int) -> tuple[list[Cut], list[Any]]:
    """Draw for views; returns, too, where the generator stood before the first and after each.

    What cannot be drawn has its turn when those before it were made: whole pictures, or the first view.
    """
    cuts: list[Cut] = []
    states = [torch.get_rng_state()]
    for source, plan in todo:
        try:
            cuts.append(Cut(plan, *source.size))
        except Exception:
            if not cuts:
                raise
            del cuts[len(cuts) // each * each or 1 :]
            torch.set_rng_state(states[len(cuts)])
            break
        states.append(torch.get_rng_state())
    return cuts, states


def _threads(num_workers: int) -> int:
    """Of each process that fetches: its share of the processors."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))
