"""Runs the real DLIO as its command line does, and notes how long generation and each epoch took.

    python dlio_run.py RESULT.json [--without-debug-line] OVERRIDES...

It runs in DLIO's environment and knows nothing of headrace. DLIO formats the index of all samples for a
message that nobody sees, for every sample; `--without-debug-line` leaves that line out, to see what DLIO
would do without it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any


def _time_generation(benchmark: Any, seen: dict[str, Any]) -> None:
    if benchmark.data_generator is None:
        return
    generate = benchmark.data_generator.generate

    def timed() -> None:
        began = time.perf_counter()
        generate()
        seen["generate_s"] = time.perf_counter() - began
        os.sync()
        seen["generate_synced_s"] = time.perf_counter() - began

    benchmark.data_generator.generate = timed


def _leave_out_the_debug_line() -> None:
    handler = importlib.import_module("dlio_benchmark.reader.reader_handler")
    lines = textwrap.dedent(inspect.getsource(handler.FormatReader.read_index)).splitlines()
    kept = [line for line in lines if "{self.global_index_map}" not in line]
    if len(kept) != len(lines) - 1:
        raise RuntimeError("this DLIO has no such line")
    scope: dict[str, Any] = {}
    exec("\n".join(kept), vars(handler), scope)  # of DLIO, less a line
    handler.FormatReader.read_index = scope["read_index"]


def main() -> None:
    result, *words = sys.argv[1:]
    if words[0] == "--without-debug-line":
        words.pop(0)
        _leave_out_the_debug_line()
    dlio = importlib.import_module("dlio_benchmark.main")
    seen: dict[str, Any] = {"epochs_s": [], "steps": []}
    initialize, train = dlio.DLIOBenchmark.initialize, dlio.DLIOBenchmark._train  # noqa: SLF001

    def timed_initialize(self: Any) -> None:
        _time_generation(self, seen)
        initialize(self)

    def timed_train(self: Any, epoch: int) -> Any:
        began = time.perf_counter()
        steps = train(self, epoch)
        seen["epochs_s"].append(time.perf_counter() - began)
        seen["steps"].append(steps)
        return steps

    dlio.DLIOBenchmark.initialize, dlio.DLIOBenchmark._train = timed_initialize, timed_train  # noqa: SLF001
    sys.argv = ["dlio_benchmark", *words]
    dlio.main()
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
