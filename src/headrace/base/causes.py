"""Causes: why a training step waits for data. One word for each, a sentence about it, and what helps.

The words are the same wherever somebody is told: in a verdict, in what processes and node daemons say to an
agent, in metrics, `headrace top`, `headrace starving`, reports and pages. Every stalled second has exactly one.
A cause cannot be without its texts: this module would not be imported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self


class Cause(StrEnum):
    """Why a step waited; the order is that of a batch's way."""

    _value_: str
    phrase: str  # what was waited for, within a sentence
    sentence: str  # what that means
    remedy: str  # what helps, as a clause: what to do

    def __new__(cls, word: str, phrase: str, sentence: str, remedy: str) -> Self:
        """A word with its texts."""
        assert all((word, phrase, sentence, remedy)), word
        member = str.__new__(cls, word)
        member._value_ = word
        member.phrase, member.sentence, member.remedy = phrase, sentence, remedy
        return member

    START = (
        "start",
        "the epoch's start",
        "An epoch began: workers were started, or what a state had passed was gone through again.",
        "keep workers from epoch to epoch (persistent_workers=True); fewer of them start sooner",
    )
    PREFETCH = (
        "prefetch",
        "its loader's own buffer",
        "Reads began too late: the loader's or the node daemon's own buffer or reads_in_flight were too small.",
        "give the loader a larger buffer (budget_bytes=), and leave reads_in_flight to headrace",
    )
    POLICY = (
        "policy",
        "a rate limit",
        "Reads were held back by a rate that the operator or the controller set.",
        "ask the operator for a larger share, or read less: what a cache serves is not counted",
    )
    WINDOW = (
        "window",
        "room in its window",
        "The node daemon had no room for more batches: the job's own clients kept all that they may.",
        "give the node daemon a larger --window or --job-window, or keep fewer batches",
    )
    DIRECT = (
        "direct",
        "reads round the node daemon",
        "The process read by itself: no node daemon ran, or it had no room.",
        "start the node daemon, or give it more room (--window)",
    )
    NODE = (
        "node",
        "the node daemon",
        "The node daemon was waited for, and did not say why.",
        "look at the node daemon: `headrace top`",
    )
    METADATA = (
        "metadata",
        "opening files",
        "Looking up and opening files took longer than reading them.",
        "pack the files into a store once: `headrace pack DIR STORE`; a store is opened once, not per sample",
    )
    STORAGE = (
        "storage",
        "storage",
        "Storage was waited for, or a sleep, a lock, a network call in your data set's code: nobody saw which.",
        "pack it (`headrace pack`), stage it (`headrace launch --stage`), or keep samples near (cache_dir=)",
    )
    LATENCY = (
        "latency",
        "slow answers of the storage",
        "Each read took long to be answered, while the storage was far from its full rate.",
        "pack small files (`headrace pack`), or keep samples nearer (cache_dir=, `headrace launch --stage`)",
    )
    BANDWIDTH = (
        "bandwidth",
        "the storage's full rate",
        "The storage delivered bytes at its full rate, and training wanted more.",
        "keep a store's samples nearer: cache_dir= on a local disk, ram_bytes=, or `headrace launch --stage`",
    )
    NETWORK = (
        "network",
        "the network",
        "Bytes came over the network, from an object store, too slowly.",
        "keep a store's samples nearer: cache_dir= on a local disk, or `headrace launch --stage`",
    )
    PEER = (
        "peer",
        "another node's disk",
        "Bytes came from another node's disk, which served them too slowly.",
        "stage with more replicas (`headrace launch --stage --replicas 2`), or look at that node's disk",
    )
    MEMORY = (
        "memory",
        "copies out of memory",
        "Bytes were in memory already: copies and messages took the time.",
        "use larger batches",
    )
    DECODE = (
        "decode",
        "decoding and transforms",
        "Making samples took too long: decoding and transforms, or all of your data set's __getitem__.",
        "decode pictures natively (decode=headrace.Images(...)), more workers, cheaper transforms",
    )
    PYTHON = (
        "python",
        "Python code",
        "Batches were ready or being made, but other Python code of the process held the interpreter.",
        "decode in worker processes (num_workers=), and let no other thread compute in Python meanwhile",
    )
    COLLATE = (
        "collate",
        "collating",
        "Putting the samples of a batch together took long.",
        "make collate_fn cheaper (profile it: does it compute, or wait?), or give more workers (num_workers=)",
    )
    TRANSFER = (
        "transfer",
        "copying to the device",
        "Copying batches to pinned memory or to the device took long.",
        "copy to the device while it computes: pin_memory=True and non_blocking=True, one batch ahead",
    )
    SLOW_RANK = (
        "slow_rank",
        "a slower rank",
        "This rank had its data, and waited for another rank that did not.",
        "look at what that rank waits for",
    )
    OTHER = (
        "other",
        "handing over, or what nobody measured",
        "Batches that were ready were handed over, or nobody measured what this wait was for.",
        "look at the longest waits (HEADRACE_TRACE=DIR, then `headrace report`): what they share is a hint",
    )


WORTH_NAMING: Final = 0.01
"""Who waits for a smaller share of its time has no cause to speak of."""

_WORDS: Final = {**{cause.value: cause for cause in Cause}, "limit": Cause.PREFETCH}
"""By word; `limit` was a loader's own buffer in 0.1, and the controller's share where a node daemon said it."""


def cause_of(word: str, *, by_node: bool = False) -> Cause:
    """The cause that a word, perhaps of 0.1 or a node daemon's, means; `OTHER` for one that nobody knows."""
    if by_node and word == "limit":
        return Cause.POLICY
    return _WORDS.get(word, Cause.OTHER)
