"""Starts one rank: sees to it that the kernel ends the rank if whoever started it dies, then becomes it.

Run as a file by a bare interpreter (-I -S): it imports nothing of headrace, and takes some ten milliseconds.
torchrun starts ranks in sessions of their own, so that without this they would outlive a killed torchrun.
torchrun itself is started through it, too.
"""

import ctypes
import os
import signal
import sys

TORCHRUN = "--torchrun"
"""In place of a program: be torchrun, with the arguments behind it."""


def torchrun() -> None:
    """torchrun, which leaves it to the launcher to say how its ranks ended."""
    import logging

    # torch reads it once: when a peer ends first, torchrun's store would print forty lines of C++ about it.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from headrace.cluster.launch.stop_page import PAGE_VARIABLE, RankSlot

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks' own is the user's
    if "LOGLEVEL" not in os.environ:  # torchrun's own variable: who sets it wants to read all
        logging.disable(logging.ERROR)
    # Else it leaves a folder in TMPDIR behind; this one ends with the launch.
    logs = f"--log-dir={os.environ['HEADRACE_RUNTIME_DIR']}-torchrun"
    try:
        run.main([*([] if "PET_LOG_DIR" in os.environ else [logs]), *sys.argv[2:]])
    except SignalException as e:
        sys.exit(128 + e.sigval)
    except ChildFailedError as e:
        first = e.get_first_failure()[1]  # torchrun has ended the others
        slot = RankSlot.open(os.environ[PAGE_VARIABLE], first.local_rank)
        # 75 is for a launch that has saved and left: it asks for a new start.
        slot.end(1 if first.exitcode == os.EX_TEMPFAIL else first.exitcode)
        sys.exit(1)


def main() -> None:
    """Becomes the program that the arguments name."""
    if sys.argv[1] == TORCHRUN:
        try:
            torchrun()
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "torch":
                raise
            sys.exit("headrace launch: torch is not installed: pip install 'headrace[torch]'")
        return
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
