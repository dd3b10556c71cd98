"""One run: one engine, one data set, cold or hot, in a fresh process. Prints one JSON line.

python -m benchmarks.run_one --engine lmdb --dataset A --cache hot --seconds 3 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks import cache, datasets, forms, limits, loaders
from benchmarks.processes import Memory, MemorySampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.cache import Temperature
    from benchmarks.datasets import DataSet

ROOT = Path(__file__).resolve().parents[1]

IMPORT_TIMEOUT_S = 120
SLACK_S = 120
"""A run may overstep its cap by one batch: a cold batch of a slow engine takes seconds."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What to run."""

    engine: str
    data: DataSet
    temperature: Temperature
    seed: int
    cap_samples: int
    cap_seconds: float
    root: Path

    @property
    def form(self) -> str:
        """The form that the engine reads; engines of tests (`module:Class`) read files."""
        if self.engine.startswith(limits.PREFIX):
            return "packed"
        return loaders.FORMS.get(self.engine, "files")


@dataclass(slots=True)
class Run:
    """What came of it. `error`: it did not run. `wrong`: it delivered something wrong."""

    engine: str
    dataset: str
    temperature: Temperature
    seed: int
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    samples_per_s: float = 0.0
    cpu_s: float = 0.0
    cpu_s_per_gb: float = 0.0
    machine_cpu_s: float = 0.0
    open_s: float = 0.0
    first_batch_s: float = 0.0
    private_mb: float = 0.0
    mapped_mb: float = 0.0
    memory_samples: int = 0
    resident_before: float | None = None
    resident_after: float | None = None
    complete: bool = False
    wrong: str | None = None
    error: str | None = None
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether its figures may be compared with others."""
        return self.error is None and self.wrong is None and self.samples > 0


class RunFailedError(Exception):
    """The engine's process died, hung or could not import."""


