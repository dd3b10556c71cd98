"""Run fuzz targets for a time, and say how many inputs they had."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz import TARGETS
from fuzz.mutation import mutated


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="inputs that were found, kept between runs")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    given = parser.parse_args()
    if not given.plain and importlib.util.find_spec("atheris"):
        with_atheris(given)
        return 0
    target = importlib.import_module(f"fuzz.{given.target}")
    counts = at_random(target, random.Random(given.seed), given.seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"target": given.target, **counts, "peak_kib": peak}))
    return 0


def at_random(
    target: Any, rng: random.Random, seconds: float, inputs_max: int = 1 << 62
) -> Counter[str]:
    """Change inputs until the time is up; what is accepted is changed further."""
    corpus = list(target.seeds())
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and counts.total() < inputs_max:
        data = mutated(rng, corpus)
        try:
            outcome = target.one_input(data)
        except BaseException:
            print(f"input: {data!r}", file=sys.stderr)
            raise
        counts[outcome] += 1
        if outcome == "accepted" and len(corpus) < 4096 and data not in corpus:
            corpus.append(data)
    return counts


def with_atheris(given: argparse.Namespace) -> None:
    """Guided by coverage of headrace's Python; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["headrace.node", "headrace.fabric"]):
        target = importlib.import_module(f"fuzz.{given.target}")
    corpus = given.corpus or Path(f"build/fuzz/corpus/python_{given.target}")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0], f"-max_total_time={given.seconds}", "-print_final_stats=1", "-verbosity=0",
        f"-seed={given.seed}", f"-artifact_prefix={corpus.parent.parent}/python_{given.target}-",
        str(corpus),
    ]  # fmt: skip

    def once(data: bytes) -> None:  # atheris takes no other answer
        target.one_input(data)

    atheris.Setup(arguments, once)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
