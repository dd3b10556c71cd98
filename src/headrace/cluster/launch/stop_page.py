"""StopPage: by which the ranks of a node say how far they are, and learn where to stop together.

Shared memory without a name (memfd) that the node's supervisor makes and its ranks map, so that a look at
it costs a rank a microsecond per step: `_Header`, and a `RankSlot` for each local rank. All numbers are aligned
64-bit words, written whole.

Ranks that train together must leave together: one that stops a step earlier than the others leaves them
waiting in a collective for ever. So:

1. A rank that arrives at its n-th check writes n, then looks at `hold`.
2. Who wants to stop sets `hold` on all nodes, waits until every rank's write before its look is seen, and
   takes the largest n anywhere, M. Every rank that comes to M + 1 sees `hold`, and waits there.
3. `stop_at` = M + 1 is written on all nodes, once and for all: ranks that wait at an earlier check go on, at
   M + 1 all leave. Where no rank takes part yet M is 0: each leaves at the first check that it comes to.

Nobody is waited for in step 2, so ranks inside a collective cannot block it. `StopAgreement` is the first
node's side of it: a state machine that is given the nodes' counts and the time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.base.text import printable
from headrace.errors import LaunchError

# -- the page ------------------------------------------------------------------------------------------

PAGE_VARIABLE = "HEADRACE_LAUNCH_PAGE"
SETTLE_S = 0.05
"""Between `hold` and looking at the counts: any write before a look is seen long before."""

_MAGIC = 0x45474150_4C525248  # "HRRLPAGE"
_VERSION = 3
_WAIT_S = 60.0
_POLL_S = 0.002
_TEXT_BYTES = 200


class RankNote(NamedTuple):
    """A copy of what a rank has said.

    Attributes:
        checks: how often it asked whether to stop.
        leaving: whether it was told to, and leaves.
        pid: its process; 0: its script does not take part.
        epoch, position, order_hash, seed: where its loader is.
        steps: of the whole run, restarts included.
        saved: steps at the last save that is whole on the disk; 0: none.
        resumed, resumed_epoch, resumed_position: steps of the checkpoint that it began from, and where its
            loader stood then; 0: it began anew.
        code: its exit status as shells have it, 128 + its signal; 0: it ended well, or runs.
        failed_ns: when it failed, by its node's clock.
        error: last line of the exception that ended it; "" where none is known.
    """

    checks: int
    leaving: int
    pid: int
    epoch: int
    position: int
    order_hash: int
    seed: int
    steps: int
    saved: int
    resumed: int
    resumed_epoch: int
    resumed_position: int
    code: int
    failed_ns: int
    error: str

    @property
    def attends(self) -> bool:
        """Whether the rank's script takes part."""
        return self.pid != 0


class _Header(ctypes.Structure):
    """`hold`: whether ranks wait at their next check; `stop_at`: the check at which all leave, once known."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("magic", "version", "ranks", "hold", "stop_at")
    )


class RankSlot(ctypes.Structure):
    """What one rank says, as a `RankNote` in the page's memory; the rank writes it, or torchrun for it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in RankNote._fields[:-1]),
        ("error", ctypes.c_char * _TEXT_BYTES),
    )
    header: _Header
    code: int
    failed_ns: int
    _asked = 0

    @classmethod
    def open(cls, address: str, local_rank: int) -> RankSlot:
        """The slot of this rank in the page that `PAGE_VARIABLE` names."""
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise LaunchError(
                f"{PAGE_VARIABLE} is {address!r}, which cannot be opened: {e.strerror}.",
                next_step="The launcher that started this process is gone, or another user's.",
            ) from e
        try:
            size, data = os.fstat(fd).st_size, os.pread(fd, ctypes.sizeof(_Header), 0)
            header = _Header.from_buffer_copy(data.ljust(ctypes.sizeof(_Header), b"\0"))
            if (header.magic, header.version) != (_MAGIC, _VERSION):
                raise LaunchError(
                    f"{PAGE_VARIABLE} is {address!r}, which is no page of this version of headrace.",
                    next_step="Use the same headrace for `headrace launch` and in the script.",
                )
            if local_rank not in range(header.ranks) or size != _page_bytes(header.ranks):
                raise LaunchError(
                    f"{PAGE_VARIABLE} is for {header.ranks} ranks on this node, this is local rank "
                    f"{local_rank}."
                )
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        slot = cls.from_buffer(memory, _page_bytes(local_rank))
        slot.header = _Header.from_buffer(memory)
        return slot

    def attend(self) -> None:
        """Says that this process takes part, and is waited for."""
        self.pid = os.getpid()

    def check(self) -> bool:
        """Whether to leave now; True on every rank of the job at the same check."""
        header = self.header
        # Counted here: a program that the rank runs may ask, too, and is no rank.
        self._asked += 1
        self.checks = self._asked
        if not header.hold:
            return False
        until_s = time.monotonic() + _WAIT_S
        while (stop_at := header.stop_at) == 0:
            if time.monotonic() > until_s:
                return False  # nobody decides any more: the launcher is gone, and will end us, if it can
            time.sleep(_POLL_S)
        if self._asked < stop_at:
            return False
        self.leaving = 1
        return True

    def resume(self, steps: int, epoch: int, position: int) -> None:
        """Says from where the rank goes on."""
        self.resumed_epoch, self.resumed_position = epoch, position
        self.resumed = steps  # who sees it may read all

    def fail(self, text: str) -> None:
        """Says by which exception the rank ends."""
        shown = printable(text.encode(errors="replace").decode()).encode()[:_TEXT_BYTES]
        self.error = shown.decode(errors="ignore").encode()  # to the last whole character
        self.failed_ns = time.time_ns()

    def end(self, status: int) -> None:
        """Says how the rank ended (negative: by this signal), where nobody who knows better has done so."""
        self.code = self.code or (status if status >= 0 else 128 - status)
        self.failed_ns = self.failed_ns or (time.time_ns() if status else 0)


