"""SampleFiles: which files each sample opens, as far as that is known.

A guess from the dataset's attributes (paths.py) serves at once; it is compared with what samples
really open, and what differs is learned (knowledge.py) and shared with the processes that serve the
same dataset (shared_log.py). Watching ends when it has nothing more to tell. Not safe for concurrent
users: ReadAhead holds its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.plane.ahead.knowledge import Knowledge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.plane.ahead.options import AheadOptions
    from headrace.plane.ahead.paths import PathSource
    from headrace.plane.ahead.shared_log import SharedLog

__all__ = ["SampleFiles"]

GUESS_WATCHED = 64
"""Samples after which a guess that was right is not watched any more."""

GUESS_TRIED = 16
"""Samples after which a guess that was mostly wrong is given up."""

IDLE_AFTER = 256
"""Samples that opened nothing, after which nothing is learned any more."""

SYNC_EVERY = 64
"""Samples that are learned before the others are told."""


class SampleFiles:
    """The files of samples 0..n-1.

    Args:
        samples: how many there are.
        source: the guess, if there is one.
        options: whether to learn, and in how much memory.
        log: shared with the other processes that serve the same dataset.
    """

    def __init__(
        self,
        samples: int,
        source: PathSource | None,
        options: AheadOptions,
        log: SharedLog | None,
    ) -> None:
        self.watching = options.learn
        """Whether samples' opens are to be watched."""
        self.unplanned = 0
        """Files that samples opened and the guess did not name."""
        self._may_learn = options.learn
        self._source = source
        self._knowledge = Knowledge(samples, options.knowledge_bytes)
        self._log = log
        self._log_mark = 0
        self._sent_mark = 0
        self._unsent = 0
        self._watched = 0
        self._opened_any = False
        self._guess_wrong = 0
        self._guess_incomplete = False

    def of(self, key: int | str) -> Sequence[str]:
        """The files of a sample, or the path itself; empty: none, or not known."""
        if isinstance(key, str):
            return (key,)
        if self._knowledge.knows(key):
            return self._knowledge.paths(key)
        if self._source is None:
            return ()
        try:
            return tuple(dict.fromkeys(self._source.paths(key)))
        except Exception:  # noqa: BLE001  # a user's container; the dataset will say it better
            return ()

    def note(self, index: int, paths: list[str]) -> None:
        """A sample that was watched opened these files."""
        self._watched += 1
        self._opened_any = self._opened_any or bool(paths)
        if self._source is not None and self._confirms(index, paths):
            if self._watched >= GUESS_WATCHED and not self._guess_incomplete:
                self.watching = False
            return
        if self._knowledge.learn(index, paths):
            self._unsent += 1
            if self._unsent >= SYNC_EVERY:
                self.sync()
        if self._watched >= IDLE_AFTER and not self._opened_any:
            self.watching = False

    def _confirms(self, index: int, paths: list[str]) -> bool:
        """Whether the guess named exactly what was opened; one that is mostly wrong is given up."""
        guess = () if self._knowledge.knows(index) else self.of(index)
        if list(guess) == paths:
            return True
        self.unplanned += len(set(paths) - set(guess))
        self._guess_incomplete = True
        self._guess_wrong += not set(guess) <= set(paths)
        if 2 * self._guess_wrong > self._watched >= GUESS_TRIED:
            self._source = None
        return False

    def sync(self) -> None:
        """Exchange what was learned with the processes that share the log. Cheap without news."""
        if self._log is None:
            return
        self._unsent = 0
        delta, _ = self._knowledge.learned_since(self._sent_mark)
        if delta:
            self._log.append(delta)
        deltas, self._log_mark = self._log.read_since(self._log_mark)
        for other in deltas:
            self._knowledge.teach(other)
        self._sent_mark = self._knowledge.known

    @property
    def why_none(self) -> str | None:
        """Why no sample's files are known, nor will be; None: they are, or may be."""
        if self._source is not None or self.watching or self._opened_any:
            return None
        if not self._may_learn:
            return "off: no attribute of the dataset names its files, and `learn` is off"
        return f"off: the first {self._watched} samples opened no files"

    def explain(self) -> str:
        """Where paths come from, in a few words."""
        where = "attributes of the dataset" if self._source is not None else "what was learned"
        return f"paths from {where}, {self._knowledge.known} samples learned"

    def forget_parent(self) -> None:
        """In a forked child: the lock is the parent's, what was learned before the fork is ours."""
        self._knowledge.forget_lock()
