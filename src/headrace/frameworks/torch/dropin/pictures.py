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
from headrace.frameworks.torch.dropin.transforms import Cut, NativePass, label_of, plan_of

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
    elif not all(hasattr(folder, name) for name in ("samples", "transform", "target_transform")):
        why = "has no samples, transform and target_transform as torchvision's ImageFolder has them"
    elif getattr(get, "__module__", "") != _FOLDER or hasattr(kind, "__getitems__"):
        why = "makes its samples by a __getitem__ that is not torchvision's"
    elif getattr(loader, "__module__", "") != _FOLDER or getattr(loader, "__name__", "") not in (
        "default_loader",
        "pil_loader",
    ):
        why = f"loads its files by {getattr(loader, '__qualname__', loader)}"
    if why is not None:
        raise ValueError(
            f'decode="native": the data set is a {kind.__qualname__}, which {why}. Give torchvision\'s '
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
        self._recipe: tuple[Images, _native.PictureRecipe] | None = None
        self._pool: _native.DecodePool | None = None
        self._pid = 0
        self._after_draws = False
        self._fallbacks = 0

    @property
    def plan(self) -> NativePass | str:
        """What native code does, or why nothing. Anew each time: transforms may be changed between batches."""
        return plan_of(self._folder.transform)

    def explain(self, num_workers: int) -> str:
        """One line: what was taken over, and what was not."""
        plan = self.plan
        if isinstance(plan, str):
            return f'decode="native": off, because {plan}; torch decodes as before'
        threads = _threads(num_workers)
        count = f"{threads} native thread{'s' if threads > 1 else ''}"
        where = f"{num_workers} workers, {count} each" if num_workers else count
        text = f'decode="native": {", ".join(plan.taken)} run in {where}'
        if plan.after:
            runs = "runs" if len(plan.after) == 1 else "run"
            text += f"; {', '.join(map(label_of, plan.after))} {runs} after them in Python"
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
        samples: list[Any] = []
        while len(samples) < len(sources):
            rest = sources[len(samples) :]
            samples += self._made(plan, rest[:1] if self._after_draws else rest)
        if failure is not None:
            raise failure
        return samples

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

    def _made(self, plan: NativePass, sources: list[_Source]) -> list[Any]:
        """Make the first samples of these, at least one.

        All are drawn before the first is decoded. Where something that runs in Python afterwards draws from
        the same generator, what was drawn for the next ones is void: they are drawn again, and from then on
        one after the other.
        """
        states, cuts = [torch.get_rng_state()], []
        for source in sources:
            try:
                cuts.append(Cut(plan, *source.size))
            except Exception:
                if not cuts:
                    raise
                torch.set_rng_state(states[-1])  # its turn comes when those before it were made
                break
            states.append(torch.get_rng_state())
        job = self._decoded(plan, sources, cuts)
        refused = {i: reason for i, reason, _ in job.failures}
        pixels = job.pixels.view(plan.images.numpy_dtype).reshape(-1, *plan.images.shape)
        tensors = () if plan.pil else torch.from_numpy(pixels).unbind()
        samples: list[Any] = []
        serial = bool(plan.after) or self._folder.target_transform is not None
        for i, cut in enumerate(cuts):
            if i in refused:
                try:
                    job.replace(i, self._loaded(sources[i], cut, refused[i]))
                except Exception:
                    torch.set_rng_state(states[i])  # torch draws for a picture once it was loaded
                    raise
            if serial:
                torch.set_rng_state(states[i + 1])
            sample = _picture(pixels[i]) if plan.pil else tensors[i]
            for top, left, rows, columns, value in cut.erased:
                sample[..., top : top + rows, left : left + columns] = value
            samples.append((self._finished(plan, sample), self._target(sources[i].target)))
            if serial and not torch.equal(torch.get_rng_state(), states[i + 1]):
                self._after_draws = True
                break
        return samples

    def _finished(self, plan: NativePass, sample: Any) -> Any:
        if plan.wrap is not None:
            sample = plan.wrap(sample)
        for transform in plan.after:
            sample = transform(sample)
        return sample

    def _target(self, target: Any) -> Any:
        transform = self._folder.target_transform
        return target if transform is None else transform(target)

    def _decoded(
        self, plan: NativePass, sources: list[_Source], cuts: list[Cut]
    ) -> _native.DecodeJob:
        if self._recipe is None or self._recipe[0] != plan.images:
            self._recipe = plan.images, plan.images.recipe()
        recipe = self._recipe[1]
        if self._pool is None or self._pid != os.getpid():
            info = torch_data.get_worker_info()
            kept = 4 * len(cuts) * recipe.output_bytes
            self._pool = _native.DecodePool(_threads(0 if info is None else info.num_workers), kept)
            self._pid = os.getpid()
        _, height, width = plan.images.planes
        whole = [*(width, height), 0, 0, *(width, height) * 2, 0, 0, 0, 0]
        encoded = tuple(
            b"" if cut.outside else source.encoded
            for source, cut in zip(sources, cuts, strict=False)
        )
        given = np.array([whole if cut.outside else cut.given for cut in cuts], np.int32)
        most = max(len(cut.augmentations) for cut in cuts)
        steps = np.zeros((len(cuts), most, 7)) if most else None
        for i, cut in enumerate(cuts):
            if cut.augmentations and steps is not None:
                steps[i, : len(cut.augmentations)] = cut.augmentations
        begun_s = time.perf_counter()
        job = self._pool.submit_given(recipe, encoded, given, steps)
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
        picture = source.loaded or self._load(source.path, reason)
        if cut.outside:
            for method, arguments in cut.steps:
                picture = getattr(picture, method)(*arguments)
        else:
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
        return {**self.__dict__, "_recipe": None, "_pool": None}


def _threads(num_workers: int) -> int:
    """Of each process that fetches: its share of the processors."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))


def _picture(pixels: Any) -> Any:
    from PIL import Image  # what comes out is a picture of Pillow's: it is there

    return Image.fromarray(pixels)
