"""LoaderView: where a store's loader stands and what it delivered, as every framework's loader shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.order import Order
    from headrace.plane import Loader, LoaderStats
    from headrace.plane.batch import Skipped


class LoaderView(Closing):
    """What a framework's loader over a store has in common with `headrace.Loader`.

    A class that inherits it sets `_loader` and delivers the batches in the framework's way.
    """

    _loader: Loader

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; the same on every rank."""
        return len(self._loader)

    def __repr__(self) -> str:
        from headrace.plane.loader import loader_line

        return loader_line(self._loader, type(self).__name__)

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        from headrace.plane.loader import loader_card

        return loader_card(self._loader, type(self).__name__)

    @property
    def order(self) -> Order:
        """Which sample comes when."""
        return self._loader.order

    @property
    def epoch(self) -> int:
        """The epoch that is under way or, between epochs, the one that comes next."""
        return self._loader.epoch

    @property
    def position(self) -> int:
        """Global positions of this epoch that were delivered."""
        return self._loader.position

    @property
    def order_hash(self) -> str:
        """16 hex digits over what this rank delivered in this epoch; see `headrace.Loader`."""
        return self._loader.order_hash

    @property
    def last_order_hash(self) -> str | None:
        """The order hash of the last epoch that was delivered to its end, or None."""
        return self._loader.last_order_hash

    @property
    def stats(self) -> LoaderStats:
        """What was delivered, and how long the consumer waited for it (in TensorFlow: by its clock)."""
        return self._loader.stats

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that were left out so far, in the order in which that was noticed."""
        return self._loader.skipped

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next iterator. Not needed: epochs advance by themselves."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: plain values, under 300 bytes as JSON."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next iterator; exactly what is left is delivered.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End reading ahead. Batches stay valid; the loader can be used again."""
        self._loader.close()
