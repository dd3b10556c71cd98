"""Records: the blocks of `KEY=VALUE` lines that `scontrol show` prints.

A value of the user's (a name, a path, a comment) may hold anything but a line break; keys are therefore looked
for at the beginnings of lines, and blocks begin where a line begins with the kind's first key.
"""

from __future__ import annotations

__all__ = ["blocks", "task_id", "value"]


def blocks(text: str, key: str) -> list[str]:
    """The parts of a text that begin with a line of `KEY=`."""
    if not text.startswith(f"{key}="):
        begin = text.find(f"\n{key}=")
        if begin < 0:
            return []
        text = text[begin + 1 :]
    return [f"{key}={part}" for part in text[len(key) + 1 :].split(f"\n{key}=")]


def value(block: str, key: str, default: str = "") -> str:
    """The value of a key that stands first in its line, up to the line's end."""
    begin = block.find(f"\n   {key}=")
    if begin < 0:
        return default
    begin += len(key) + 5
    return (
        block[begin : block.find("\n", begin)].rstrip()
        if "\n" in block[begin:]
        else block[begin:].rstrip()
    )


def task_id(job_id: str, array_id: str | None, task: str | None) -> str:
    """As users know it: "17", "17_3", "17_[4-9]"."""
    if not array_id or task is None:
        return job_id
    task = task.partition("%")[0]
    return f"{array_id}_{task}" if task.isdigit() else f"{array_id}_[{task}]"
