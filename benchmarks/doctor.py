"""The doctor's predictions beside loaders that run, on real images.

    python -m benchmarks.doctor                  # some minutes
    python -m benchmarks.doctor --only png-hot   # one case
    python -m benchmarks.doctor --rounds 3

Each case is a folder and a state of it. The doctor examines it; then torch's DataLoader and headrace's
run over it, with a data set that opens, decodes and scales as the doctor takes it to. What is printed is
the ratio of the predicted to the real rate, and at the end how far off the predictions are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import io
import json
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import headrace
from benchmarks import machine
from benchmarks.processes import leaving_nothing
from headrace.insight.doctor import ExamineOptions, diagnose, examine
from headrace.insight.doctor.findings import AHEAD, TORCH, Diagnosis, Findings
from headrace.testing import SlowVolume, simulated_files
from headrace.torch import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIPART = Path("/usr/share/openclipart/png")
SIDE = 224
BATCH = 32
PIXELS_MAX = 4_000_000


@dataclass(frozen=True)
class Case:
    """A data set and its state."""

    name: str
    data: str
    cold: bool = False
    simulate: str | None = None
    workers: tuple[int, ...] = (0, 2)
    note: str = ""


CASES = (
    Case("png-hot", "png", note="clip art as it is, in the page cache"),
    Case("jpeg-hot", "jpeg", note="the same as JPEG, in the page cache"),
    Case("jpeg-cold", "jpeg", cold=True, note="the same, put out of it"),
    Case("bytes-cold", "bytes", cold=True, workers=(0, 2, 4), note="200 kB files, not decoded"),
    Case("jpeg-lustre", "jpeg", simulate="lustre", workers=(0, 2, 4), note="simulated"),
    Case("jpeg-nfs", "jpeg", simulate="nfs", workers=(0, 2), note="simulated"),
    Case("bytes-lustre", "bytes", simulate="lustre", workers=(0, 2, 8), note="simulated"),
    Case("bytes-hdd", "bytes", simulate="hdd", workers=(0, 2), note="simulated"),
)


class Images(Dataset[torch.Tensor]):
    """As the doctor takes a data set of images to be."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.paths[index], "rb") as file:  # noqa: PTH123
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
        scaled = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(scaled))


class Bytes(Dataset[torch.Tensor]):
    """Files that are delivered as they are."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.paths[index], "rb") as file:  # noqa: PTH123
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def folders(work: Path, images: int) -> dict[str, Path]:
    """The data sets; what is there already is kept."""
    work.mkdir(parents=True, exist_ok=True)
    found = {"jpeg": work / "jpeg", "bytes": work / "bytes", "png": work / "png"}
    dice = random.Random(0)
    sources = sorted(p for p in CLIPART.rglob("*.png") if not p.is_symlink())
    dice.shuffle(sources)
    sources = [p for p in sources[: 2 * images] if _usable(p)][:images]
    if not sources:
        sys.exit(f"{CLIPART} has no images: install Debian's openclipart-png")
    if not found["png"].exists():
        _fill(found["png"], images, lambda i: sources[i % len(sources)].read_bytes(), ".png")
    if not found["jpeg"].exists():
        _fill(found["jpeg"], images, lambda i: _as_jpeg(sources[i % len(sources)], dice), ".jpg")
    if not found["bytes"].exists():
        _fill(found["bytes"], images, lambda _: os.urandom(200_000), ".bin")
    return found


def _usable(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.width * image.height <= PIXELS_MAX
    except (OSError, ValueError, Image.DecompressionBombError):
        return False


def _fill(folder: Path, count: int, content: Callable[[int], bytes], suffix: str) -> None:
    new = folder.with_suffix(".new")
    for i in range(count):
        (new / f"{i % 10}").mkdir(parents=True, exist_ok=True)
        (new / f"{i % 10}" / f"{i:06d}{suffix}").write_bytes(content(i))
    new.rename(folder)


def _as_jpeg(path: Path, dice: random.Random) -> bytes:
    """As large as photographs in data sets are."""
    image = Image.open(path).convert("RGB")
    side = dice.choice((375, 500, 640))
    out = io.BytesIO()
    image.resize((side, side * 3 // 4)).save(out, "JPEG", quality=90)
    return out.getvalue()


def prepare(paths: list[str], *, cold: bool) -> None:
    """All of it out of the page cache, or in it."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        if cold:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(fd, 1 << 20):
                pass
        os.close(fd)


@contextlib.contextmanager
def slowed(case: Case, folder: Path) -> Iterator[None]:
    if case.simulate is None:
        yield
    else:
        with simulated_files(SlowVolume(case.simulate), folder):
            yield


