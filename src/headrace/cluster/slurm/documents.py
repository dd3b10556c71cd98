"""Documents: the JSON of `squeue` and of `sinfo` or `scontrol show nodes`, as jobs and nodes.

Every release of Slurm shapes it anew. What differs, as far as it is read here:

    21.08, 22.05   numbers are plain; states are one word and a list of flags; `sinfo` has whole nodes
    23.02          numbers that may be unset are {"set", "infinite", "number"}; a node's states are a list
    23.11          a job's states are a list too
    24.05 to 25.x  what a job has of each node lies in job_resources.nodes.allocation
"""

from __future__ import annotations

import json
from typing import Any

from headrace.cluster.hostlist import expand_hosts
from headrace.cluster.slurm.text import gpu_count, job_state, mib, number, parse_gres, task_id
from headrace.cluster.snapshot import Allocation, Job, Node
from headrace.errors import ClusterError

__all__ = ["parse_document", "read_job_document", "read_node_document"]


def parse_document(text: str | bytes, key: str) -> list[dict[str, Any]]:
    """The list of a document, `jobs` or `nodes`.

    Raises:
        ClusterError: it is no JSON, has no such list, or says that Slurm failed.
    """
    try:
        document = json.loads(text)
    except ValueError as e:
        begin = text[:80] if isinstance(text, str) else text[:80].decode(errors="replace")
        raise ClusterError(
            f"Slurm's {key} are no JSON ({e}): they begin {begin!r}.",
            next_step="Its output was cut off, or the JSON plugin is missing; text is read as well.",
        ) from e
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        raise ClusterError(f"Slurm's JSON has no list of {key}.")
    errors = [e for e in document.get("errors") or [] if isinstance(e, dict)]
    if errors and not document[key]:
        said = "; ".join(str(e.get("description") or e.get("error") or e) for e in errors)
        raise ClusterError(f"Slurm's JSON says: {said}.")
    return [entry for entry in document[key] if isinstance(entry, dict)]


def read_node_document(text: str | bytes) -> tuple[Node, ...]:
    """All nodes of a document.

    Raises:
        ClusterError: it cannot be read.
    """
    return tuple(_told(_node, entry, "node") for entry in parse_document(text, "nodes"))


def read_job_document(text: str | bytes) -> tuple[Job, ...]:
    """All jobs of a document; what waits of an array is one of them.

    Raises:
        ClusterError: it cannot be read.
    """
    return tuple(_told(_job, entry, "job") for entry in parse_document(text, "jobs"))


