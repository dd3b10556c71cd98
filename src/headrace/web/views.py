"""Views: what pages draw, as plain values, every name as it may be shown.

The cluster at one moment, one job over time, a file system, the leaderboard.
A GPU is a byte of stall and a byte of use, so that a thousand nodes are 22 kB a look. Jobs have slots: a
number that holds while the job runs, which a GPU's holder names.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.base.causes import WORTH_NAMING
from headrace.cluster.snapshot import is_away, queue_board
from headrace.telemetry.report import JobReport, hint_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.cluster.snapshot import ClusterSnapshot
    from headrace.insight.usage import Starving, StarvingGroup, StarvingJob
    from headrace.telemetry.history import JobRecord

IDLE: Final = -1  # a GPU that no job holds
UNKNOWN: Final = 255  # a stall or use that nobody knows
LEVELS: Final = 200  # a share of 1 is this byte

NAME_CHARACTERS_MAX: Final = 200
SENTENCE_CHARACTERS_MAX: Final = 2000


def plain(text: object, most: int = NAME_CHARACTERS_MAX) -> str:
    """A name from anywhere as it may be shown: bounded, controls and marks of direction as their escapes."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:most])
    return shown.encode("utf-8", "backslashreplace").decode()


def sentence(text: object) -> str:
    """Likewise what is said: an error's whole message, with what to do."""
    return plain(text, SENTENCE_CHARACTERS_MAX)