def _page_bytes(ranks: int) -> int:
    return ctypes.sizeof(_Header) + ctypes.sizeof(RankSlot) * ranks


class StopPage:
    """The supervisor's end, with `slots` for so many ranks of its node."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("headrace-launch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _page_bytes(ranks))
        memory = mmap.mmap(self.fd, _page_bytes(ranks))
        self._header = _Header.from_buffer(memory)
        self.slots = (RankSlot * ranks).from_buffer(memory, ctypes.sizeof(_Header))
        self._header.version, self._header.ranks = _VERSION, ranks
        self._header.magic = _MAGIC

    @property
    def address(self) -> str:
        """Opens it, from any process of this user on this node."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def hold(self) -> None:
        """From now on ranks wait at their next check."""
        self._header.hold = 1

    def furthest(self) -> int:
        """The largest check at which a rank has arrived; look SETTLE_S after `hold`. -1: none takes part."""
        return max((note.checks for note in self.notes() if note.attends), default=-1)

    def stop_at(self, check: int) -> None:
        """All leave at this check, or at the one that was named before: some may have left there."""
        self._header.stop_at = self._header.stop_at or check

    def notes(self) -> list[RankNote]:
        """What each rank has written."""
        rows = [[getattr(slot, name) for name in RankNote._fields] for slot in self.slots]
        return [
            RankNote._make([*numbers, text.decode(errors="replace")]) for *numbers, text in rows
        ]

    def close(self) -> None:
        """Gives the memory back; ranks that have mapped it keep it."""
        if self.fd >= 0:
            del self._header, self.slots
            os.close(self.fd)
            self.fd = -1


# -- the agreement -------------------------------------------------------------------------------------

HOLD_S = 5.0
"""A node that does not count its ranks in this time is left out: it is about to be lost."""


class StopPhase(StrEnum):
    """How far an agreement is."""

    HOLDING = "holding"
    LEAVING = "leaving"
    NOBODY = "nobody"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why the ranks are asked to leave, by which signal (0: none), and how long they have."""

    text: str
    number: int
    within_s: float

    @property
    def cancels(self) -> bool:
        """Whether somebody wants the job to end for good."""
        return self.number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopAgreement:
    """One request to leave; `check` is the one at which all leave, once that is known."""

    def __init__(self, reason: StopReason, now_s: float) -> None:
        self.reason = reason
        self.phase = StopPhase.HOLDING
        self.check = 0
        self._asked_s = now_s
        self._until_s = now_s + HOLD_S

    def counted(self, furthest: list[int | None], now_s: float) -> bool:
        """Told the nodes' counts (-1: no rank takes part; None: no answer yet); whether that decides it."""
        most = max((n for n in furthest if n is not None), default=-1)
        # That nobody takes part is for all to say: ranks that do would not leave at their first check.
        waits = now_s < self._until_s or (most < 0 and not self.reason.cancels)
        if self.phase is not StopPhase.HOLDING or (None in furthest and waits):
            return False
        self.check = max(most, 0) + 1
        self.phase = StopPhase.NOBODY
        if most >= 0:
            self.leaves(now_s)
        return True

    def leaves(self, now_s: float) -> None:
        """Told that ranks leave, perhaps long after nobody took part: from now on they have their time."""
        if self.phase is StopPhase.NOBODY:
            self.phase = StopPhase.LEAVING
            since_s = now_s if self.reason.number else self._asked_s  # the time limit does not wait
            self._until_s = since_s + self.reason.within_s

    def late(self, now_s: float) -> bool:
        """Whether ranks that should have left have not."""
        if self.phase is StopPhase.LEAVING and now_s > self._until_s:
            self.phase = StopPhase.LATE
        return self.phase is StopPhase.LATE

    def overridden(self, reason: StopReason, now_s: float) -> None:
        """A later request that wants more: one that cancels beats one that requeues."""
        if reason.cancels and not self.reason.cancels:
            self.reason = reason
            self._until_s = min(self._until_s, now_s + reason.within_s)
        elif reason.number == self.reason.number == signal.SIGINT:
            self._until_s = now_s  # Ctrl-C a second time: now
