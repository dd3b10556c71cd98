"""Manifest: how a launch ended, and what the run was made of, so that another one can be compared with it.

    {"version": 2, "run": {...}, "command": {...}, "layout": {...}, "versions": {...}, "hardware": {...},
     "environment": {...}, "order": {...}, "result": {...}, "crc32c": "..."}

Plain JSON. Secrets are left out by the names of their variables. `compare` tells two apart: what may change
results (versions, seeds, order, hardware, environment) from what merely is another time or place.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import os
import platform
import signal
import socket
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from headrace.base.documents import DocumentKind
from headrace.base.files import explained, read_file, replace_file
from headrace.base.text import counted, times_text
from headrace.cluster.launch.place import REQUEUE_EXIT
from headrace.cluster.launch.stop_page import StopPhase
from headrace.errors import HeadraceError, LaunchError
from headrace.machine.host import byte_fields, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace.cluster.launch.nodes import NodeState
    from headrace.cluster.launch.plan import Launch
    from headrace.cluster.launch.stop_page import RankNote, StopAgreement


# -- hardware ------------------------------------------------------------------------------------------


def hardware(root: Path = Path("/")) -> dict[str, Any]:
    """CPU, memory, GPUs and kernel of this node, as plain values."""
    cpus = _values(root / "proc/cpuinfo", "model name", "cpu", "Model")
    # In the order of their bus addresses.
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "architecture": platform.machine(),
        "cpu": cpus[0] if cpus else platform.machine(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": byte_fields(root / "proc/meminfo").get("MemTotal", 0),
        "gpus": [model for path in gpus for model in _values(path, "Model")],
        "gpu_driver": read_text(root / "proc/driver/nvidia/version").partition("\n")[0].strip(),
        "kernel": platform.release(),
    }


def _values(path: Path, *names: str) -> list[str]:
    """What a file of `NAME: VALUE` lines says under these names."""
    lines = (line.partition(":") for line in read_text(path).splitlines())
    return [value.strip() for name, _, value in lines if name.strip() in names]


# -- manifests -----------------------------------------------------------------------------------------

_KIND = DocumentKind(
    name="a run's manifest",
    version=2,
    unchecked=1,
    error=LaunchError,
    next_step="`headrace launch` writes a manifest for each run: headrace-runs/.",
)
_SCRIPT_BYTES_MAX = 64 << 20

_PACKAGES = (
    "headrace", "numpy", "torch", "torchvision", "tensorflow", "keras", "jax", "jaxlib", "flax", "optax",
    "horovod", "mpi4py", "lightning", "transformers", "pillow", "nvidia-nccl-cu12", "nvidia-cudnn-cu12",
)  # fmt: skip

_VARIABLES = (
    "HEADRACE_*", "NCCL_*", "GLOO_*", "OMP_*", "MKL_*", "OPENBLAS_*", "CUDA_*", "CUBLAS_*", "CUDNN_*",
    "TORCH_*", "PYTORCH_*", "TF_*", "XLA_*", "JAX_*", "OMPI_*", "UCX_*", "PYTHONHASHSEED", "PYTHONPATH",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV", "LOADEDMODULES", "SINGULARITY_NAME",
    "APPTAINER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_CONSTRAINTS", "LANG", "TZ",
)  # fmt: skip
_SECRETS = (
    "*SECRET*", "*TOKEN*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*", "*_KEY", "*_KEY_*", "*APIKEY*",
)  # fmt: skip
_OF_ONE_RUN = (
    "HEADRACE_LAUNCH*", "HEADRACE_JOB_*", "HEADRACE_RUNTIME_DIR", "HEADRACE_RESTARTS", "HEADRACE_HISTORY",
)  # fmt: skip

_INCIDENTAL = ("run.*", "result.*", "hardware.*.host", "environment.*PATH", "environment.TZ")
"""Keys whose difference says that it was another time or place, and nothing of what was computed."""

_OF_ONE_LIFE = ("order.hash", "order.epoch", "order.position", "order.steps")
"""How far a run came: each life of one job goes on where the one before stopped."""


def versions() -> dict[str, str]:
    """Of Python and of the packages that make a difference, as installed; nothing is imported."""
    out = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change what a run computes, without secrets and without what every run has anew."""
    names = (name for name in sorted(environment) if _matches(name, _VARIABLES))
    return {
        name: environment[name] for name in names
        if not _matches(name.upper(), _SECRETS) and not _matches(name, _OF_ONE_RUN)
    }  # fmt: skip