def real_rate(loader: object, seconds: float) -> float:
    """Samples a second, workers' start left out: from the first batch to the last."""
    count, begun = 0, 0.0
    for batch in loader:  # type: ignore[attr-defined]
        now = time.perf_counter()
        if not begun:
            begun = now
        else:
            count += len(batch)
            if now - begun > seconds:
                break
    return count / (time.perf_counter() - begun)


def run_case(case: Case, folder: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    paths = [str(p) for p in folder.glob("*/*")]
    dataset = (Bytes if case.data == "bytes" else Images)(paths)
    prepare(paths, cold=case.cold)
    found = examine(folder, ExamineOptions(seconds=options.doctor_seconds, simulate=case.simulate))
    rows = []
    for workers in case.workers:
        told = diagnose(found, batch=BATCH, workers=workers)
        for name, make in ((TORCH, TorchLoader), (AHEAD, DataLoader)):
            expected = next(e for e in told.expected if e.loader == name and not e.when)
            rates = []
            for _ in range(options.rounds):
                prepare(paths, cold=case.cold)
                with slowed(case, folder):
                    loader = make(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
                    rates.append(real_rate(loader, options.seconds))
                    del loader
            real = sorted(rates)[len(rates) // 2]
            rows.append(
                {"case": case.name, "loader": name, "workers": workers, "predicted": expected.per_s,
                 "real": real, "ratio": expected.per_s / real, "cause": expected.cause,
                 "others": found.cpu.others if found.cpu else None, "notes": found.notes}
            )  # fmt: skip
            print(
                f"{case.name:<13} {name:<26} {workers} workers: predicted {expected.per_s:9,.0f}/s "
                f"real {real:9,.0f}/s  x {expected.per_s / real:5.2f}  {expected.cause}",
                flush=True,
            )
        rows += native_rows(case, folder, found, told, workers, options)
    return rows


def native_rows(
    case: Case,
    folder: Path,
    found: Findings,
    told: Diagnosis,
    workers: int,
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    """What the advice to decode natively promises beside what it brings; none where it is not given."""
    advice = [each for each in told.advice if each.key == "images"]
    if not advice or case.simulate or advice[0].factor is None:
        return []
    torchs = next(e for e in told.expected if e.loader == TORCH and not e.when)
    predicted = advice[0].factor * torchs.per_s
    rates = []
    for _ in range(options.rounds):
        prepare([str(p) for p in folder.glob("*/*")], cold=case.cold)
        loader = DataLoader(
            folder, batch_size=BATCH, shuffle=True, decode=headrace.Images(size=SIDE)
        )
        rates.append(real_rate((pixels for pixels, _ in loader), options.seconds))
        loader.close()
    real = sorted(rates)[len(rates) // 2]
    print(
        f"{case.name:<13} {'headrace.Images':<26} {workers} workers: predicted {predicted:9,.0f}/s "
        f"real {real:9,.0f}/s  x {predicted / real:5.2f}  advice {told.advice.index(advice[0]) + 1}",
        flush=True,
    )
    return [
        {"case": case.name, "loader": "headrace.Images", "workers": workers, "predicted": predicted,
         "real": real, "ratio": predicted / real, "cause": torchs.cause,
         "others": found.cpu.others if found.cpu else None, "notes": found.notes}
    ]  # fmt: skip


@leaving_nothing()
def main() -> None:
    warnings.simplefilter("ignore")  # Pillow's, about old images
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build/bench/doctor"))
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run of a loader")
    parser.add_argument("--doctor-seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    data = folders(options.dir, options.images)
    before = machine.describe(options.dir)
    rows: list[dict[str, object]] = []
    for case in CASES:
        if not options.only or case.name in options.only:
            rows += run_case(case, data[case.data], options)
    errors = np.abs(np.log([float(str(row["ratio"])) for row in rows]))
    print(
        f"\n{len(rows)} predictions: off by a factor of {np.exp(np.median(errors)):.2f} in the middle, "
        f"{np.exp(np.percentile(errors, 90)):.2f} at the 90th percentile, {np.exp(errors.max()):.2f} at "
        f"most; load {os.getloadavg()[0]:.1f}, before {before['load_before']}"
    )
    if not options.only:
        day = dt.datetime.now(tz=dt.UTC).date()
        path = options.out / f"doctor-{day}.json"
        given = {k: str(v) for k, v in vars(options).items()}
        cases = [dataclasses.asdict(case) for case in CASES]
        document = {"machine": before, "options": given, "cases": cases, "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
