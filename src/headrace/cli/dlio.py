"""`dlio_benchmark`: the command line that DLIO's users and `mlpstorage` call, run by `headrace bench`.

One rank is one emulated accelerator, as there. What DLIO has no words for comes from the environment:
HEADRACE_BENCH_ENGINE, HEADRACE_BENCH_FORMULA.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

_HELP = """dlio_benchmark workload=NAME [++workload.KEY=VALUE ...] [++hydra.run.dir=DIR]
               [++hydra.output_subdir=NAME] [--config-dir=DIR]

Runs a DLIO workload with headrace's benchmark and writes DLIO's output files.
`headrace bench run --help` has more; `headrace bench workloads` lists what is shipped.
"""


def main() -> None:
    """Runs `sys.argv` and exits: 0 when the run went through, whatever its AU is, as DLIO does."""
    words = sys.argv[1:]
    if {"-h", "--help", "--hydra-help"} & set(words):
        sys.stdout.write(_HELP)
        sys.exit(0)
    try:
        code = _run(words)
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - every end has its exit code
        from headrace.cli.failure import report

        code = report(e, as_json=False, verbose=False)
    sys.exit(code)


def _run(words: list[str]) -> int:
    from headrace.bench.session import SessionOptions, run_session

    engine = os.environ.get("HEADRACE_BENCH_ENGINE")
    formula = os.environ.get("HEADRACE_BENCH_FORMULA", "mlcommons")
    if formula not in ("mlcommons", "upstream"):
        raise ValueError(f"HEADRACE_BENCH_FORMULA is {formula!r}, expected mlcommons or upstream")
    given = [*words, f"++workload.reader.engine={engine}"] if engine else words
    report = run_session(given, SessionOptions(formula=formula))  # type: ignore[arg-type]  # checked
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    for line in report.lines:
        print(line)
    return 0