def _told(read: Any, entry: dict[str, Any], kind: str) -> Any:
    try:
        return read(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ClusterError(
            f"Slurm's JSON says of {kind} {entry.get('name') or entry.get('job_id')!r} what cannot be "
            f"read: {e!r}.",
            next_step="Please report it with the version (`scontrol --version`).",
        ) from e


# -- nodes -----------------------------------------------------------------------------------------


def _node(entry: dict[str, Any]) -> Node:
    gres, used = parse_gres(entry.get("gres") or ""), parse_gres(entry.get("gres_used") or "")
    state = entry.get("state") or []
    states = [state] if isinstance(state, str) else state
    flags = entry.get("state_flags") or []
    load = number(entry.get("cpu_load"))
    return Node(
        name=entry["name"],
        states=tuple(word.lower() for word in (*states, *flags)),
        cpus=number(entry.get("cpus")) or 0,
        sockets=number(entry.get("sockets")) or 1,
        cores_per_socket=number(entry.get("cores")) or 1,
        threads_per_core=number(entry.get("threads")) or 1,
        memory_mib=number(entry.get("real_memory")) or 0,
        gpus=sum(gpu.number for gpu in gres),
        gpu_type=next((gpu.type for gpu in gres if gpu.type), ""),
        gpus_allocated=tuple(sorted({i for gpu in used for i in gpu.indices})),
        cpus_allocated=number(entry.get("alloc_cpus")) or 0,
        cpu_load=None if load is None else load / 100,
        memory_allocated_mib=number(entry.get("alloc_memory")) or 0,
        memory_free_mib=number(entry.get("free_mem", entry.get("free_memory"))),
        partitions=_names(entry.get("partitions")),
        features=_names(entry.get("active_features") or entry.get("features")),
        reason=entry.get("reason") or "",
        architecture=entry.get("architecture") or "",
    )


def _names(said: Any) -> tuple[str, ...]:
    if isinstance(said, str):
        return tuple(name for name in said.split(",") if name)
    return tuple(said or ())


# -- jobs ------------------------------------------------------------------------------------------


def _job(entry: dict[str, Any]) -> Job:
    nodes = expand_hosts(entry.get("nodes") or "")
    cpus = number(entry.get("cpus")) or 0
    node_count = number(entry.get("node_count")) or len(nodes) or 1
    tres = entry.get("tres_alloc_str") or entry.get("tres_req_str") or ""
    memory = next((t[4:] for t in tres.split(",") if t.startswith("mem=")), "")
    allocations = _allocations(entry, nodes, cpus) if nodes else ()
    reason = entry.get("state_description") or entry.get("state_reason") or ""
    return Job(
        job_id=task_id(str(entry["job_id"]), *_array(entry)),
        name=entry.get("name") or "",
        user=entry.get("user_name") or str(entry.get("user_id", "")),
        account=entry.get("account") or "",
        partition=entry.get("partition") or "",
        state=job_state(entry.get("job_state") or ""),
        reason="" if reason == "None" else reason.replace("_", " "),
        qos=entry.get("qos") or "",
        nodes=nodes,
        allocations=allocations,
        node_count=node_count,
        cpu_count=cpus,
        gpu_count=sum(a.gpu_count for a in allocations)
        or gpu_count(tres)
        or _gpus_wanted(entry, node_count),
        memory_mib=mib(memory),
        submitted_s=_seconds(entry.get("submit_time")),
        started_s=_seconds(entry.get("start_time")),
        limit_minutes=number(entry.get("time_limit")),
        priority=number(entry.get("priority")) or 0,
    )


def _array(entry: dict[str, Any]) -> tuple[str | None, str | None]:
    array_id = number(entry.get("array_job_id"))
    if not array_id:
        return None, None
    task = number(entry.get("array_task_id"))
    waiting = entry.get("array_task_string") or ""
    return str(array_id), waiting or (None if task is None else str(task))


def _seconds(value: Any) -> float | None:
    found = number(value)
    return float(found) if found else None


def _allocations(
    entry: dict[str, Any], nodes: tuple[str, ...], cpus: int
) -> tuple[Allocation, ...]:
    gres = entry.get("gres_detail") or []
    parts = _parts(entry.get("job_resources") or {})
    cores = [_cores(part) for part in parts]
    # CPUs are threads; the document counts cores.
    threads = cpus / sum(cores) if sum(cores) else 0.0
    made = []
    for i, node in enumerate(nodes):
        part = parts[i] if i < len(parts) else {}
        gpus = parse_gres(gres[i]) if i < len(gres) else ()
        made.append(
            Allocation(
                node=part.get("nodename") or part.get("node_name") or part.get("name") or node,
                cpus=round(cores[i] * threads)
                if i < len(cores) and threads
                else cpus // len(nodes),
                memory_mib=_memory(part),
                gpu_count=sum(gpu.number for gpu in gpus),
                gpus=tuple(sorted({index for gpu in gpus for index in gpu.indices})),
            )
        )
    return tuple(made)


def _parts(resources: dict[str, Any]) -> list[dict[str, Any]]:
    """What a job has of each of its nodes, in their order."""
    nodes = resources.get("nodes")
    parts = nodes.get("allocation") if isinstance(nodes, dict) else resources.get("allocated_nodes")
    if isinstance(parts, dict):  # 21.08: by the node's number
        parts = [part for _, part in sorted(parts.items(), key=lambda item: int(item[0]))]
    return [part for part in parts or [] if isinstance(part, dict)]


def _cores(part: dict[str, Any]) -> int:
    sockets = part.get("sockets") or {}
    found = 0
    for socket in sockets.values() if isinstance(sockets, dict) else sockets:
        cores = socket.get("cores") or {} if isinstance(socket, dict) else {}
        for core in cores.values() if isinstance(cores, dict) else cores:
            status = core.get("status") if isinstance(core, dict) else core
            found += "UNALLOCATED" not in str(status).upper()
    return found


def _memory(part: dict[str, Any]) -> int:
    memory = part.get("memory")
    if isinstance(memory, dict):
        return number(memory.get("allocated")) or 0
    return number(part.get("memory_allocated", memory)) or 0


def _gpus_wanted(entry: dict[str, Any], nodes: int) -> int:
    tasks = number(entry.get("tasks")) or 1
    for key, times in (("job", 1), ("node", nodes), ("socket", nodes), ("task", tasks)):
        if count := gpu_count(entry.get(f"tres_per_{key}") or ""):
            return count * times
    return 0