def whole_number(text: str, what: str) -> int:
    """A number from 0 on of an address; raises ValueError, which says `what` it is, if it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f"{what} is {text!r}, expected a number from 0 on")
    return int(text)


def plainly(value: Any) -> Any:
    """A value of JSON with every text in it as `plain` shows a name."""
    if isinstance(value, dict):
        return {plain(name): plainly(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


def levels(shares: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Shares 0..1 as bytes; NaN is unknown."""
    known = np.nan_to_num(np.clip(shares, 0.0, 1.0) * LEVELS)
    return np.where(np.isnan(shares), UNKNOWN, np.rint(known)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A node: its GPUs stand in a row."""

    name: str
    partition: str
    gpus: int
    away: str = ""  # why it takes no jobs; '' if it does


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBox:
    """A job that holds GPUs."""

    job_id: str
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    gpus: int = 0
    nodes: int = 1
    cause: str = ""  # what it waits for most; ''
    file_system: str = ""
    measured: bool = False
    started_s: float | None = None

    def row(self) -> list[Any]:
        """As it goes over the wire; `cluster.js` knows the order."""
        return [
            plain(self.job_id), plain(self.name), plain(self.user), plain(self.account),
            plain(self.partition), self.gpus, self.nodes, plain(self.cause),
            plain(self.file_system), int(self.measured), self.started_s,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMoment:
    """All of it."""

    taken_s: float  # Unix seconds
    nodes: Sequence[NodeBox]  # in the order in which they are shown
    jobs: Sequence[JobBox]  # that run
    holders: NDArray[np.int32]
    """(GPUs) int32, of each GPU the place of its job in `jobs`, or `IDLE`."""
    stall: NDArray[np.uint8]  # (GPUs) uint8, see `levels`
    busy: NDArray[np.uint8]  # (GPUs) uint8, likewise
    waiting: int = 0  # jobs that wait for GPUs
    notes: tuple[str, ...] = ()  # what could not be seen, a sentence each
    has_gpus: bool = True  # else what is called a GPU here is a job's place on a node

    def totals(self) -> dict[str, Any]:
        """What stands above the grid."""
        held = self.holders >= 0
        counts = np.array([node.gpus for node in self.nodes], np.int64)
        away = np.repeat(np.array([bool(n.away) for n in self.nodes], bool), counts)
        known = held & (self.stall != UNKNOWN)
        lost = self.stall[known].astype(np.float64) / LEVELS
        used = self.busy[held & (self.busy != UNKNOWN)].astype(np.float64) / LEVELS
        return {
            "nodes": len(self.nodes),
            "has_gpus": self.has_gpus,
            "gpus": len(self.holders),
            "held": int(held.sum()),
            "idle": int((~held & ~away).sum()),
            "away": int((~held & away).sum()),
            "known": int(known.sum()),
            "lost": round(float(lost.sum()), 1),
            "busy": round(float(used.mean()), 4) if len(used) else None,
            "running": len(self.jobs),
            "waiting": self.waiting,
            "causes": self._causes(known),
            "notes": [sentence(note) for note in self.notes],
        }

    def _causes(self, known: NDArray[np.bool_]) -> list[list[Any]]:
        """GPUs' worth of waiting, by cause, the largest first."""
        if not len(self.jobs):
            return []
        lost = self.stall[known].astype(np.float64) / LEVELS
        of_job = np.bincount(self.holders[known], lost, len(self.jobs))
        lost_by_cause = Counter[str]()
        for job, amount in zip(self.jobs, of_job.tolist(), strict=True):
            lost_by_cause[job.cause or "other"] += amount
        ranked = lost_by_cause.most_common()
        return [[plain(cause), round(amount, 1)] for cause, amount in ranked if amount >= 0.05]


@dataclass(slots=True)
class Wire:
    """Turns clusters into messages: the whole of one, or what changed since the last."""

    label: str = ""
    _slots: dict[str, int] = field(default_factory=dict)
    _rows: dict[int, list[Any]] = field(default_factory=dict)
    _boxes: dict[int, JobBox] = field(default_factory=dict)
    _nodes: dict[str, Any] = field(default_factory=dict)
    _last: dict[str, Any] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)

    def full(self) -> dict[str, Any]:
        """Everything as of the last `tick`, for a browser that comes."""
        return {**self._last, "label": self.label, "nodes": self._nodes, "jobs": dict(self._rows)}

    def tick(self, cluster: ClusterMoment) -> dict[str, Any]:
        """What changed since the cluster before."""
        before = dict(self._rows)
        places = self._place(cluster.jobs)
        holders = np.where(cluster.holders >= 0, places[cluster.holders], IDLE).astype("<i4")
        nodes = _nodes(cluster.nodes)
        cells = {"holders": holders, "stall": cluster.stall, "busy": cluster.busy}
        whole = {
            "taken_s": cluster.taken_s,
            "totals": cluster.totals(),
            **{name: base64.b64encode(v.tobytes()).decode() for name, v in cells.items()},
        }
        changes = dict(whole)
        if self._last.get("holders") == changes["holders"]:
            del changes["holders"]
        if nodes != self._nodes:
            changes["nodes"] = self._nodes = nodes
        changes["jobs"] = {slot: row for slot, row in self._rows.items() if before.get(slot) != row}
        changes["gone"] = [slot for slot in before if slot not in self._rows]
        self._last = whole
        return changes

    def _place(self, jobs: Sequence[JobBox]) -> NDArray[np.int32]:
        """The slots of jobs; those of jobs that are gone are free again."""
        here = {job.job_id for job in jobs}
        for gone in [job_id for job_id in self._slots if job_id not in here]:
            slot = self._slots.pop(gone)
            del self._rows[slot], self._boxes[slot]
            self._free.append(slot)
        places = np.full(len(jobs) + 1, IDLE, np.int32)  # the last for IDLE
        for place, job in enumerate(jobs):
            if job.job_id not in self._slots:
                free = self._free.pop() if self._free else len(self._slots)
                self._slots[job.job_id] = free
            slot = self._slots[job.job_id]
            if self._boxes.get(slot) != job:
                self._boxes[slot], self._rows[slot] = job, job.row()
            places[place] = slot
        return places