def script_facts(words: Sequence[str]) -> dict[str, Any]:
    """The user's words, and what the script was: its hash, and the commit it lies in."""
    facts: dict[str, Any] = {"words": list(words), "folder": str(Path.cwd())}
    script = next((w for w in words if w.endswith((".py", ".sh")) and Path(w).is_file()), None)
    if script is not None:
        path = Path(script)
        facts["script"] = script
        if path.stat().st_size <= _SCRIPT_BYTES_MAX:
            facts["script_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        facts["commit"] = _commit(path.resolve().parent)
    return facts


def _commit(folder: Path) -> str | None:
    """The commit that is checked out where a script lies; git itself is not asked, nor needed."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        with contextlib.suppress(OSError):
            if git.is_file():  # a worktree
                git = (parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
            head = (git / "HEAD").read_text().strip()
            name = head.removeprefix("ref: ")
            if name == head:
                return head
            common = read_text(git / "commondir").strip()
            for root in (git, *([(git / common).resolve()] if common else [])):
                packed = read_text(root / "packed-refs", 1 << 24).splitlines()
                commits = [line.split()[0] for line in packed if line.endswith(f" {name}")]
                if commit := read_text(root / name).strip() or next(iter(commits), ""):
                    return commit
            return None
    return None


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes it: the old one or the new one, nothing between."""
    what, next_step = "the run's manifest cannot be written", "Name another file: --manifest."
    with explained(LaunchError, path, what, next_step):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _KIND.encode(manifest, indent=2))


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads one."""
    where = os.fspath(path)
    unreadable = explained(LaunchError, where, "cannot be read", _KIND.next_step)
    with unreadable, Path(where).open("rb") as f:
        data = f.read(_KIND.bytes_max + 1)
    return _KIND.decode(data, where).plain()


@dataclass(frozen=True, slots=True)
class ManifestDifference:
    """One thing that differs.

    Attributes:
        key: where in the manifests: "versions.torch".
        incidental: it is another time or place only.
    """

    key: str
    a: Any
    b: Any
    incidental: bool


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ManifestDifference]:
    """What differs between two manifests, sorted by key; what may change results comes first."""
    flat_a, flat_b = _flat(a), _flat(b)
    job = flat_a.get("run.job")
    # At the same place another hash is another order.
    lives = (
        job
        and job == flat_b.get("run.job")
        and any(flat_a.get(key) != flat_b.get(key) for key in _OF_ONE_LIFE if key != "order.hash")
    )
    incidental = (*_INCIDENTAL, *(_OF_ONE_LIFE if lives else ()))
    differences = [
        ManifestDifference(key, flat_a.get(key), flat_b.get(key), _matches(key, incidental))
        for key in flat_a.keys() | flat_b.keys()
        if flat_a.get(key) != flat_b.get(key)
    ]
    return sorted(differences, key=lambda d: (d.incidental, d.key))


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    parts = (_flat(part, f"{key}.{name}" if key else str(name)) for name, part in value.items())
    return {name: leaf for part in parts for name, leaf in part.items()}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- the report ----------------------------------------------------------------------------------------

Outcome = Literal["completed", "stopped", "requeued", "continued", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class LaunchReport:
    """What became of one launch.

    Attributes:
        job: its id; "" without a scheduler.
        restarts: how often it had been requeued before.
        lost: those of the nodes that were lost.
        outcome: `completed`; `stopped` (to be resumed: the ranks saved and left, or a node was lost);
            `requeued` (likewise, and the scheduler starts the job again); `continued` (a node was lost, and
            the launch begins again on the others); `failed`; `cancelled`.
        why: more about an end that is not `completed`.
        next_step: what the user can do about it.
        exit_code: of `headrace launch`.
        staged_samples, staged_bytes: on all nodes' local disks.
        source_bytes: read from the source to stage them.
        stage_s: from the start until what is staged could be read; copying goes on beside the ranks.
        resumed: from where the ranks went on, in words; "" if they began anew, or did not say.
        epoch, position, order_hash, seed, steps: where the ranks' loaders stood last, if they said.
        ended: processes that had to be ended; 0 after a good run.
        stuck: processes that could not be ended.
    """

    job: str = ""
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    ranks: int = 0
    outcome: Outcome = "failed"
    why: str = ""
    next_step: str | None = None
    exit_code: int = 3
    wall_s: float = 0.0
    staged_samples: int = 0
    staged_bytes: int = 0
    source_bytes: int = 0
    stage_s: float | None = None
    resumed: str = ""
    epoch: int | None = None
    position: int | None = None
    order_hash: str | None = None
    seed: int | None = None
    steps: int | None = None
    ended: int = 0
    stuck: int = 0
    remarks: list[str] = field(default_factory=list)

    def lines(self, *, raised: bool) -> list[str]:
        """In a line, and behind it the cause of a failure and what to do; `raised`: an error says these."""
        if raised:
            return [self._line()]
        if self.outcome == "failed":
            lines = [self._line(), f"cause: {self.why}"]
        else:
            lines = [": ".join(filter(None, (self._line(), self.why)))]
        return [*lines, f"next: {self.next_step}"] if self.next_step else lines

    def _line(self) -> str:
        who = f"job {self.job}" if self.job else "this machine"
        if self.restarts:
            who += f", restarted {times_text(self.restarts)}"
        nodes = counted(len(self.nodes), "node")
        ranks = counted(self.ranks, "rank")
        text = f"{who}: {self.outcome}, {nodes}, {ranks}, {self.wall_s:.1f} s"
        if self.staged_samples:
            text += f"; {self.staged_samples:,} samples staged"
            text += f", {self.source_bytes:,} bytes read from the source"
        if self.stage_s is not None:
            text += f", readable after {self.stage_s:.1f} s"
        if self.resumed:
            text += f"; {self.resumed}"
        if self.position is not None:
            text += f"; epoch {self.epoch}, position {self.position:,}, order {self.order_hash}"
        if self.stuck:
            text += f"; {self.stuck} processes cannot be ended"
        return text


# -- what the ranks' ends mean -------------------------------------------------------------------------


class RankFailure(NamedTuple):
    """The first rank, or torchrun or mpirun, that failed; `code` as shells have it: 128 + its signal."""

    what: str
    code: int

    @classmethod
    def among(cls, nodes: Sequence[NodeState]) -> RankFailure | None:
        """The one that made the others fail, as far as can be told.

        Ranks that lose a peer raise an exception, or are aborted. So whoever was killed or left without one
        was first, then who raised one first.
        """
        if not any(code for node in nodes for code in node.codes.values()):
            return None
        ranks = [
            (node, note, local)
            for node in nodes
            for local, note in enumerate(node.notes)
            if note.failed_ns
        ]
        if not ranks:
            node, code = next((n, c) for n in nodes for c in n.codes.values() if c)
            return cls(
                f"what starts the ranks on node {node.name} {_ending(code)}", _as_shells(code)
            )
        node, note, local = min(ranks, key=lambda rank: (_follows(rank[1]), rank[1].failed_ns))
        who = f"rank {node.index * len(node.notes) + local} (node {node.name})"
        why = f": {note.error}" if note.error else ""
        return cls(f"{who} {_ending(note.code or 1)}{why}", note.code or 1)


def _follows(note: RankNote) -> bool:
    """Whether a rank's end may be that of another one's; 1 is an exception's, told or not."""
    untold = note.code == 1 and not note.attends
    return bool(note.error) or untold or note.code in {128 + signal.SIGABRT, 128 + signal.SIGTERM}


