"""Print the matrix: `PYTHONPATH=tests python -m launchers [--only WORDS] [--loaders ...]`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from cluster.slurm import Slurm, missing
from launchers.judge import WRONG, table, verdicts
from launchers.matrix import LAUNCHERS, make_data


def main() -> int:
    """Run every launcher that this machine has; 1 if a sample was lost or came twice in silence."""
    parser = argparse.ArgumentParser(prog="launchers", description=__doc__)
    parser.add_argument("--only", default="", help="launchers whose name has this pattern")
    parser.add_argument("--loaders", nargs="+", help="of these loaders only")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-launchers-"))
    rows = []
    skipped = []
    slurm = None if missing() else Slurm(folder / "s")
    try:
        if slurm is not None:
            slurm.start()
        data = make_data(folder / "data")
        for number, launcher in enumerate(LAUNCHERS):
            if not re.search(args.only, launcher.name):
                continue
            if launcher.slurm and slurm is None:
                skipped.append(f"{launcher.name}: no Slurm")
            elif (lacks := launcher.missing()) is not None:
                skipped.append(f"{launcher.name}: {lacks}")
            else:
                outcomes = launcher.outcomes(data, folder / f"{number}", slurm, args.loaders)
                rows += verdicts(outcomes)
                for row, verdict in rows[-len(outcomes) :]:
                    text = f"\n{row}" if verdict == WRONG else ""
                    print(f"{launcher.name}, {row.loader}: {verdict}{text}", file=sys.stderr)
    finally:
        if slurm is not None:
            slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    for line in skipped:
        print(f"skipped: {line}")
    return int(any(verdict == WRONG for _, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
