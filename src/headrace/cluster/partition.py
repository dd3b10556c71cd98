"""Partition: where a job can go, in which order to try, and how long it may be there."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from headrace.cluster.time_limit import read_minutes, slurm_time, time_text
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from headrace.cluster.request import Request
    from headrace.cluster.site import Site
    from headrace.cluster.snapshot import ClusterSnapshot, Partition

__all__ = ["Refused", "candidates", "time_limit"]


class Refused(ClusterRequestError):
    """Why one partition cannot take a request; another may.

    Attributes:
        near: how near it comes; 0: not at all.
    """

    def __init__(self, message: str, *, near: int = 0, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.near = near


def candidates(
    request: Request, snapshot: ClusterSnapshot, site: Site, *, minutes: int | None
) -> list[Partition]:
    """Partitions to try, the first one first: the named one, or the site's, the default, and the others.

    Args:
        request: what is asked for.
        snapshot: has the partitions.
        site: what is special.
        minutes: the time asked for; None: not said, or no limit.

    Raises:
        ClusterRequestError: a named partition does not exist, or takes no jobs; there is none at all.
    """
    known = {partition.name: partition for partition in snapshot.partitions}
    if not known:
        raise ClusterRequestError(f"the cluster {snapshot.cluster} has no partitions.")
    if request.partition:
        # A list is Slurm's: the job goes where it can start first.
        return [_named(known, name) for name in request.partition.split(",") if name]
    kind = site.node_types.get(request.node_type)
    if kind is not None and kind.partition:
        return [_named(known, kind.partition)]
    first = [site.gpu_partition] if request.gpus else [site.cpu_partition]
    if (
        request.gpus
        and site.short_partition
        and minutes
        and minutes <= (site.short_time or minutes)
    ):
        first.insert(0, site.short_partition)
    names = [_named(known, name).name for name in first if name]
    open_ones = [p for p in snapshot.partitions if p.state == "up"]
    with_gpus = {node.name for node in snapshot.nodes if node.gpus}
    if not request.gpus:
        names += [p.name for p in open_ones if not with_gpus.intersection(p.nodes)]
    names += [p.name for p in open_ones if p.is_default]
    names += [p.name for p in open_ones]
    if not names:
        raise ClusterRequestError(f"no partition of {snapshot.cluster} is up.")
    return [known[name] for name in dict.fromkeys(names)]


def _named(known: dict[str, Partition], name: str) -> Partition:
    partition = known.get(name)
    if partition is None:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ClusterRequestError(
            f"there is no partition {name!r}.",
            next_step=f"{hint}There are: {', '.join(sorted(known))}; and gpuxN, cpunN, cpu_mini.",
        )
    if partition.state in ("drain", "inactive"):
        raise ClusterRequestError(
            f"partition {name} is {partition.state}: it takes no jobs now.",
            next_step="Name another one, or try again later.",
        )
    return partition


def time_limit(
    partition: Partition, asked: str, site: Site, remarks: list[str], *, bare_hours: bool
) -> tuple[str, bool]:
    """The limit as Slurm writes it ("": the partition's default), and whether it was cut.

    Args:
        partition: where the job goes.
        asked: as it was written; "" where nothing was.
        site: with its own defaults and limits.
        remarks: what is decided is said here.
        bare_hours: a number alone is hours, and zero the default, as HAL has it.

    Raises:
        ClusterRequestError: it is no time.
    """
    special = site.of(partition.name)
    limits = [limit for limit in (partition.max_minutes, special.time_max) if limit is not None]
    most = min(limits, default=None)
    minutes = special.time
    if not asked and minutes is None:
        return "", False
    if asked:
        minutes = read_minutes(asked, bare_hours=bare_hours)
        if asked.isdigit() and minutes:
            unit = "hours (HAL's way)" if bare_hours else "minutes (Slurm's way)"
            remarks.append(f"time {asked}: {unit}, {time_text(minutes)}.")
        if minutes == 0 and bare_hours:
            remarks.append("time 0: the default is taken.")
            return (slurm_time(special.time) if special.time else ""), False
        minutes = minutes or None
    if most is not None and (minutes is None or minutes > most):
        if asked:
            remarks.append(
                f"time {time_text(minutes)} is cut to {time_text(most)}, "
                f"the most in partition {partition.name}."
            )
        return slurm_time(most), bool(asked)
    return slurm_time(minutes), False