class _Child:
    """The engine's process and the two pipes to it."""

    def __init__(self, command: Sequence[str], output: IO[bytes]) -> None:
        orders_read, orders_write = os.pipe()
        reports_read, reports_write = os.pipe()
        self._output = output
        self.process = subprocess.Popen(
            [*command, "--orders", str(orders_read), "--reports", str(reports_write)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,  # where `-m benchmarks...` is found
            pass_fds=(orders_read, reports_write),
            start_new_session=True,  # so that its workers can be ended with it
        )
        os.close(orders_read)
        os.close(reports_write)
        self._orders = os.fdopen(orders_write, "w")
        self._reports = os.fdopen(reports_read)

    def send(self, order: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(order, file=self._orders, flush=True)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        # Each message is one line, written at once: readable means a whole line, or the end.
        ready, _, _ = select.select([self._reports], [], [], timeout_s)
        line = self._reports.readline() if ready else ""
        if line:
            message: dict[str, Any] = json.loads(line)
            return message
        what = "ended" if ready else f"said nothing for {timeout_s:.0f} s"
        raise RunFailedError(f"the engine's process {what}: {self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the traceback comes after the end
            self.process.wait(timeout=5)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._reports.close()


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[_Child]:
    with tempfile.TemporaryFile() as output:
        child = _Child(command, output)
        try:
            yield child
        finally:
            child.end()


_WARM_PASSES_MAX = 4
_WARM_ENOUGH = 0.9995


def _prepare(spec: RunSpec, paths: list[Path]) -> None:
    if spec.temperature == "cold":
        cache.drop()
    else:
        # What was read first may have been reclaimed when the last was read.
        for _ in range(_WARM_PASSES_MAX):
            cache.warm(paths)
            if (cache.resident_fraction(paths) or 0.0) >= _WARM_ENOUGH:
                break


def run(spec: RunSpec) -> Run:
    """Runs `spec`; what goes wrong with the engine is in the result, not raised."""
    result = Run(spec.engine, spec.data.name, spec.temperature, spec.seed)
    path = forms.form_path(spec.root, spec.data, spec.form)
    paths = cache.files_of_run(spec.data, spec.form, path, spec.seed, spec.cap_samples)
    try:
        if spec.engine.startswith(limits.PREFIX):
            _run_limit(spec, path, paths, result)
        else:
            _run_loader(spec, path, paths, result)
    except (RunFailedError, limits.NoProbeError) as error:
        result.error = str(error)
        return result
    if result.seconds > 0 and result.bytes:
        # A cold run begins with opening: some read all of the data then.
        opening_s = result.open_s if spec.temperature == "cold" else 0.0
        result.samples_per_s = result.samples / (result.seconds + opening_s)
        result.cpu_s_per_gb = result.cpu_s / (result.bytes / 1e9)
    result.resident_after = cache.resident_fraction(paths)
    return result


def _run_loader(spec: RunSpec, path: Path, paths: list[Path], result: Run) -> None:
    command = [loaders.interpreter(spec.engine), "-m", "benchmarks.engine_process"]
    options = {
        "engine": spec.engine,
        "dataset": spec.data.name,
        "path": path,
        "samples": spec.data.samples,
        "batch": spec.data.batch_size,
        "seed": spec.seed,
        "cap-samples": spec.cap_samples,
        "cap-seconds": spec.cap_seconds,
        # The first round looks at every sample, the others at every eighth: see `Checker`.
        "check-every": 1 if spec.seed == 1 else 8,
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with _child(command) as child:
        child.receive(IMPORT_TIMEOUT_S)
        _prepare(spec, paths)
        result.resident_before = cache.resident_fraction(paths)
        sampler = MemorySampler(child.process.pid)
        try:
            child.send("go")
            report = child.receive(spec.cap_seconds + SLACK_S)
        finally:
            peak = sampler.stop()
        if report["event"] == "measured":  # a wrong delivery ends the run before
            child.send("account")
            report = child.receive(SLACK_S)
    _note_memory(result, peak, sampler.taken)
    for name, value in report.items():
        if name != "event":
            setattr(result, name, value)


def _note_memory(result: Run, peak: Memory, taken: int) -> None:
    result.private_mb, result.mapped_mb = peak.private_mb, peak.mapped_mb
    result.memory_samples = taken


def _run_limit(spec: RunSpec, path: Path, paths: list[Path], result: Run) -> None:
    caps = (spec.cap_samples, spec.cap_seconds)
    command = limits.command(spec.engine, path, spec.data, spec.seed, caps)
    _prepare(spec, paths)
    result.resident_before = cache.resident_fraction(paths)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        sampler = MemorySampler(process.pid)
        try:
            out, err = process.communicate(timeout=spec.cap_seconds + SLACK_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise RunFailedError(f"{' '.join(command)}: took over {error.timeout:.0f} s") from error
        finally:
            peak = sampler.stop()
    if process.returncode:
        raise RunFailedError(f"{' '.join(command)}: {err.strip() or process.returncode}")
    _note_memory(result, peak, sampler.taken)
    report = json.loads(out.splitlines()[-1])
    result.samples, result.bytes = report["samples"], report["bytes"]
    result.seconds, result.cpu_s = report["seconds"], report["cpu_seconds"]
    result.first_batch_s = report.get("first_batch_s", 0.0)
    result.facts = report


def numpy_baseline() -> Memory:
    """What a process holds that has done `import numpy` and nothing else."""
    script = "import numpy, sys; print(flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return MemorySampler(process.pid).stop()


def parse(arguments: Sequence[str] | None = None) -> RunSpec:
    """The command line as a `RunSpec`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_one", description=__doc__)
    parser.add_argument("--engine", required=True, help=", ".join(loaders.LOADERS))
    parser.add_argument("--dataset", choices=datasets.NAMES, required=True)
    parser.add_argument("--cache", choices=("hot", "cold"), required=True)
    parser.add_argument("--samples", type=int, default=0, help="cap; 0: one epoch")
    parser.add_argument("--seconds", type=float, default=3.0, help="cap")
    parser.add_argument("--batch", type=int, default=0, help="0: the data set's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    options = parser.parse_args(arguments)
    data = datasets.data_set(options.dataset, options.scale)
    if options.batch:
        data = datasets.DataSet(data.name, data.samples, options.batch)
    return RunSpec(
        engine=options.engine,
        data=data,
        temperature=options.cache,
        seed=options.seed,
        cap_samples=min(options.samples or data.samples, data.samples),
        cap_seconds=options.seconds,
        root=options.dir.resolve(),
    )


def main() -> int:
    spec = parse()
    forms.ensure(spec.root, spec.data, spec.form)
    started = time.monotonic()
    result = run(spec)
    print(json.dumps({**asdict(result), "run_s": round(time.monotonic() - started, 2)}))
    return 0 if result.usable else 1


if __name__ == "__main__":
    sys.exit(main())
