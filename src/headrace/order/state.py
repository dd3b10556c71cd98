"""OrderState: where a run stands, small enough to lie in every checkpoint.

A state is (seed, epoch, global position, order hash), with what it belongs to: the data's
fingerprint and the order's digest. The position counts what was delivered, not what was prefetched,
so a resumed run neither repeats nor misses a sample. It is global and the same on every rank: a run
may go on with another world size, batch size or number of workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import OrderError, StateMismatch
from headrace.order.hash import MASK, combine_hashes
from headrace.order.order import EPOCH_MAX, SEED_MAX, checked, unit_of, window_tokens_of
from headrace.order.token_windows import Windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.order.order import Order

STATE_VERSION = 1

FINGERPRINT_CHARACTERS_MAX = 64  # a SHA-256 in hex; keeps a state below 300 bytes of JSON
_HASH_DIGITS = 16
_OF_SOME = frozenset({"basis", "window_tokens"})  # only states of some orders have them


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """A point in the sequence of all epochs, and what the sequence belongs to.

    Raises:
        OrderError: a value is out of bounds.
    """

    seed: int
    """The order's seed."""

    epoch: int
    """The epoch under way."""

    position: int
    """Global positions of this epoch that were delivered, by all ranks together."""

    order_hash: int = 0
    """Order hash of what was delivered in this epoch: of all ranks where they were added up, of one
    rank otherwise."""

    fingerprint: str
    """Identifies the data (the store's fingerprint); printable ASCII."""

    order_digest: str
    """Identifies the order (`Order.digest`)."""

    basis: tuple[int, ...] = ()
    """What an order rests on beside its digest, see `Order.basis`; of most orders nothing."""

    window_tokens: int = 0
    """Tokens of a window, where windows come: said where the state does not fit; of samples 0."""

    version: int = STATE_VERSION
    """The version of this layout."""

    def __post_init__(self) -> None:
        bounds = {
            "seed": SEED_MAX,
            "epoch": EPOCH_MAX,
            "position": None,
            "order_hash": MASK,
            "window_tokens": None,
        }
        for name, high in bounds.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), 0, high))
        if self.version != STATE_VERSION:
            raise OrderError(
                f"state has version {self.version!r}, expected {STATE_VERSION}.",
                next_step="Resume with the version of headrace that saved it.",
            )
        for number in self.basis:
            checked("basis", number, 0)
        _check_text("fingerprint", self.fingerprint, FINGERPRINT_CHARACTERS_MAX)
        _check_text("order_digest", self.order_digest, _HASH_DIGITS)

    @classmethod
    def begin(cls, order: Order, fingerprint: str, epoch: int = 0) -> OrderState:
        """Return the state at the start of an epoch."""
        return cls(
            seed=order.seed,
            epoch=epoch,
            position=0,
            fingerprint=fingerprint,
            order_digest=order.digest(),
            window_tokens=window_tokens_of(order.describe()),
        )

    def delivered(self, position: int, *hashes: int) -> OrderState:
        """Return the state after a delivery that reached `position`.

        Args:
            position: the global position reached (`Slices.position_after`).
            hashes: the order hashes of what was delivered, one per batch or rank.

        Raises:
            OrderError: the position lies before the one that was reached already.
        """
        if position < self.position:
            raise OrderError(
                f"position is {position}, but {self.position} were delivered already",
            )
        return replace(
            self,
            position=position,
            order_hash=combine_hashes(self.order_hash, *hashes),
        )

    @classmethod
    def keys(cls, saved: Collection[str] = ()) -> set[str]:
        """Of `to_dict`; of those that only some orders' states have, the ones that are in `saved`."""
        return {field.name for field in fields(cls)} - _OF_SOME.difference(saved)

    @staticmethod
    def share_out(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of one of the ranks that go on where others stopped, as `to_dict` does.

        What those had hashed of the epoch is given to rank 0, so that the ranks' hashes go on to add up to
        the epoch's.

        Args:
            states: of all ranks that stopped.
            rank: that goes on.

        Raises:
            ValueError: they did not stop at one place.
            OrderError: a state is damaged.
        """
        loaded = [OrderState.from_dict(state) for state in states]
        hashes = combine_hashes(*(state.order_hash for state in loaded))
        (state, *others) = {replace(state, order_hash=0) for state in loaded}
        if others:
            raise ValueError("the ranks stopped at different places")
        return replace(state, order_hash=0 if rank else hashes).to_dict()

    def next_epoch(self) -> OrderState:
        """Return the state at the start of the epoch that follows."""
        return replace(self, epoch=self.epoch + 1, position=0, order_hash=0)

    def check(self, order: Order, fingerprint: str) -> None:
        """Refuse to resume with other data or another order.

        Raises:
            StateMismatch: names the first thing that differs, what was found and expected.
        """
        if self.fingerprint != fingerprint:
            alike = self.seed == order.seed and self.order_digest == order.digest()
            before = "as many as" if alike else "another number than, or in another order than,"
            unit = unit_of(order.describe())
            raise StateMismatch(
                f"state belongs to data {self.fingerprint}, this data is {fingerprint}: "
                "samples were added, removed or changed, or it is another data set. It has "
                f"{order.samples:,} {unit}, {before} the state's.",
                next_step="Resume with the data that the state was saved with, or start anew.",
            )
        if self.seed != order.seed:
            raise StateMismatch(
                f"state was saved with seed {self.seed}, this order has seed {order.seed}.",
                next_step=f"Resume with seed={self.seed}.",
            )
        if self.order_digest != order.digest():
            own = order.describe()
            tokens, own_tokens = self.window_tokens, window_tokens_of(own)
            parameters = {unit_of(own) if name == "samples" else name: own[name] for name in own}
            step = "Resume with the same order and the same parameters."
            if tokens != own_tokens and tokens and own_tokens:
                step = f"Resume with length={tokens}."
            elif isinstance(order, Windows) and tokens:
                # Data, seed and length agree: the other packing is what is left.
                shuffled = replace(order, shuffle=not order.shuffle)
                pack = "cut" if order.pack == "best-fit" else "best-fit"
                alike = shuffled.digest() == self.order_digest
                step = (
                    f"Resume with {f'shuffle={shuffled.shuffle}' if alike else f'pack={pack!r}'}."
                )
            if own.get("mode") == "opportunistic" and not self.basis:
                step = (
                    "It began with what the page cache held then: resume with that run's order (pass its "
                    f"loader.order as order=), or go on with the next epoch: set_epoch({self.epoch + 1})."
                )
            raise StateMismatch(
                f"state was saved with order {self.order_digest}{_windows(tokens)}, this order is "
                f"{order.digest()}{_windows(own_tokens)}: {parameters}.",
                next_step=step
                + (_NEW_PROPORTIONS if self.basis and own.get("mode") == "mixed" else ""),
            )
        if self.position > order.length:
            raise StateMismatch(
                f"state is at position {self.position}, an epoch of this order has "
                f"{order.length} positions.",
                next_step="The state is damaged: use an earlier checkpoint.",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, below 300 bytes without a basis; the hash in hex: it is 64 bits."""
        plain = {**asdict(self), "order_hash": f"{self.order_hash:0{_HASH_DIGITS}x}"}
        plain["basis"] = ",".join(map(str, plain["basis"]))
        return {name: value for name, value in plain.items() if value or name not in _OF_SOME}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> OrderState:
        """Return the state that `to_dict` saved.

        Raises:
            OrderError: a field is missing, unknown, of the wrong type or out of bounds.
        """
        if not isinstance(saved, Mapping):
            raise OrderError(
                f"state is of type {type(saved).__name__}, expected the dict that state_dict() returned.",
                next_step="Look whether the checkpoint holds the loader's state.",
            )
        # The version first: other versions may have other fields.
        if saved.get("version") != STATE_VERSION:
            raise OrderError(
                f"state has version {saved.get('version')!r}, expected {STATE_VERSION}.",
                next_step="Resume with the version of headrace that saved it.",
            )
        names = cls.keys(saved)
        wrong = names.symmetric_difference(saved)
        if wrong:
            what = ", ".join(
                f"{name} {'missing' if name in names else 'unknown'}" for name in sorted(wrong)
            )
            raise OrderError(f"state has wrong fields: {what}.", next_step=_DAMAGED)
        try:
            basis = tuple(map(int, saved["basis"].split(","))) if "basis" in saved else ()
            return cls(**{**saved, "order_hash": int(saved["order_hash"], 16), "basis": basis})
        except (AttributeError, TypeError, ValueError) as e:
            if isinstance(e, OrderError):
                raise
            raise OrderError(f"state cannot be read: {e}.", next_step=_DAMAGED) from e


def _windows(tokens: int) -> str:
    return f" (windows of {tokens:,} tokens)" if tokens else ""


_NEW_PROPORTIONS = " If only the proportions are others: loader.continue_from(state)."

_DAMAGED = "The state is damaged: use an earlier checkpoint."


def _check_text(name: str, value: Any, characters_max: int) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected text")
    plain = value.isascii() and value.isprintable() and '"' not in value and "\\" not in value
    if not plain or not 0 < len(value) <= characters_max:
        raise OrderError(
            f"{name} is {value[:80]!r}, expected 1 to {characters_max} plain ASCII characters",
        )
