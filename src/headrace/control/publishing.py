"""Publishing: a process tells the agents of its node how its loaders fare, every other second and at the end.

A datagram on a UNIX socket, which nobody waits for: where no agent is, it costs a failed system call.
A message has the totals since the process began, so that one which was lost, or an agent that was
away, loses nothing. Called by the controller's thread, and at the process's end.

    {"v": 1, "instance": 32 hex digits, "job": {...}, "consumer": true, "ended": false,
     "local_ranks": 4, "began_s": Unix seconds, "worked_s": ..., "batches": ..., "samples": ...,
     "file_systems": {"/scratch": {"stall_s": {"storage": ...}, "tier_bytes": {"source": ...}}}}

What a loader cannot know, whoever collects it may: `node` is what the node daemon was waited for, and
the daemon knows why.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import Cause
from headrace.base.job import JobIdentity, identity_of, job_name, local_ranks_of, torch_worker
from headrace.control.history import PlaneReading
from headrace.control.stalls.live import seen_of
from headrace.control.stalls.verdict import NEGLIGIBLE, verdict_of
from headrace.machine.host import file_system_of
from headrace.runtime import agent_sockets, checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.control.controller import Plane
    from headrace.control.stalls.verdict import Verdict
    from headrace.plane.stage import StageStats

_SMALL: Final = 0.02  # causes of a smaller share are not told one by one


def split_wait(
    waited_s: float,
    before: Sequence[StageStats],
    now: Sequence[StageStats],
    verdict: Verdict | None = None,
) -> dict[Cause, float]:
    """The seconds that were waited, by cause; they add up to `waited_s`.

    What the node daemon was waited for is told apart from what came after. A wait that is under way, which no
    verdict has seen, is taken to be as those before it: `verdict` is the last one; before the first it is the
    storage that has not answered.
    """
    if waited_s <= 0.0:
        return {}
    node = next((stage for stage in now if stage.name == "node"), None)
    if node is None:
        return (divided(waited_s, verdict) if verdict else {}) or {Cause.STORAGE: waited_s}
    then_s = next((stage.wait_input_s for stage in before if stage.name == "node"), 0.0)
    asked_s = min(waited_s, _grown(then_s, node.wait_input_s))
    causes = {Cause.NODE: asked_s, Cause.DECODE: waited_s - asked_s}
    return {cause: seconds for cause, seconds in causes.items() if seconds > 0.0}


def _from_peers(stages: Sequence[StageStats]) -> int:
    """Bytes that other nodes have served so far, those between samples included."""
    return max((stage.remote.peer_bytes for stage in stages if stage.remote is not None), default=0)


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def divided(waited_s: float, verdict: Verdict) -> dict[Cause, float]:
    """The seconds that were waited, by the causes of a verdict on the same stretch; they add up.

    A verdict sees waits that have ended, and `waited_s` may have one that has not: shares count.
    """
    here = {
        cause: seconds
        for cause, seconds in verdict.causes.items()
        if cause is not Cause.SLOW_RANK and seconds >= _SMALL * verdict.stall_s
    }
    total = sum(here.values())
    if waited_s <= 0.0 or total <= 0.0:
        return {}
    return {cause: waited_s * seconds / total for cause, seconds in here.items()}


def tier_bytes(before: Sequence[StageStats], now: Sequence[StageStats]) -> dict[str, int]:
    """Bytes that came between two looks, by where from; of a new chain of stages counters begin anew."""
    totals: Counter[str] = Counter()
    then = {stage.name: stage.bytes_by_tier for stage in before}
    for stage in now:
        old = then.get(stage.name, {})
        totals.update(
            {t: int(_grown(old.get(t, 0), count)) for t, count in stage.bytes_by_tier.items()}
        )
    return dict(totals)


PERIOD_S: Final = 2.0
LAST_S: Final = 0.5
LOCKED_S: Final = 0.5
"""The collector may drop an iterator, and so end a pass, in the midst of anything, whatever is locked."""
LAST_LOCKED_S: Final = 5.0  # at the process's end there is no next time for what is kept
KEPT_MOST: Final = 64
FILE_SYSTEMS_MAX: Final = 16  # more are added up as `other`: a message has a bounded length


@dataclass(slots=True)
class Totals:
    """What all loaders of a process did so far; only grows."""

    worked_s: float = 0.0
    batches: int = 0
    samples: int = 0
    stall_s: dict[str, dict[str, float]] = field(default_factory=dict)  # by file system and cause
    tier_bytes: dict[str, dict[str, float]] = field(default_factory=dict)  # by file system and tier

    def add(
        self,
        system: str,
        look: PlaneReading,
        before: PlaneReading,
        verdict: Verdict | None = None,
    ) -> None:
        """Add what happened between two looks at a plane; `verdict`: the last one on its steps."""
        now, then = look.consumer, before.consumer
        self.worked_s += max(0.0, now.worked_s - then.worked_s)
        self.batches += max(0, now.batches - then.batches)
        self.samples += max(0, now.samples - then.samples)
        waited_s = max(0.0, now.waited_s - then.waited_s)
        for cause, seconds in split_wait(waited_s, before.stages, look.stages, verdict).items():
            _grow(self.stall_s, system, cause, seconds)
        tiers = tier_bytes(before.stages, look.stages)
        if fetched := int(_grown(_from_peers(before.stages), _from_peers(look.stages))):
            near = min(tiers.get("source", 0), fetched)  # the reader knows not who served it
            tiers |= {"peer": near, "source": tiers.get("source", 0) - near}
        rest = max(0, now.bytes - then.bytes) - sum(tiers.values())
        if any(stage.name == "node" for stage in look.stages):
            tiers["node"] = tiers.get("node", 0) + max(0, rest)  # what no stage accounts for
        for tier, count in tiers.items():
            _grow(self.tier_bytes, system, tier, count)


@dataclass(slots=True)
class _KnownPlane:
    """What was told of a plane so far."""

    system: str  # file system that its source lies on
    figures: PlaneReading
    steps: int = 0
    verdict: Verdict | None = None  # on the last steps that stalled

    def explained(self, ended: Verdict, look: PlaneReading) -> Verdict | None:
        """The verdict on what was waited up to this look; `ended`: that on the waits that have ended.

        Waits of microseconds, which every batch has, do not say what a long one under way is for.
        """
        now, then = look.consumer, self.figures.consumer
        waited_s = now.waited_s - then.waited_s
        if ended.stall_s > NEGLIGIBLE * (waited_s + now.worked_s - then.worked_s):
            self.verdict = ended
        return ended if ended.stall_s >= waited_s / 2 else self.verdict


def _grow(table: dict[str, dict[str, float]], system: str, name: str, amount: float) -> None:
    if amount > 0:
        known = system in table or len(table) < FILE_SYSTEMS_MAX
        row = table.setdefault(system if known else "other", {})
        row[name] = row.get(name, 0.0) + amount


class Publisher:
    """Tells of the planes of this process. Thread-safe.

    Args:
        sockets: where agents may listen; by default those of `agent_sockets`.
        forked_s: when this process was forked, monotonic; None: it was not. Planes that are older belong to
            the parent, which tells of what they did.
    """

    def __init__(
        self, sockets: Sequence[str] | None = None, *, forked_s: float | None = None
    ) -> None:
        self._sockets = sockets
        self._lock = threading.Lock()
        self._forked = forked_s is not None
        self._since = forked_s or 0.0
        self._identity: JobIdentity | None = None
        self._instance = secrets.token_hex(16)
        self._began_s = time.time()
        self._known: weakref.WeakKeyDictionary[Plane, _KnownPlane] = weakref.WeakKeyDictionary()
        # Of passes that have ended, which nobody was told of.
        self._kept: deque[tuple[Plane, PlaneReading]] = deque()
        self._teller = 0
        self._rested_s = -PERIOD_S
        self._next_s = 0.0
        self._ended = False
        self.totals = Totals()

    def due(self, now: float) -> bool:
        """Whether it is time to tell again."""
        if now < self._next_s:
            return False
        self._next_s = now + PERIOD_S
        return True

    def rested(self, plane: Plane) -> None:
        """A pass of a plane has ended, and what is known of it may be gone soon: it is told with the next look.

        Passes that follow each other closely are told together, so that short ones cost next to nothing.
        """
        now = time.monotonic()
        if self._forked or now - self._rested_s >= PERIOD_S or len(self._kept) >= KEPT_MOST:
            # A child may end without a last word.
            self._rested_s = now
            self.tell([plane])
        else:
            self._keep([plane])

    def _keep(self, planes: Iterable[Plane]) -> None:
        """Remember what planes did so far, for when they are told of."""
        for plane in planes:
            if (look := plane.now()) is not None:
                self._kept.append((plane, look))

    def tell(self, planes: Sequence[Plane], *, ended: bool = False) -> None:
        """Look at planes, and send the totals to whoever listens. Waits for nobody but at the end."""
        # Iterators may still rest while the interpreter takes everything apart.
        self._ended = self._ended or ended
        me = threading.get_ident()
        patience_s = LAST_LOCKED_S if ended else LOCKED_S
        if self._teller == me or not self._lock.acquire(timeout=patience_s):
            self._keep(planes)
            return
        self._teller = me
        try:
            kept = dict(self._kept.popleft() for _ in range(len(self._kept)))
            for plane in dict.fromkeys([*kept, *planes]):
                self._add(plane, plane.now() or kept.get(plane))
            self._send(ended=self._ended)
        finally:
            self._teller = 0
            self._lock.release()

    def _add(self, plane: Plane, look: PlaneReading | None) -> None:
        """Add what a plane did since the last look; nothing if it is gone."""
        if look is None:
            return
        known = self._known.get(plane)
        if known is None:
            label = next((stage.simulation for stage in look.stages if stage.simulation), "")
            system = label or (file_system_of(plane.source) if plane.source else "")
            before = look if plane.started < self._since else _NOTHING
            known = self._known[plane] = _KnownPlane(system, before)
        elif look.consumer.batches < known.figures.consumer.batches:
            known.figures = _NOTHING  # it began anew
        verdict = known.verdict
        # What the node daemon was waited for, it knows more of.
        if look.steps is not None and all(stage.name != "node" for stage in look.stages):
            steps, known.steps = look.steps.since(known.steps)
            if len(steps):
                verdict = known.explained(verdict_of(steps, seen_of(plane)), look)
        before, now = known.figures, look.consumer
        self.totals.add(known.system, look, before, verdict)
        # A wait that is under way may turn out to be none; what was told stays told.
        waited_s = max(before.consumer.waited_s, now.waited_s)
        worked_s = max(before.consumer.worked_s, now.worked_s)
        consumer = replace(now, waited_s=waited_s, worked_s=worked_s)
        known.figures = PlaneReading(look.at, consumer, look.stages)

    def _send(self, *, ended: bool) -> None:
        if not self.totals.batches and not self.totals.stall_s:
            return
        if self._identity is None:
            self._identity = identity_of(os.environ) or _no_job()
        sockets = self._sockets
        if sockets is None:
            sockets = agent_sockets(self._identity.job_id)
        there = [path for path in sockets if checked(path)]
        if not there:
            return
        message = json.dumps(self._message(self._identity, ended=ended), separators=(",", ":"))
        # A socket for each time: one that is kept would be a descriptor that a fork copies.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            # The last word is worth a moment, should many say theirs at once.
            sock.settimeout(LAST_S if ended else 0.0)
            for path in there:
                # Nobody listens, or whoever does has enough: the next message says it all.
                with contextlib.suppress(OSError):
                    sock.sendto(message.encode(), path)

    def _message(self, identity: JobIdentity, *, ended: bool) -> dict[str, Any]:
        totals = self.totals
        return {
            "v": 1,
            "instance": self._instance,
            "pid": os.getpid(),
            "job": asdict(identity),
            # In a DataLoader's worker no training step runs, so none waits.
            "consumer": torch_worker() is None,
            "ended": ended,
            "began_s": round(self._began_s, 3),
            "local_ranks": local_ranks_of(os.environ),
            "worked_s": round(totals.worked_s, 6),
            "batches": totals.batches,
            "samples": totals.samples,
            "file_systems": {
                name: {
                    "stall_s": {c: round(s, 6) for c, s in totals.stall_s.get(name, {}).items()},
                    "tier_bytes": totals.tier_bytes.get(name, {}),
                }
                for name in sorted({*totals.stall_s, *totals.tier_bytes})
            },
        }


_NOTHING: Final = PlaneReading()


def _no_job() -> JobIdentity:
    """Without a scheduler: what one shell command started belongs together."""
    import pwd

    user = str(os.geteuid())
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"  # noqa: PTH119
    identity = identity_of(os.environ, job_name())
    assert identity is not None
    return replace(identity, user=identity.user or user, name=identity.name or name)
