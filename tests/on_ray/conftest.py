"""A real Ray cluster; its tests run where Ray is, which is `.venv-launchers` (make test-ray)."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import pytest

from cluster.story import add_option as pytest_addoption  # noqa: F401 - a hook
from headrace.cluster.ray.executor import RayExecutor
from tests_shared import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.register_assert_rewrite("cluster.executor_tests")
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("ray") is None else []


_STORE_BYTES = 80 << 20


class RayCluster:
    """A head without CPUs, and nodes of two each, all of them raylets of this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={**head, "object_store_memory": _STORE_BYTES}
        )
        self.gcs: str = self._cluster.address
        self.address = f"http://{self._cluster.head_node.webui_url}"
        self._nodes: list[Any] = []
        self.heal()

    @property
    def executor(self) -> RayExecutor:
        return RayExecutor(self.address)

    def heal(self) -> None:
        """Three nodes are alive."""
        while len(self._nodes) < 3:
            node = self._cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=_STORE_BYTES)
            self._nodes.append(node)
        assert until(lambda: len(self.executor.snapshot().nodes) == 4, 30)

    def kill_node(self, name: str) -> None:
        """End a node's raylet as if the machine had stopped; its name ends with a piece of its id."""
        (node,) = (n for n in self._nodes if name.endswith(n.node_id[:8]))
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def real_ray() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def ray_cluster(
    real_ray: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RayCluster:
    """The cluster, with all of its nodes, as this process's executor."""
    for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ADDRESS", real_ray.address)
    monkeypatch.setenv("HEADRACE_EXECUTOR", "ray")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    real_ray.heal()
    return real_ray
