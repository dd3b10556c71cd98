"""`dlio_benchmark`: the command line that DLIO's users and `mlpstorage` call, run by `headrace bench`.

One rank is one emulated accelerator, as there. What DLIO has no words for comes from the environment:
HEADRACE_BENCH_ENGINE, HEADRACE_BENCH_FORMULA. DFTRACER_ENABLE=1 writes traces, as there.
`dlio_benchmark_query` prints one value of a workload.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


_HELP = """dlio_benchmark workload=NAME [++workload.KEY=VALUE ...] [++hydra.run.dir=DIR]
               [++hydra.output_subdir=NAME] [--config-dir=DIR]

Runs a DLIO workload with headrace's benchmark and writes DLIO's output files.
`headrace bench run --help` has more; `headrace bench workloads` lists what is shipped.
"""

_QUERY_HELP = """dlio_benchmark_query [workload=NAME] [++workload.KEY=VALUE ...] ++workload.workflow.query=KEY

Prints the value that a DLIO workload has for KEY, as dataset.num_files_train.
"""

_POSTPROCESS_HELP = """dlio_postprocessor --output-folder=DIR [--name=NAME]

Writes DLIO_report.txt into the folder of a run. What else DLIO asks for, the run's files say.
"""

_KNOWN_BY_THE_RUN = (
    ("-hf", "--hydra-folder"), ("-np", "--num-proc"), ("-e", "--epochs"), ("-bs", "--batch-size"),
    ("-de", "--do-eval"), ("-bse", "--batch-size-eval"), ("-c", "--do-checkpoint"), ("-d", "--debug"),
)  # fmt: skip

_NOT_OURS = {
    "DLIO_LOG_LEVEL": "the log has what DLIO's level OUTPUT has",
    "DLIO_PROFILER_ENABLE": "DFTRACER_ENABLE=1 writes traces",
    "DLIO_OUTPUT_FOLDER": "give ++hydra.run.dir=DIR",
    "DLIO_STORAGE_TYPE": "give ++workload.storage.storage_type=TYPE",
    "DLIO_STORAGE_LIBRARY": "object stores are read by our own engine",
    "DLIO_DATA_GEN": "data is made by headrace's own generator",
    "DLIO_MAX_AUTO_THREADS": "reader.read_threads is taken as it is",
    "DLIO_DROP_CACHES_TIMEOUT": "caches are not dropped; `headrace bench run --cold` evicts the data",
}
"""Variables that DLIO reads, and what there is instead."""


def main() -> None:
    """Runs `sys.argv` and exits: 0 when the run went through, whatever its AU is, as DLIO does."""
    _exit(_run, _HELP)


def query() -> None:
    """Prints the value that `sys.argv` asks for, and exits."""
    _exit(_query, _QUERY_HELP)


def postprocess() -> None:
    """`dlio_postprocessor`: writes DLIO_report.txt into the folder of a run."""
    _exit(_postprocess, _POSTPROCESS_HELP)


def _postprocess(words: list[str]) -> int:
    from headrace.bench.postprocess import write_postprocessed

    parser = argparse.ArgumentParser(prog="dlio_postprocessor", add_help=False)
    parser.add_argument("-of", "--output-folder", default="./output")
    parser.add_argument("-n", "--name", default="")
    for short, long in _KNOWN_BY_THE_RUN:
        parser.add_argument(short, long)
    given = parser.parse_args(words)
    print(f"wrote {write_postprocessed(given.output_folder, given.name)}")
    return 0


def _exit(do: Callable[[list[str]], int], about: str) -> NoReturn:
    words = sys.argv[1:]
    if {"-h", "--help", "--hydra-help"} & set(words):
        sys.stdout.write(about)
        sys.exit(0)
    # What is done is written, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = do(words)
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - every end has its exit code
        from headrace.cli.printing import report

        code = report(e, as_json=False, verbose=False)
    sys.exit(code)


def _run(words: list[str]) -> int:
    from headrace.bench.run import SessionOptions
    from headrace.bench.session import run_session

    engine = os.environ.get("HEADRACE_BENCH_ENGINE")
    formula = os.environ.get("HEADRACE_BENCH_FORMULA", "mlcommons")
    if formula not in ("mlcommons", "upstream"):
        raise ValueError(f"HEADRACE_BENCH_FORMULA is {formula!r}, expected mlcommons or upstream")
    given = [*words, f"++workload.reader.engine={engine}"] if engine else words
    trace = os.environ.get("DFTRACER_ENABLE") == "1"
    options = SessionOptions(formula=formula, trace=trace)  # type: ignore[arg-type]  # checked
    report = run_session(given, options)
    if report.rank:  # all of them would say the same
        return 0
    for name in sorted(_NOT_OURS.keys() & os.environ.keys()):
        print(f"note: {name} has no effect: {_NOT_OURS[name]}", file=sys.stderr)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    for line in report.lines:
        print(line)
    print(f"results in {report.folder}", file=sys.stderr)
    return 0


def _query(words: list[str]) -> int:
    from headrace.bench.config import parse_command_line, queried

    value = queried(parse_command_line(words))
    print(list(value) if isinstance(value, tuple) else value)
    return 0