def _as_shells(code: int) -> int:
    return code if code >= 0 else 128 - code


def _ending(code: int) -> str:
    status = _as_shells(code)
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"


def judge(
    report: LaunchReport,
    nodes: Sequence[NodeState],
    failure: RankFailure | None,
    agreement: StopAgreement | None,
) -> None:
    """Sets outcome, reason and exit status."""
    left, all_saved = _how_left(nodes, agreement)
    if agreement is not None and agreement.reason.cancels:
        # torchrun passes the signal on, and so ends with a failure: that is no other one.
        report.outcome = "cancelled"
        report.why = "; ".join(filter(None, (agreement.reason.text, left)))
        report.exit_code = 128 + agreement.reason.number
        if all_saved and report.job:
            report.next_step = f"`headrace cluster resubmit {report.job}` goes on from there."
    elif failure is not None:
        report.outcome, report.exit_code = "failed", failure.code
        report.why = failure.what
        if failure.code == 128 + signal.SIGKILL:
            report.next_step = (
                "SIGKILL mostly means out of memory: the node's `dmesg` says whether it was. Ask for more "
                "(--memory), or take less, with smaller batches or fewer workers."
            )
        if report.job:
            again = f"`headrace cluster resubmit {report.job}` goes on from what it saved last."
            if not report.steps and not report.next_step:  # it never trained
                again = f"Mend that, and start it again: `headrace cluster resubmit {report.job}`."
            report.next_step = " ".join(filter(None, (report.next_step, again)))
    elif agreement is not None and agreement.phase is StopPhase.LATE:
        report.outcome, report.exit_code = "failed", 128 + signal.SIGKILL
        report.why = f"{agreement.reason.text}; the ranks did not leave in time"
    elif agreement is not None and left:
        report.outcome, report.exit_code = "stopped", REQUEUE_EXIT
        report.why = f"{agreement.reason.text}; {left}"
    else:
        report.outcome, report.exit_code = "completed", 0