def _nodes(nodes: Iterable[NodeBox]) -> dict[str, Any]:
    """Columns: names, partitions by number, GPUs, and why some are away."""
    boxes = list(nodes)
    partitions = list(dict.fromkeys(box.partition for box in boxes))
    number: Mapping[str, int] = {name: i for i, name in enumerate(partitions)}
    return {
        "names": [plain(box.name) for box in boxes],
        "partitions": [plain(name) for name in partitions],
        "partition": [number[box.partition] for box in boxes],
        "gpus": [box.gpus for box in boxes],
        "away": {i: plain(box.away) for i, box in enumerate(boxes) if box.away},
    }


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Nodes and who is on them."""

    nodes: Sequence[NodeBox]  # in the order in which they are shown
    holders: Sequence[Sequence[str]]  # of each node, the job of each GPU; '' for none
    jobs: dict[str, JobBox]  # by id, what is known of them without the history
    waiting: int = 0  # jobs that wait for GPUs
    has_gpus: bool = True  # see `ClusterMoment`


def nodes_of_scheduler(snapshot: ClusterSnapshot) -> ClusterLayout:
    """As the scheduler says; GPUs whose number it does not tell are the first that are free."""
    board = queue_board(snapshot)
    order = {name: at for at, name in enumerate(p.name for p in snapshot.partitions)}

    def first(partitions: Iterable[str]) -> str:
        return min(partitions, key=lambda name: order.get(name, len(order)), default="")

    boxes, holders = [], []
    for row in sorted(board.nodes, key=lambda r: order.get(first(r.node.partitions), len(order))):
        node = row.node
        away = " ".join([*node.states, node.reason]).strip() if is_away(node) else ""
        boxes.append(NodeBox(node.name, first(node.partitions), node.gpus, away))
        held = list(row.holders)[: node.gpus]
        held += [""] * (node.gpus - len(held))
        for job in row.jobs:
            for part in job.allocations:
                if part.node == node.name and not part.gpus:
                    # "?" is one that is taken, by a job whose numbers are not told: such as this.
                    taken = [at for at, holder in enumerate(held) if holder == "?"]
                    free = [at for at, holder in enumerate(held) if not holder]
                    for at in (taken + free)[: part.gpu_count]:
                        held[at] = job.job_id
        holders.append(held)
    jobs = {
        row.job.job_id: JobBox(
            job_id=row.job.job_id, name=row.job.name, user=row.job.user, account=row.job.account,
            partition=row.job.partition, gpus=row.job.gpu_count, nodes=max(1, len(row.job.nodes)),
            started_s=row.job.started_s,
        )
        for row in board.running
    }  # fmt: skip
    if any("?" in held for held in holders):
        jobs["?"] = JobBox(job_id="?", name="a job that is not known")
    has_gpus = any(box.gpus for box in boxes)
    return ClusterLayout(boxes, holders, jobs, board.totals.waiting, has_gpus)


def nodes_of_agents(parts: Sequence[tuple[str, JobRecord]]) -> ClusterLayout:
    """As agents tell: the jobs of each node, on as many GPUs as they say; a CPU job is one cell."""
    by_node: dict[str, list[JobRecord]] = {}
    for node, record in parts:
        for name in [node] if node else record.nodes:
            by_node.setdefault(name, []).append(record)
    boxes, holders = [], []
    jobs: dict[str, JobBox] = {}
    has_gpus = False
    for name in sorted(by_node):
        held: list[str] = []
        for record in sorted(by_node[name], key=lambda r: r.job_id):
            gpus = round(record.total("gpus") or _gpus(record))
            count, has_gpus = max(1, min(64, gpus)), has_gpus or gpus > 0
            held += [record.job_id] * count
            known = jobs.get(record.job_id)
            jobs[record.job_id] = JobBox(
                job_id=record.job_id, name=record.name, user=record.user, account=record.account,
                gpus=count + (known.gpus if known else 0), nodes=1 + (known.nodes if known else 0),
                started_s=record.first_s,
            )  # fmt: skip
        boxes.append(NodeBox(name, "", len(held)))
        holders.append(held)
    return ClusterLayout(boxes, holders, jobs, has_gpus=has_gpus)


def _gpus(record: JobRecord) -> float:
    return record.total("gpu_s") / record.seconds if record.seconds else 0.0


def cluster_of(
    layout: ClusterLayout,
    parts: Sequence[tuple[str, JobRecord]],
    taken_s: float,
    notes: tuple[str, ...] = (),
) -> ClusterMoment:
    """The picture: who is where, and how long each waits there."""
    on_node: dict[tuple[str, str], JobRecord] = {}
    of_job: dict[str, JobRecord] = {}
    for node, record in parts:
        for name in (record.job_id, record.alias):
            if name:
                on_node[node, name] = of_job[name] = record
    boxes = [_box(job, of_job.get(job.job_id)) for job in layout.jobs.values()]
    shares = {id(record): (record.stall, record.gpu_use) for _, record in parts}
    place = {job: at for at, job in enumerate(layout.jobs)}
    holders: list[int] = []
    stall: list[float | None] = []
    busy: list[float | None] = []
    for box, held in zip(layout.nodes, layout.holders, strict=True):
        for job in held:
            known = on_node.get((box.name, job)) or of_job.get(job)
            holders.append(place.get(job, IDLE))
            waits, works = shares[id(known)] if known else (None, None)
            stall.append(waits)
            busy.append(works)
    return ClusterMoment(
        taken_s=taken_s, nodes=layout.nodes, jobs=boxes, holders=np.array(holders, np.int32),
        stall=levels(np.array(stall, np.float64)), busy=levels(np.array(busy, np.float64)),
        waiting=layout.waiting, notes=notes, has_gpus=layout.has_gpus,
    )  # fmt: skip


def _box(job: JobBox, record: JobRecord | None) -> JobBox:
    if record is None:
        return job
    waits = (record.stall or 0.0) >= WORTH_NAMING
    systems = [name for name in record.lost_by_file_system if name]
    return replace(
        job, name=job.name or record.name, user=job.user or record.user,
        account=job.account or record.account,
        cause=next(iter(record.waited), "") if waits else "",
        file_system=systems[0] if systems and waits else "", measured=record.measured,
    )  # fmt: skip


# -- one job, a file system, the leaderboard -----------------------------------------------------------

RANKS_MAX = 4096
NODES_MAX = 256


def job_page(
    record: JobRecord,
    over_time: Sequence[tuple[float, JobRecord, float]],
    nodes: Sequence[tuple[str, JobRecord]],
    *,
    running: bool,
    went_on: Sequence[tuple[float, str]] = (),
) -> dict[str, Any]:
    """What is known of a job, as plain values, every name as it may be shown.

    `over_time`: when, its figures then, and over how many seconds; `nodes`: its figures lately, node by node;
    `went_on`: when and why its launches ended after which it went on.
    """
    report = JobReport(record).as_dict()
    facts = plainly(report | {"nodes": report["nodes"][:NODES_MAX]})
    facts |= {"hint": report["hint"], "node_count": len(record.nodes)}
    rates = [(r.by_label("tier_bytes"), seconds) for _, r, seconds in over_time]
    tiers = sorted({tier for amounts, _ in rates for tier in amounts})
    now = over_time[-1][1].stall_now if over_time and running else None
    stalls = [(at, node, p.stall_now) for at, (node, p) in enumerate(nodes)]
    seen = [each for each in stalls if each[2] is not None]
    return {
        "facts": facts | {"gpus": round(record.total("gpus"))},
        "running": running,
        "went_on": [{"at": at, "text": sentence(why)} for at, why in went_on],
        "named": (record.stall or 0.0) >= WORTH_NAMING,  # whether its causes are worth naming
        "now": now,
        "times": [round(at, 3) for at, _, _ in over_time],
        "use": [_share(r.gpu_use) for _, r, _ in over_time],
        "stall": [_share(r.stall_now) for _, r, _ in over_time],
        "tiers": {
            plain(tier): _short([amounts.get(tier, 0.0) / s for amounts, s in rates])
            for tier in tiers
        },
        "ranks": [[at, plain(node), _share(s)] for at, node, s in seen[:RANKS_MAX]],
    }


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


TOP: Final = 7  # jobs that have a band of their own; as many as there are colours to tell apart


class JobFlow(NamedTuple):
    """A job on a file system: what it took at each moment."""

    job_id: str
    name: str
    user: str
    values: Sequence[float]


def file_system(
    name: str,
    times: Sequence[float],
    flows: Sequence[JobFlow],
    *,
    unit: str = "B/s",
    capacity: float | None = None,
) -> dict[str, Any]:
    """A file system as plain values: what the largest jobs took at some moments one by one, the rest together.

    `capacity` is what it can give; None: not known.
    """
    ranked = sorted(flows, key=lambda flow: (-sum(flow.values), flow.job_id))
    rest = [sum(column) for column in zip(*(f.values for f in ranked[TOP:]), strict=True)]
    total = [sum(column) for column in zip(*(f.values for f in ranked), strict=True)]
    most = sum(total)
    return {
        "name": plain(name),
        "unit": unit,
        "times": [round(t, 1) for t in times],
        "capacity": capacity,
        "now": total[-1] if total else 0.0,
        "jobs": len(ranked),
        "top": [
            {
                **{key: plain(getattr(flow, key)) for key in ("job_id", "name", "user")},
                "share": sum(flow.values) / most if most else 0.0,
                "values": _short(flow.values),
            }
            for flow in ranked[:TOP]
        ],
        "rest": _short(rest),
    }


def _short(values: Sequence[float]) -> list[float]:
    """Four digits are enough for a picture."""
    return [float(f"{value:.4g}") for value in values]


ROWS_MAX: Final = 200
GROUPS: Final = 8

_SORTS: Final = {
    "lost": lambda job: (-job.lost_gpu_hours, -job.waited_s),
    "hours": lambda job: (-job.gpu_hours,),
    "stall": lambda job: (-job.stall,),
    "waited": lambda job: (-job.waited_s,),
    "job": lambda job: (job.job_id,),
    "name": lambda job: (job.name,),
    "user": lambda job: (job.user,),
    "cause": lambda job: (job.cause,),
    "on": lambda job: (job.file_system,),
}


def rows(
    starving: Starving, records: Mapping[str, JobRecord], given: Mapping[str, str]
) -> dict[str, Any]:
    """The leaderboard as an address asks for it, as plain values.

    Raises ValueError if the order or the limit is none.
    """
    sort, limit = given.get("sort", "lost"), given.get("limit", "50")
    if sort not in _SORTS:
        raise ValueError(f"sort is {sort!r}, expected one of {', '.join(_SORTS)}")
    if not 1 <= whole_number(limit, "limit") <= ROWS_MAX:
        raise ValueError(f"limit is {limit!r}, expected 1 to {ROWS_MAX}")
    text = given.get("job", "").lower()
    user, cause, on = (given.get(name, "") for name in ("user", "cause", "on"))
    wanted = [
        job for job in starving.jobs
        if user in ("", job.user) and cause in ("", job.cause) and on in ("", job.file_system)
        and (text in job.job_id.lower() or text in job.name.lower())
    ]  # fmt: skip
    wanted.sort(key=_SORTS[sort], reverse=given.get("reverse") == "1")
    return {
        "answer": sentence(starving.answer),
        "since_s": starving.since_s,
        "until_s": starving.until_s,
        "gpu_hours": starving.gpu_hours,
        "lost_gpu_hours": starving.lost_gpu_hours,
        "jobs": [_row(job, records.get(job.job_id)) for job in wanted[: int(limit)]],
        "of": len(wanted),
        "all": len(starving.jobs),
        "lost_shown": sum(job.lost_gpu_hours for job in wanted),
        "users": _groups(starving.users),
        "file_systems": _groups(starving.file_systems),
        "causes": _groups(starving.causes),
        "every_user": sorted({plain(group.name) for group in starving.users})[:2000],
    }


def _row(job: StarvingJob, record: JobRecord | None) -> Any:
    row = {
        "job_id": job.job_id, "name": job.name, "user": job.user, "account": job.account,
        "nodes": job.nodes, "gpu_hours": job.gpu_hours, "lost": job.lost_gpu_hours,
        "waited_s": job.waited_s, "stall": job.stall, "cause": job.cause, "on": job.file_system,
        "measured": job.quality == "measured",
    }  # fmt: skip
    return plainly(row) | {"hint": "" if record is None else sentence(hint_of(record))}


def _groups(groups: tuple[StarvingGroup, ...]) -> list[dict[str, Any]]:
    return [
        {"name": plain(g.name), "jobs": g.jobs, "lost": g.lost_gpu_hours, "waited_s": g.waited_s}
        for g in groups[:GROUPS]
    ]
