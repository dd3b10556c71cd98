"""HAL's short words for sizes: `gpux4` is 4 GPUs, `cpun2` 2 whole nodes, `cpu_mini` a small part of one.

There they are partitions by name with fixed sizes; here any number is one, laid out on the real nodes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace.cluster.request import Request

__all__ = ["Shorthand", "apply_shorthand", "read_shorthand"]

_WORD = re.compile(r"(gpux|cpun|cpux)(\d{1,6})", re.ASCII)

MINI: Final = "cpu_mini"


@dataclass(frozen=True, slots=True)
class Shorthand:
    """What a short word asks for.

    Attributes:
        text: as it was written.
        gpus: in all.
        nodes: whole ones without GPUs; 0 where GPUs are asked.
        mini: only a few CPUs of it.
    """

    text: str
    gpus: int = 0
    nodes: int = 0
    mini: bool = False


def read_shorthand(text: str, partitions: Collection[str]) -> Shorthand | None:
    """The size a partition's name stands for; None if it is a partition, or no such word.

    Raises:
        ClusterRequestError: it asks for none.
    """
    if text in partitions:
        return None
    if text == MINI:
        return Shorthand(text, nodes=1, mini=True)
    match = _WORD.fullmatch(text)
    if match is None:
        return None
    count = int(match[2])
    if count == 0:
        raise ClusterRequestError(
            f"partition {text!r} asks for none.", next_step=f"{match[1]}1 is the least."
        )
    return Shorthand(text, gpus=count) if match[1] == "gpux" else Shorthand(text, nodes=count)


def apply_shorthand(request: Request, short: Shorthand) -> tuple[Request, list[str]]:
    """The request without the short word, and remarks: as with HAL, words for CPUs ignore what is said of GPUs.

    Raises:
        ClusterRequestError: the request says otherwise than the word.
    """
    if request.gpus is not None and request.gpus != short.gpus:
        raise ClusterRequestError(
            f"partition {short.text} stands for {short.gpus} GPUs, --gpus asks for {request.gpus}.",
            next_step="Give one of them.",
        )
    plain = dataclasses.replace(request, partition="")
    if short.gpus:
        return dataclasses.replace(plain, gpus=short.gpus), []
    if request.nodes is not None and request.nodes != short.nodes:
        raise ClusterRequestError(
            f"partition {short.text} stands for {short.nodes} nodes, --nodes asks for {request.nodes}.",
            next_step="Give one of them.",
        )
    remarks = []
    if request.cpus_per_gpu is not None:
        remarks.append(
            f"{short.text} has no GPUs: {request.cpus_per_gpu} CPUs per GPU are ignored."
        )
    return dataclasses.replace(plain, nodes=short.nodes, cpus_per_gpu=None), remarks
