"""Pod: the first process of each pod of a job. The first pod runs the script; the others serve it.

    pod 0    script, in it `headrace launch`, which listens for the others
    pod 1    asks pod 0 what to run, runs this node's part of the launch, and asks again

A job's script runs once, as under Slurm. When it is over so is the job: Kubernetes ends the other pods. A pod
that is made anew in a lost one's place comes as that one did, and `headrace launch` begins again with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cluster.launch.nodes import SPEC_VARIABLE, ask_for_spec
from headrace.cluster.launch.place import REQUEUE_EXIT, job_key
from headrace.cluster.launch.plan import node_command
from headrace.cluster.manifest import told_by_run
from headrace.cluster.notation import expand_hosts
from headrace.cluster.processes import (
    adopt_orphans,
    catches,
    end_descendants,
    reap,
    send,
)
from headrace.machine.host import start_time

if TYPE_CHECKING:
    from collections.abc import Sequence

RESTARTS = {
    "HEADRACE_JOB_RESTARTS": "batch.kubernetes.io/job-index-failure-count",
    "HEADRACE_JOB_DISRUPTIONS": "batch.kubernetes.io/job-index-ignored-failure-count",
}
"""How often a pod was made anew: by its own fault, or its node's; variables, and annotations of pods."""

_GATHER_S = 3600.0
_SAY_S = 60.0
_RETRY_S = 1.0
_TICK_S = 0.05
_LEFT_BEHIND_S = 2.0

# Kubeflow's words for ranks: those of `headrace launch` are others.
_NOT_OURS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_BY_SIGNAL = (signal.SIGKILL, signal.SIGTERM)  # as statuses of a pod they ask for another try


def main(arguments: Sequence[str]) -> int:
    """Be this pod; its exit status."""
    index = int(os.environ.get("JOB_COMPLETION_INDEX") or os.environ.get("RANK") or 0)
    for name in [n for n in os.environ if n in _NOT_OURS or n.startswith("PET_")]:
        del os.environ[name]
    restarts = sum(int(os.environ.pop(name, "") or 0) for name in RESTARTS)
    os.environ |= {"HEADRACE_JOB_NODE_INDEX": str(index), "HEADRACE_JOB_RESTARTS": str(restarts)}
    names, asked = expand_hosts(os.environ["HEADRACE_JOB_NODES"]), list[int]()
    for number in _STOPS:
        signal.signal(number, lambda number, _: asked.append(number))
    adopt_orphans()
    if index:
        return _serve(names[index], asked)
    missing = _missing(names, asked)
    if missing:
        _say(f"{len(missing)} of {len(names)} pods have no address: {', '.join(missing[:4])}")
        return REQUEUE_EXIT
    began_s, files = time.time(), os.environ["HEADRACE_JOB_FILES"]
    code = _run([str(Path(files, "script")), *arguments], asked)
    words = told_by_run(Path.cwd(), os.environ.get("HEADRACE_JOB_ID", ""), restarts, began_s)
    if any(words):
        with contextlib.suppress(OSError):
            # Without the nodes, which are pods here: Kubernetes keeps 4,096 bytes.
            message_of(files).write_bytes(msgspec.json.encode(words._replace(nodes=())))
    return code


def message_of(files: str) -> Path:
    """The file whose text Kubernetes keeps when the pod has ended: what the launch said of itself."""
    return Path(files).with_name("message")


def _say(text: str) -> None:
    sys.stderr.write(f"headrace: {text}\n")


def _missing(names: Sequence[str], asked: list[int]) -> list[str]:
    """Waits until all pods run, as their names show; those that do not after an hour, or when we are to end."""
    _, dot, domain = os.environ["HEADRACE_JOB_FIRST"].partition(".")
    until_s, say_s, missing = time.monotonic() + _GATHER_S, time.monotonic() + _SAY_S, list(names)
    while True:
        for name in list(missing):
            with contextlib.suppress(OSError):
                if socket.getaddrinfo(f"{name}{dot}{domain}", None):
                    missing.remove(name)
        if not missing or asked or time.monotonic() > until_s:
            return missing
        if time.monotonic() > say_s:
            say_s += _SAY_S
            _say(f"waiting for {len(missing)} of {len(names)} pods: kubectl get pods says why")
        time.sleep(_RETRY_S)


def _serve(name: str, asked: list[int]) -> int:
    """Runs this node's part of one launch after the other."""
    while not asked:
        spec = ask_for_spec(os.environ["HEADRACE_JOB_FIRST"], name, job_key())
        if spec is None:
            time.sleep(_RETRY_S)
            continue
        os.environ |= {SPEC_VARIABLE: spec, "HEADRACE_NODE_NAME": name}
        _run(node_command(), asked)
    return 128 + asked[0]


def _run(command: Sequence[str], asked: list[int]) -> int:
    """Runs a program until all that it started is over; signals go to what it started."""
    process = subprocess.Popen(command)  # noqa: S603 - the job's own
    handed_on = 0
    # All children at once: as the pod's first process we are every orphan's parent.
    while (status := reap().get(process.pid)) is None:
        for number in asked[handed_on:]:
            _hand_on(process.pid, number)
        handed_on = len(asked)
        time.sleep(_TICK_S)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    end_descendants(_LEFT_BEHIND_S)
    if code - 128 in _BY_SIGNAL and not asked:
        return 1  # it told of a rank's signal: another try would end as this one
    return code if code >= 0 else 128 - code


def _hand_on(pid: int, number: int) -> None:
    """To a script's children, which know what to do; to itself if it has none: a shell would die of it.

    A job that may start again is asked to save and to do so: whoever ends a pod does not say whether for good.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        for each in map(int, children.read_text().split() or [str(pid)]):
            began = start_time(each)
            again = os.environ.get("HEADRACE_JOB_REQUEUE") == "1" and catches(each, signal.SIGUSR1)
            if began is not None:
                send(each, began, signal.SIGUSR1 if again and number == signal.SIGTERM else number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
