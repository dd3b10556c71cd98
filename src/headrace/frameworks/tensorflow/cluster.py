"""Cluster: this process's place among the workers that TF_CONFIG names.

`tf.distribute.MultiWorkerMirroredStrategy` reads TF_CONFIG; whoever started the job wrote it. Only
chief and workers train, so only they share the samples.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from headrace.config import Placement, place_in_job

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["place_in_cluster"]

_VARIABLE = "TF_CONFIG"
_TRAINING = ("chief", "master", "worker")


def place_in_cluster(
    rank: int | None = None,
    world_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Placement:
    """Return rank and world size: as given, else from TF_CONFIG, else as `place_in_job` finds.

    Raises:
        ValueError: only one of the two is given, or TF_CONFIG contradicts itself.
    """
    environment = os.environ if environment is None else environment
    if rank is not None or world_size is not None or not environment.get(_VARIABLE):
        return place_in_job(rank, world_size, environment)
    text = environment[_VARIABLE]
    try:
        config = json.loads(text)
        members = {kind: len(config["cluster"].get(kind, ())) for kind in _TRAINING}
        kind, index = config["task"]["type"], int(config["task"]["index"])
        place = range(members[kind])[index]
        before = sum(members[other] for other in _TRAINING[: _TRAINING.index(kind)])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise ValueError(
            f"{_VARIABLE}={text!r} does not name a chief or worker and its cluster; "
            "pass rank= and world_size=",
        ) from e
    return Placement(before + place, sum(members.values()))
