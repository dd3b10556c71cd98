"""Starts one rank: sees to it that the kernel ends the rank if whoever started it dies, then becomes it.

Run as a file by a bare interpreter (-I -S): it imports nothing of headrace, and takes some ten milliseconds.
torchrun starts ranks in sessions of their own, so that without this they would outlive a killed torchrun.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Becomes the program that the arguments name."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(137)  # it died before we had asked
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's own program
    except OSError as e:
        sys.stderr.write(f"headrace launch: {sys.argv[1]}: {e.strerror}\n")
        sys.exit(127 if isinstance(e, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
