"""Text: a proof as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.text import counted
from headrace.insight.proof.epochs import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.proof.epochs import EpochProof
    from headrace.insight.proof.same import Sameness
    from headrace.insight.proof.verify import LoaderProof, Proof

__all__ = ["proof_lines", "same_lines"]

_EPOCHS_SHOWN: Final = 20
_RANKS: Final = ("rank", "ranks")


def proof_lines(proof: Proof) -> Iterator[str]:
    """What is proved, and what is not and why."""
    if not proof.loaders:
        yield f"{proof.path}: no step was written: nothing is proved."
        return
    for loader in proof.loaders:
        yield from _loader_lines(loader)
    if proof.holds:
        epochs = sum(e.state is State.WHOLE for loader in proof.loaders for e in loader.epochs)
        whole = f" in {counted(epochs, 'whole epoch')}" if epochs else ", as far as the run went"
        what = "sample" if not any(loader.unchecked for loader in proof.loaders) else "position"
        yield f"Proved: every {what} came exactly once over all ranks{whole}."
    else:
        yield "Not proved that every sample came exactly once: see above."


def _loader_lines(loader: LoaderProof) -> Iterator[str]:
    history = loader.history
    about = history.about
    ranks = " then ".join(counted(a.world_size, *_RANKS) for a in history.attempts[:8])
    order = about.order
    mode = f"{order.get('mode')}, seed {order.get('seed')}" if order else "order of its own"
    yield f"{about.source or about.framework}: {about.samples:,} samples, {mode}, {ranks}"
    if not loader.ours:
        yield "  its order is not headrace's: only two runs can be compared"
        return
    for epoch in loader.epochs[:_EPOCHS_SHOWN]:
        yield from _epoch_lines(epoch)
    if len(loader.epochs) > _EPOCHS_SHOWN:
        rest = loader.epochs[_EPOCHS_SHOWN:]
        wrong = [epoch for epoch in rest if epoch.state in (State.WRONG, State.LEFT)]
        yield f"  {counted(len(rest), 'more epoch')}, {len(wrong)} of them not whole"
        for epoch in wrong[:_EPOCHS_SHOWN]:
            yield from _epoch_lines(epoch)
    if history.again:
        yield (
            f"  {counted(history.again, 'step')} came again after a resume; only the last delivery counts"
        )
    if loader.unchecked:
        yield f"  only positions were checked: {loader.unchecked}"
    for gap in (*loader.gaps, *history.odd):
        yield f"  ! {gap}"


_STATES: Final = {
    State.WHOLE: "every sample exactly once",
    State.RUNNING: "each sample once up to position {positions:,} of {length:,}, where the run stands",
    State.LEFT: "left early at position {positions:,} of {length:,}: the rest never came",
    State.WRONG: "WRONG",
}


def _epoch_lines(epoch: EpochProof) -> Iterator[str]:
    state = _STATES[epoch.state].format(positions=epoch.positions, length=epoch.length)
    notes = [counted(epoch.steps, "step"), f"hash {epoch.order_hash:016x}"]
    if epoch.resumed_at:
        notes.append("resumed at position " + ", ".join(f"{at:,}" for at in epoch.resumed_at[:4]))
    if epoch.padded:
        notes.append(f"{counted(epoch.padded, 'sample')} again to fill the last step")
    if epoch.dropped:
        notes.append(f"{counted(epoch.dropped, 'sample')} dropped, as tail='drop' says")
    yield f"  epoch {epoch.epoch}: {state} ({'; '.join(notes)})"
    for finding in epoch.findings:
        begin, end = finding.positions
        where = f"{begin:,}" if end - begin == 1 else f"{begin:,} to {end - 1:,}"
        yield f"    {finding.kind}: position{'s' if end - begin != 1 else ''} {where}: {finding.where}"
    if epoch.more:
        yield f"    and {epoch.more:,} more"


def same_lines(same: Sameness) -> Iterator[str]:
    """Whether two runs had one order."""
    first = same.first
    if first is None:
        if same.positions:
            told = f"{counted(same.positions, 'position')} of {counted(same.epochs, 'epoch')}"
            yield f"Same order: {same.a} and {same.b} delivered the same samples at {told}."
        else:
            yield f"Nothing to compare: {same.a} and {same.b} have no epoch in common."
        return
    yield f"Not the same order: {first.what}."
    for path, where in ((same.a, first.a), (same.b, first.b)):
        if where:
            yield f"  in {path}: {where}"
