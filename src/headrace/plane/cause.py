"""Cause: why a training step waited for data, in one word, and a sentence for who does not know the word.

The words are the same everywhere: in a verdict, in what processes tell their node's agent, in `headrace
top` and `headrace starving`, in reports and pages. Every stalled second has exactly one.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SENTENCES", "Cause"]


class Cause(StrEnum):
    """Why a step waited; the order is that of a batch's way."""

    LIMIT = "limit"
    POLICY = "policy"
    METADATA = "metadata"
    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    NETWORK = "network"
    PEER = "peer"
    DECODE = "decode"
    PYTHON = "python"
    COLLATE = "collate"
    TRANSFER = "transfer"
    SLOW_RANK = "slow_rank"
    OTHER = "other"

    @property
    def sentence(self) -> str:
        """What it means, as a sentence."""
        return SENTENCES[self]


SENTENCES: Final[Mapping[Cause, str]] = MappingProxyType(
    {
        Cause.LIMIT: "Reads began too late: a knob or a budget of this loader let too few be under way.",
        Cause.POLICY: "Reads were held back by a rate that the operator or the controller set.",
        Cause.METADATA: "Looking up and opening files took longer than reading them.",
        Cause.LATENCY: "Each read took long to be answered, while the storage was far from its full rate.",
        Cause.BANDWIDTH: "The storage delivered bytes at its full rate, and training wanted more.",
        Cause.NETWORK: "Bytes came over the network, from an object store, too slowly.",
        Cause.PEER: "Bytes came from another node's disk, which served them too slowly.",
        Cause.DECODE: "Turning bytes into samples took more processor time than there was.",
        Cause.PYTHON: "Batches were ready or being made, but other Python code of the process held the "
        "interpreter.",
        Cause.COLLATE: "Putting the samples of a batch together took long.",
        Cause.TRANSFER: "Copying batches to pinned memory or to the device took long.",
        Cause.SLOW_RANK: "This rank had its data, and waited for another rank that did not.",
        Cause.OTHER: "Nothing that was measured explains this wait.",
    }
)
"""One plain sentence a cause."""
