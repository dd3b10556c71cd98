"""Request: what a job asks of this machine, from its directives and options.

All options of sbatch are taken; those that mean nothing here (partition, account, memory, ...) change nothing.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.cluster.hostlist import expand_indices
from headrace.cluster.sbatch_words import LETTERS, Word, read_words, split
from headrace.cluster.slurm.values import gpu_count, seconds
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Dependency", "Request", "read_request"]

TASKS_MAX = 10_000
"""The largest array."""

_DONE = frozenset({
    "array", "chdir", "cpus-per-task", "dependency", "error", "gpus", "gpus-per-node", "gpus-per-task", "gres",
    "input", "job-name", "kill-on-invalid-dep", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode",
    "output", "requeue", "signal", "time",
})  # fmt: skip
_MEANINGLESS = frozenset(LETTERS.values()) | frozenset({
    "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "consolidate-segments", "container",
    "contiguous", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "exclusive",
    "export", "export-file", "extra", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus-per-socket",
    "gres-flags", "hint", "ignore-pbs", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "network", "nice", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket",
    "parsable", "power", "prefer", "priority", "profile", "propagate", "reboot", "reservation", "segment",
    "sockets-per-node", "spread-job", "spread-segments", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "use-min-nodes",
    "wait-all-nodes", "wckey",
})  # fmt: skip
_NOT_HERE = frozenset({"begin", "hold", "wrap", "test-only", "help", "usage", "version", "wait"})
_KINDS = {"afterok", "afternotok", "afterany", "after", "aftercorr", "singleton"}
_SIGNALS = re.compile(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@(\d+))?\Z")


@dataclass(frozen=True, slots=True)
class Dependency:
    """One job that another waits for: `kind` is one of sbatch's words; a singleton names none."""

    kind: str
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    Attributes:
        tasks: numbers of an array's tasks; None: it is none.
        together: of these, run at a time; 0: no limit of the array's own.
        all_of: whether all dependencies must hold, or any.
        time_s: until it is ended; None: no limit.
        warn_signal, warn_s: a signal, so long before the end; `warn_script`: to the script alone.
        nodes: simulated: the script runs once, and is told these names.
        gpus_per_node, tasks_per_node, cpus_per_task: as asked.
    """

    name: str = ""
    output: str = ""
    error: str = ""
    input: str = ""
    append: bool = False
    tasks: tuple[int, ...] | None = None
    together: int = 0
    dependencies: tuple[Dependency, ...] = ()
    all_of: bool = True
    kill_on_invalid_dependency: bool = False
    time_s: float | None = None
    warn_signal: int = 0
    warn_s: float = 60.0
    warn_script: bool = False
    requeue: bool = False
    directory: str = ""
    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 1

    @property
    def cpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.tasks_per_node * self.cpus_per_task

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, said: dict[str, Any]) -> Request:
        """Of what `as_plain` gave."""
        said = dict(said)
        said["dependencies"] = tuple(Dependency(**d) for d in said["dependencies"])
        said["tasks"] = None if said["tasks"] is None else tuple(said["tasks"])
        return cls(**said)


def read_request(script: bytes, options: Sequence[str]) -> Request:
    """What a script's directives and the options, which win, ask for.

    Raises:
        ClusterRequestError: sbatch would refuse it, or it cannot be done here.
    """
    _check_script(script)
    words = [*_directives(script), *read_words(options)]
    said: dict[str, str | None] = {}
    for word in words:
        if word.name in _NOT_HERE:
            raise ClusterRequestError(
                f"--{word.name} is not done by the local executor.",
                next_step="Leave it out, or use Slurm (HEADRACE_EXECUTOR=slurm).",
            )
        if word.name not in _MEANINGLESS and word.name not in _DONE:
            raise ClusterRequestError(
                f"sbatch has no option --{word.name}.", next_step="See `man sbatch`."
            )
        said[word.name] = word.value
    try:
        return _request(said)
    except (ValueError, TypeError) as e:
        raise ClusterRequestError(f"{e}.") from e


def _check_script(script: bytes) -> None:
    first = script.partition(b"\n")[0]
    if not first.startswith(b"#!"):
        raise ClusterRequestError(
            f"The script begins {first[:60]!r}, expected #! and an interpreter.",
            next_step="Begin it with #!/bin/bash.",
        )
    if first.endswith(b"\r"):
        raise ClusterRequestError(
            "The script's lines end as on Windows (CRLF): no interpreter would be found.",
            next_step="Convert it: sed -i 's/\\r$//' SCRIPT.",
        )
    if b"\0" in script:
        raise ClusterRequestError("The script holds a zero byte: it is no text.")


def _directives(script: bytes) -> Iterable[Word]:
    for line in script.split(b"\n"):
        if line.strip() and not line.startswith(b"#"):
            return
        if line.startswith(b"#SBATCH"):
            try:
                yield from read_words(split(line[7:].decode(errors="surrogateescape")))
            except ValueError as e:
                raise ClusterRequestError(f"{line[:80]!r}: {e}.") from e


def _request(said: dict[str, str | None]) -> Request:
    nodes = _count(said, "nodes") or 1
    per_node = _count(said, "ntasks-per-node")
    tasks = _count(said, "ntasks")
    per_node = per_node or (-(-tasks // nodes) if tasks else 1)
    gpus = gpu_count(f"gpu:{said['gpus-per-node']}") if said.get("gpus-per-node") else 0
    gpus = gpus or gpu_count(said.get("gres") or "")
    if not gpus and said.get("gpus"):
        gpus = -(-gpu_count(f"gpu:{said['gpus']}") // nodes)
    if not gpus and said.get("gpus-per-task"):
        gpus = gpu_count(f"gpu:{said['gpus-per-task']}") * per_node
    array, together = _array(said.get("array"))
    dependencies, all_of = _dependencies(said.get("dependency"))
    warn_script, warn_signal, warn_s = _warning(said.get("signal"))
    return Request(
        name=said.get("job-name") or "",
        output=said.get("output") or "",
        error=said.get("error") or "",
        input=said.get("input") or "",
        append=said.get("open-mode") in {"append", "a"},
        tasks=array,
        together=together,
        dependencies=dependencies,
        all_of=all_of,
        kill_on_invalid_dependency=said.get("kill-on-invalid-dep") in {"yes", "y"},
        time_s=seconds(said.get("time") or "") or None,
        warn_signal=warn_signal,
        warn_s=warn_s,
        warn_script=warn_script,
        requeue="requeue" in said and "no-requeue" not in said,
        directory=said.get("chdir") or "",
        nodes=nodes,
        gpus_per_node=gpus,
        tasks_per_node=per_node,
        cpus_per_task=_count(said, "cpus-per-task") or 1,
    )


def _count(said: dict[str, str | None], name: str) -> int | None:
    text = said.get(name)
    if text is None:
        return None
    first = text.partition("-")[0]  # --nodes=2-4: the fewest
    if not first.isdigit() or (name != "nodes" and first != text) or not int(first):
        raise ValueError(f"--{name} is {text!r}, expected a number")
    return int(first)


def _array(text: str | None) -> tuple[tuple[int, ...] | None, int]:
    if text is None:
        return None, 0
    numbers, percent, together = text.partition("%")
    tasks = tuple(sorted(set(expand_indices(numbers.strip("[]")))))
    if not tasks or len(tasks) > TASKS_MAX or (percent and not together.isdigit()):
        raise ValueError(
            f"--array is {text!r}, expected like 0-9, 1,3,7 or 0-99%4, at most {TASKS_MAX} tasks"
        )
    return tasks, int(together or 0)


def _dependencies(text: str | None) -> tuple[tuple[Dependency, ...], bool]:
    if not text:
        return (), True
    found = []
    for part in re.split("[,?]", text):
        kind, *job_ids = part.split(":")
        bad = kind not in _KINDS or (kind == "singleton") == bool(job_ids)
        if bad or not all(re.fullmatch(r"\d+(_\d+)?(\+\d+)?", job_id) for job_id in job_ids):
            raise ValueError(f"--dependency is {text!r}, expected like afterok:17:18,afterany:19")
        found += [Dependency(kind, job_id.partition("+")[0]) for job_id in job_ids or [""]]
    return tuple(found), "?" not in text


def _warning(text: str | None) -> tuple[bool, int, float]:
    if not text:
        return False, 0, 60.0
    import signal

    found = _SIGNALS.match(text)
    named = found and (found[2] if found[2].isdigit() else f"SIG{found[2].upper()}")
    numbers = {s.name: int(s) for s in signal.Signals} | {
        str(int(s)): int(s) for s in signal.Signals
    }
    if not found or named not in numbers:
        raise ValueError(f"--signal is {text!r}, expected like USR1@60 or B:TERM@120")
    return "B" in (found[1] or ""), numbers[named], float(found[3] or 60)
