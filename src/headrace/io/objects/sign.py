"""`python -m headrace.io.objects.sign`: signs one address for a forked process (`addresses`).

Reads a pickled (root, options, key) from its standard input, which only its parent writes.
"""

from __future__ import annotations

import pickle
import sys

from headrace.io.objects.clients import make_client, sign
from headrace.io.objects.faults import Fault


def main() -> int:
    """Writes the address to standard output."""
    root, options, key = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    try:
        sys.stdout.write(sign(make_client(root, options), key))
    except Fault as fault:
        sys.stderr.write(f"{fault.reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
