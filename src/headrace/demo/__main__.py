"""`python -m headrace.demo`: the demo without the rest of the command line."""

import argparse
import sys
from pathlib import Path

from headrace.demo.main import main
from headrace.demo.options import DemoOptions
from headrace.errors import HeadraceError


def _options() -> tuple[DemoOptions, bool]:
    parser = argparse.ArgumentParser(prog="python -m headrace.demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of images, a folder per class")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    return DemoOptions(data=given.data, out=given.out, epochs=given.epochs), given.json


if __name__ == "__main__":
    try:
        options, as_json = _options()
        sys.exit(main(options, as_json=as_json))
    except (HeadraceError, ValueError) as e:
        sys.exit(f"error: {e}")
