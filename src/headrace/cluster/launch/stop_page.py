"""StopPage: by which the ranks of a node say how far they are, and learn where to stop together.

Shared memory without a name (memfd) that the node's supervisor makes and its ranks map, so that a look at
it costs a rank a microsecond per step. All values are aligned 64-bit words, written whole:

    header   MAGIC, version, ranks, hold, stop_at
    slot     one for each local rank: the numbers of `RankNote`, the text's length, and the text

Ranks that train together must leave together: one that stops a step earlier than the others leaves them
waiting in a collective for ever. So:

1. A rank that arrives at its n-th check writes n, then looks at `hold`.
2. Who wants to stop sets `hold` on all nodes, waits until every rank's write before its look is seen, and
   takes the largest n anywhere, M. Every rank that comes to M + 1 sees `hold`, and waits there.
3. `stop_at` = M + 1 is written on all nodes: ranks that wait at an earlier check go on, at M + 1 all leave.

Nobody is waited for in step 2, so ranks inside a collective cannot block it. `StopAgreement` is the first
node's side of it: a state machine that is given the nodes' counts and the time.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
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
_VERSION = 2
_HEADER_WORDS = 8
_SLOT_WORDS = 40
_RANKS_MAX = 4096
_WAIT_S = 60.0
_POLL_S = 0.002
_HOLD, _STOP_AT = 3, 4
_ARRIVING, _LEAVING, _PID, _EPOCH = range(4)
_SAVED, _RESUMED, _CODE, _FAILED, _TEXT = 8, 9, 12, 13, 15
_TEXT_BYTES = 8 * (_SLOT_WORDS - _TEXT)


class RankNote(NamedTuple):
    """A slot: what a rank, or torchrun for it, has said.

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


class StopPage:
    """The supervisor's end, for so many ranks of its node."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        nbytes = 8 * (_HEADER_WORDS + _SLOT_WORDS * ranks)
        self.fd = os.memfd_create("headrace-launch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._memory = mmap.mmap(self.fd, nbytes)
        self._words = memoryview(self._memory).cast("Q")
        self._words[1], self._words[2] = _VERSION, ranks
        self._words[0] = _MAGIC

    @property
    def address(self) -> str:
        """Opens it, from any process of this user on this node."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def hold(self) -> None:
        """From now on ranks wait at their next check."""
        self._words[_HOLD] = 1

    def furthest(self) -> int:
        """The largest check at which a rank has arrived; look SETTLE_S after `hold`. -1: none takes part."""
        return max((note.checks for note in self.notes() if note.attends), default=-1)

    def stop_at(self, check: int) -> None:
        """All leave at this check; 0 lets them all go on."""
        if check == 0:
            self._words[_HOLD] = 0
        self._words[_STOP_AT] = check

    def notes(self) -> list[RankNote]:
        """What each rank has written."""
        notes = []
        for at in range(_HEADER_WORDS, len(self._words), _SLOT_WORDS):
            *numbers, length = self._words[at : at + _TEXT].tolist()
            begin = 8 * (at + _TEXT)
            text = self._memory[begin : begin + min(length, _TEXT_BYTES)]
            notes.append(RankNote._make([*numbers, text.decode(errors="replace")]))
        return notes

    def ended(self, local_rank: int, status: int) -> None:
        """Notes how a rank ended, where nobody who knows better has done so."""
        _note_end(self._words, _HEADER_WORDS + _SLOT_WORDS * local_rank, status)

    def close(self) -> None:
        """Gives the memory back; ranks that have mapped it keep it."""
        if self.fd >= 0:
            self._words.release()
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


def _note_end(words: memoryview, at: int, status: int) -> None:
    words[at + _CODE] = words[at + _CODE] or (status if status >= 0 else 128 - status)
    words[at + _FAILED] = words[at + _FAILED] or (time.time_ns() if status else 0)


class RankSlot:
    """A rank's end; torchrun has one, too, for each of its ranks (`attends` is False)."""

    def __init__(self, address: str, local_rank: int, *, attends: bool = True) -> None:
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise LaunchError(
                f"{PAGE_VARIABLE} is {address!r}, which cannot be opened: {e.strerror}.",
                next_step="The launcher that started this process is gone, or another user's.",
            ) from e
        try:
            size, header = os.fstat(fd).st_size, os.pread(fd, 24, 0)
            if len(header) < 24 or struct.unpack("=QQ", header[:16]) != (_MAGIC, _VERSION):
                raise LaunchError(
                    f"{PAGE_VARIABLE} is {address!r}, which is no page of this version of headrace.",
                    next_step="Use the same headrace for `headrace launch` and in the script.",
                )
            (ranks,) = struct.unpack("=Q", header[16:])
            expected = 8 * (_HEADER_WORDS + _SLOT_WORDS * min(ranks, _RANKS_MAX))
            if not 0 <= local_rank < ranks or size != expected:
                raise LaunchError(
                    f"{PAGE_VARIABLE} is for {ranks} ranks on this node, this is local rank {local_rank}."
                )
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self._at = _HEADER_WORDS + _SLOT_WORDS * local_rank
        self._checks = 0
        if attends:
            self.attend()

    def attend(self) -> None:
        """Says that this process takes part, and is waited for."""
        self._words[self._at + _PID] = os.getpid()

    def check(self) -> bool:
        """Whether to leave now; True on every rank of the job at the same check."""
        words = self._words
        self._checks += 1
        words[self._at + _ARRIVING] = self._checks
        if not words[_HOLD]:
            return False
        until_s = time.monotonic() + _WAIT_S
        while (stop_at := words[_STOP_AT]) == 0:
            # Nobody decides any more: the launcher is gone, and will end us, if it can.
            if not words[_HOLD] or time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        if self._checks < stop_at:
            return False
        words[self._at + _LEAVING] = 1
        return True

    def note(self, *, epoch: int, position: int, order_hash: int, seed: int, steps: int) -> None:
        """Says where the loader stands, for the run's manifest."""
        values = (epoch, position, order_hash, seed, steps)
        self._write(_EPOCH, *values)

    def saved(self, steps: int) -> None:
        """Says that what was saved after this step is whole on the disk."""
        self._write(_SAVED, steps)

    def resumed(self, steps: int, epoch: int, position: int) -> None:
        """Says from where the rank goes on."""
        self._write(_RESUMED + 1, epoch, position)
        self._write(_RESUMED, steps)  # who sees it may read all

    def ended(self, status: int) -> None:
        """Says for a rank how it ended; negative: by this signal."""
        _note_end(self._words, self._at, status)

    def failed(self, text: str) -> None:
        """Says by which exception the rank ends."""
        shown = printable(text.encode(errors="replace").decode()).encode()[:_TEXT_BYTES]
        data = shown.decode(errors="ignore").encode()  # to the last whole character
        begin = 8 * (self._at + _TEXT)
        self._memory[begin : begin + len(data)] = data
        self._write(_FAILED, time.time_ns(), len(data))

    def _write(self, first: int, *values: int) -> None:
        for at, value in enumerate(values, self._at + first):
            self._words[at] = value


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
    requeue: bool
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
        self._until_s = now_s + HOLD_S

    def counted(self, furthest: list[int | None], now_s: float) -> bool:
        """Told the nodes' counts (-1: no rank takes part; None: no answer yet); whether that decides it."""
        if self.phase is not StopPhase.HOLDING or (None in furthest and now_s < self._until_s):
            return False
        most = max((n for n in furthest if n is not None), default=-1)
        self.check = most + 1
        self.phase = StopPhase.LEAVING if self.check else StopPhase.NOBODY
        self._until_s = now_s + self.reason.within_s
        return True

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
