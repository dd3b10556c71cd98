"""Randomness: the states of all random number generators that a data set may draw from.

What torch seeds in each worker: torch's, Python's and, where it is installed, numpy's global
generators. A `Snapshot` is cheap to take (20 microseconds); as a plain value, for a checkpoint, it
is about 14 kB of text.
"""

from __future__ import annotations

import base64
import contextlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Snapshot", "generators_of", "kept_randomness", "load_generators", "save_generators"]

SAMPLER_DEPTH = 4
"""Samplers within samplers that are searched for generators: batch sampler, shard, sampler, source."""


class Snapshot(NamedTuple):
    """States of the three global generators."""

    torch_state: bytes
    python_state: tuple[Any, ...]
    numpy_state: tuple[Any, ...]

    @classmethod
    def take(cls) -> Snapshot:
        """Return the states as they are in this process now."""
        state = np.random.get_state()  # noqa: NPY002 - users draw there
        # A dict if the user put another bit generator there, which is then the user's to keep.
        legacy = () if isinstance(state, dict) else (np.asarray(state[1]).tobytes(), *state[2:])
        return cls(torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy)

    def restore(self) -> None:
        """Set the states in this process."""
        torch.set_rng_state(_tensor(self.torch_state))
        random.setstate(self.python_state)
        if self.numpy_state:
            keys, position, has_gauss, gauss = self.numpy_state
            np.random.set_state(  # noqa: NPY002
                ("MT19937", np.frombuffer(keys, np.uint32), position, has_gauss, gauss)
            )

    def plain(self) -> dict[str, Any]:
        """Return the states as text and numbers."""
        version, words, gauss = self.python_state
        return {
            "torch": _text(self.torch_state),
            "python": [version, _text(np.asarray(words, np.uint32).tobytes()), gauss],
            "numpy": [_text(self.numpy_state[0]), *self.numpy_state[1:]]
            if self.numpy_state
            else [],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot that `plain` was made of.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        version, words, gauss = plain["python"]
        legacy = plain["numpy"]
        python_words = tuple(np.frombuffer(_binary(words), np.uint32).tolist())
        return cls(
            _binary(plain["torch"]),
            (version, python_words, gauss),
            (_binary(legacy[0]), *legacy[1:]) if legacy else (),
        )


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Put the global generators back afterwards to where they were."""
    before = Snapshot.take()
    try:
        yield
    finally:
        before.restore()


def generators_of(*roots: Any) -> list[Any]:
    """Return the generators that samplers hold, each once, in an order that depends on code alone.

    Looks at the roots themselves and at what they hold in attributes, `SAMPLER_DEPTH` samplers deep;
    not into data sets.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, _KINDS):
            found.append(thing)
        elif isinstance(thing, torch.utils.data.Sampler) and depth < SAMPLER_DEPTH:
            held = vars(thing)
            for name in sorted(held):
                look(held[name], depth + 1)

    for root in roots:
        look(root, 0)
    return found


def save_generators(generators: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the generators' states as plain values."""
    return [_save(generator) for generator in generators]


def load_generators(generators: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Set the generators' states.

    Raises:
        KeyError, TypeError, ValueError: the states do not fit.
    """
    if len(generators) != len(states):
        raise ValueError(f"{len(states)} generators were saved, {len(generators)} are here")
    for generator, state in zip(generators, states, strict=True):
        if state["kind"] != type(generator).__name__:
            raise ValueError(f"a {state['kind']} was saved where a {type(generator).__name__} is")
        _load(generator, state)


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _save(generator: Any) -> dict[str, Any]:
    kind = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return {"kind": kind, "state": _text(generator.get_state().numpy().tobytes())}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": kind, "state": [version, list(words), gauss]}
    if isinstance(generator, np.random.Generator):
        return {"kind": kind, "state": _listed(generator.bit_generator.state)}
    return {"kind": kind, "state": _listed(generator.get_state(legacy=False))}


def _load(generator: Any, state: Mapping[str, Any]) -> None:
    value = state["state"]
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(_binary(value)))
    elif isinstance(generator, random.Random):
        version, words, gauss = value
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = value
    else:
        generator.set_state(value)


def _listed(value: Any) -> Any:
    """Arrays as lists; numpy takes them back."""
    if isinstance(value, dict):
        return {name: _listed(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _binary(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