def _how_left(nodes: Sequence[NodeState], agreement: StopAgreement | None) -> tuple[str, bool]:
    """How the ranks answered the request to leave, "" if they did not; and whether all had saved."""
    attending = [note for node in nodes for note in node.notes if note.attends]
    if not any(note.leaving for note in attending):
        return "", False
    # Who had ended well before was not asked.
    late = agreement is not None and agreement.phase is StopPhase.LATE
    saved = {note.saved for note in attending if late or note.leaving or note.code}
    if 0 not in saved:
        return f"all ranks saved at step {min(saved):,} and left", True
    # Who saves by other means than `resume` says nothing of it.
    return ("not all ranks had saved" if any(saved) else "the ranks left"), False


def resumed_at(nodes: Sequence[NodeState]) -> str:
    """From where the ranks went on, in words; "" if they began anew, or have not said yet."""
    notes = [note for node in nodes for note in node.notes if note.resumed]
    if not notes:
        return ""
    steps, epoch, position = max((n.resumed, n.resumed_epoch, n.resumed_position) for n in notes)
    return f"resumed at step {steps:,} (epoch {epoch}, position {position:,})"


def add_notes(report: LaunchReport, nodes: Sequence[NodeState]) -> None:
    """Where the loaders stood: the same on all ranks, but for the hash, which is of all together."""
    from headrace.order import combine_hashes  # heavy, and the nodes need none of it

    notes = [note for node in nodes for note in node.notes if note.steps]
    if not notes:
        return
    report.resumed = resumed_at(nodes)
    report.epoch = max(n.epoch for n in notes)
    last = [n for n in notes if n.epoch == report.epoch]
    report.position = max(n.position for n in last)
    report.order_hash = f"{combine_hashes(*(n.order_hash for n in last)):016x}"
    report.seed = last[0].seed
    report.steps = max(n.steps for n in notes)


# -- the run's manifest --------------------------------------------------------------------------------

_FOLDER = "headrace-runs"
_CLOCKS_S = 60.0
"""So far may clocks of nodes differ."""


def _paths(folder: Path, name: str) -> Iterator[Path]:
    """Of the launches in one life of a job, one after the other."""
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return (Path(folder, _FOLDER, f"{each}.json") for each in names)


def newest_life(folder: Path, job: str, restarts: int) -> int:
    """The last life of a job that has a manifest; agents count launches, of which a life may have several."""
    lives = range(restarts, -1, -1)
    with contextlib.suppress(OSError):
        return next((n for n in lives if next(_paths(folder, f"{job}-{n}")).exists()), restarts)
    return restarts


class RunRecord:
    """One run's manifest, written before its ranks run and when they have ended."""

    def __init__(self, launch: Launch, environment: Mapping[str, str]) -> None:
        place, options, plan, words = launch
        began = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
        name = f"{place.job_id}-{place.restarts}" if place.job_id else f"{stamp}-{os.getpid()}"
        # A name that no other launch of the job has taken.
        paths = _paths(Path(), name)
        chosen = options.manifest or next(path for path in paths if not path.exists())
        self.path = Path(chosen).absolute()
        self._document: dict[str, Any] = {
            "run": {
                "job": place.job_id, "name": place.name, "restarts": place.restarts,
                "scheduler": place.scheduler, "nodes": list(plan.nodes), "host": socket.gethostname(),
                "began_s": round(began, 3),
            },
            "command": script_facts(words),
            "layout": {
                "framework": options.framework, "nodes": len(plan.nodes),
                "ranks_per_node": plan.ranks_per_node, "gpus_per_node": plan.gpus_per_node,
                "cpus_per_rank": plan.cpus_per_rank, "staged": list(options.stage),
                "replicas": options.replicas,
            },
            "versions": versions(),
            "hardware": {"0": hardware()},
            "environment": relevant_environment(environment),
        }  # fmt: skip

    def begin(self, resumed: str = "") -> None:
        """Writes what is known while the ranks run: a run that is killed has a manifest, too."""
        result = {"outcome": "running", "why": "", "resumed": resumed}
        write_manifest(self.path, {**self._document, "result": result})

    def finish(self, report: LaunchReport, nodes: Sequence[NodeState]) -> None:
        """Writes all of it; LaunchError if it cannot be written."""
        known = {str(n.index): n.hello["hardware"] for n in nodes if "hardware" in n.hello}
        # Nodes that are alike are one entry: a thousand equal ones say nothing more.
        unlike = {i: h for i, h in known.items() if h != known.get("0")}
        first = known.get("0", self._document["hardware"]["0"])
        self._document["hardware"] = {"0": first, **unlike}
        self._document["order"] = {
            "seed": report.seed, "epoch": report.epoch, "position": report.position,
            "hash": report.order_hash, "steps": report.steps,
        }  # fmt: skip
        self._document["result"] = {
            "outcome": report.outcome, "why": report.why, "exit_code": report.exit_code,
            "resumed": report.resumed,
            "wall_s": round(report.wall_s, 3), "staged_bytes": report.staged_bytes,
            "source_bytes": report.source_bytes, "remarks": report.remarks,
        }  # fmt: skip
        write_manifest(self.path, self._document)


