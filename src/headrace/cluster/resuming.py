"""resume: a training loop that goes on exactly where its job was stopped, in three lines.

    run = hr.cluster.resume("checkpoints/", loader=loader, model=model, optimizer=optimizer)
    while loader.epoch < 90:
        for batch in loader:
            train(batch)
            if run.step():
                raise SystemExit

What is saved is each part's `state_dict()`; the newest whole checkpoint is loaded at once, whether as many
ranks saved it or not. Joins `should_stop` and `headrace.checkpoint`, and adds nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace import checkpoint
from headrace.cluster.stopping import attend, note_progress, should_stop
from headrace.errors import CheckpointNotFound

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["Resumed", "Stateful", "resume"]


class Stateful(Protocol):
    """A part of a run: a model, an optimizer, a loader, a schedule."""

    def state_dict(self) -> Mapping[str, Any]:
        """What it needs to go on."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Goes on from there."""
        ...


def resume(
    folder: str | os.PathLike[str], *, save_every: int | None = None, **parts: Stateful
) -> Resumed:
    """Loads the newest whole checkpoint of a folder into the parts, if there is one.

    Args:
        folder: that all nodes see; checkpoints go there.
        save_every: save after every so many steps, against ends without a warning (a node that dies); by
            default only when the job is asked to stop.
        parts: what has a `state_dict` and a `load_state_dict`, by names of your choice; a headrace loader
            among them is what makes the order exact.

    Raises:
        ValueError: the checkpoint has other parts, or `save_every` is below 1.
        CheckpointError: another number of ranks saved it, and a part has what nobody can share out.
        CorruptCheckpoint: its bytes are not what was saved.
        StateMismatch: the loader has other data or another order.
    """
    return Resumed(folder, save_every, parts)


class Resumed:
    """A run that can be stopped after any step. Made by `resume`.

    Attributes:
        steps: done so far, those before a restart too.
        restored: whether a checkpoint was loaded.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        save_every: int | None,
        parts: Mapping[str, Stateful],
    ) -> None:
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}, expected 1 or more")
        self.folder = str(Path(folder).absolute())
        self.steps = 0
        self.restored = False
        self._save_every = save_every
        self._parts = dict(parts)
        self._saved = -1
        self._load()
        attend()

    def _load(self) -> None:
        try:
            like = {name: _plain(part.state_dict()) for name, part in self._parts.items()}
            tree = checkpoint.load(self.folder, like={"parts": like}).tree
        except CheckpointNotFound:
            return
        found, expected = set(tree["parts"]), set(self._parts)
        if found != expected:
            raise ValueError(
                f"{self.folder}: the checkpoint has the parts {sorted(found)}, expected {sorted(expected)}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(tree["parts"][name])
        self.steps = self._saved = int(tree["steps"])
        self.restored = True

    def step(self) -> bool:
        """To be called by all ranks after each step: saves when it is time to.

        Returns:
            True: everything is saved and on the disk; leave now.
        """
        self.steps += 1
        for part in self._parts.values():
            if hasattr(part, "order_hash") and hasattr(part, "position"):
                note_progress(part.state_dict(), self.steps)
        stop = should_stop()
        if stop or (self._save_every is not None and self.steps % self._save_every == 0):
            self.save()
        if stop:
            checkpoint.wait()
        return stop

    def save(self) -> None:
        """Saves now, in the background; to be called by all ranks at the same step."""
        if self._saved == self.steps:
            return
        tree = {
            "steps": self.steps,
            "parts": {name: _plain(part.state_dict()) for name, part in self._parts.items()},
        }
        checkpoint.save(tree, self.folder, self.steps)
        self._saved = self.steps


def _plain(value: Any) -> Any:
    """Mappings as dicts: torch's are ordered ones."""
    if hasattr(value, "items"):
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(part) for part in value)
    return value