class RunWords(NamedTuple):
    """What a job's launch says of it."""

    cause: str = ""  # why it ended
    resumed: str = ""  # how it went on
    failed: bool = False
    nodes: tuple[str, ...] = ()  # on which it went on, without others of the job


class _Launched(NamedTuple):
    outcome: str
    why: str
    resumed: str
    nodes: int
    names: tuple[str, ...]
    ended_s: float  # Unix seconds


def _launches(
    folder: Path, name: str, since_s: float, until_s: float | None = None
) -> list[_Launched]:
    """What the manifests in one life of a job say, but for those before one that is damaged."""
    try:
        known = list(itertools.takewhile(Path.exists, _paths(folder, name)))
    except OSError:  # a folder that cannot be looked into
        return []
    until_s = time.time() if until_s is None else until_s
    launches: list[_Launched] = []
    for path in known:
        try:
            # What others put there in its place, a pipe perhaps, holds nobody up.
            manifest = _KIND.decode(read_file(path, _KIND.bytes_max + 1), str(path)).plain()
            run, result, nodes = manifest["run"], manifest["result"], manifest["layout"]["nodes"]
            if since_s - _CLOCKS_S < run["began_s"] < until_s + _CLOCKS_S:
                outcome, why, resumed = (str(result[n]) for n in ("outcome", "why", "resumed"))
                names = tuple(map(str, run.get("nodes", ())))
                ended_s = float(run["began_s"]) + float(result.get("wall_s", 0.0))
                one = _Launched(outcome, why, resumed, int(nodes), names, ended_s)
                launches.append(one)
        except (OSError, HeadraceError, KeyError, TypeError, ValueError):
            launches.clear()  # what follows it says no more than itself
    return launches


_LIVES_MOST: Final = 64


def interruptions(
    folder: Path, job: str, restarts: int, since_s: float, until_s: float
) -> list[tuple[float, str]]:
    """Why launches of a job ended after which it went on, in its last lives, and when, in Unix seconds."""
    lives = range(max(0, restarts - _LIVES_MOST), restarts + 1)
    launches = (
        one for life in lives for one in _launches(folder, f"{job}-{life}", since_s, until_s)
    )
    went_on = {"continued", "requeued"}
    return [(one.ended_s, one.why) for one in launches if one.why and one.outcome in went_on]


def told_by_run(
    folder: Path, job: str, restarts: int, since_s: float, until_s: float | None = None
) -> RunWords:
    """What the newest launch in this life of a job says: why it ended, and how it went on.

    Args:
        folder: the job's.
        job: its id.
        restarts: which life.
        since_s: when the job was submitted; older manifests are of another job of that number.
        until_s: when it ended; likewise.
    """
    launches = _launches(folder, f"{job}-{restarts}", since_s, until_s)
    if not launches:
        return RunWords()
    outcome, why, resumed, nodes, names, _ = launches[-1]
    began = itertools.takewhile(lambda launch: launch.outcome == "continued", launches[-2::-1])
    most = max((launch.nodes for launch in began), default=nodes)
    if nodes < most:
        goes = "goes" if outcome == "running" else "went"
        resumed = f"{goes} on with {nodes} of {most} nodes" + (f", {resumed}" if resumed else "")
    return RunWords(why, resumed, outcome == "failed", names if nodes < most else ())
