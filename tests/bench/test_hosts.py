"""Ranks on two hosts, which are network namespaces with host names of their own, and share a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from job.network import Network

HERE = Path(__file__).parent
PROGRAM = "from headrace.cli.dlio import main; main()"

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", {"TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "29500"}),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE": "x"}),
    "MPICH": ("PMI_RANK", "PMI_SIZE", {}),
}


@pytest.fixture(scope="module")
def network():
    generated = Network(2)
    yield generated
    generated.close()


class Hosts:
    """Runs of four ranks, two on each host."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        self.named = not network.reason and os.geteuid() == 0
        self.words = [
            "workload=unet3d_h100", "++workload.dataset.num_files_train=32",
            "++workload.dataset.record_length_bytes=4096", "++workload.dataset.num_samples_per_file=1",
            "++workload.dataset.record_length_bytes_stdev=0", "++workload.reader.batch_size=1",
            "++workload.train.epochs=2", "++workload.train.computation_time=0.002",
            "++workload.workflow.checkpoint=False", f"++workload.dataset.data_folder={folder / 'data'}",
            f"++hydra.run.dir={folder / 'out'}",
        ]  # fmt: skip

    def start(self, launcher, *words):
        rank_key, world_key, more = LAUNCHERS[launcher]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI", "OMPI"))}
        ranks = []
        for rank in range(4):
            own = {rank_key: str(rank), world_key: "4", "PYTHONPATH": str(HERE.parent), **more}
            if launcher == "MPICH":
                own["PMI_ID"] = str(rank)  # the ranks' own, unlike other launchers' names of jobs
            ranks.append(subprocess.Popen(
                [*self._on(rank // 2), sys.executable, "-c", PROGRAM, *self.words, *words],
                env=kept | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ))  # fmt: skip
        return ranks

    def _on(self, host):
        if not self.named:
            return self.network.command(host)
        name = ["unshare", "--uts", "sh", "-c", f'hostname host-{host}; exec "$@"', "sh"]
        return [*self.network.command(host), *name]


@pytest.fixture
def hosts(network, tmp_path):
    return Hosts(network, tmp_path)


def ended(ranks):
    return [rank.communicate(timeout=60) for rank in ranks]


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        pytest.param("srun", marks=pytest.mark.slow),
        pytest.param("Open MPI", marks=pytest.mark.slow),
        "MPICH",
    ],
)
def test_ranks_of_two_hosts_are_one_run(hosts, launcher, tmp_path):
    ranks = hosts.start(launcher, "++workload.workflow.generate_data=True")
    message = ended(ranks)
    assert [rank.returncode for rank in ranks] == [0] * 4, message
    assert "Number of Simulated Accelerators: 4" in message[0][0]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["num_accelerators"] == 4
    assert summary["num_hosts"] == (2 if hosts.named else 1)
    assert summary["headrace"]["provenance"]["launcher"] == launcher
    assert summary["headrace"]["bytes"] > 2 * 32 * 4096
    names = {path.name for path in (tmp_path / "out").glob("*_output.json")}
    assert names == {f"{rank}_output.json" for rank in range(4)}


class Mortal:
    """An engine of batches of nothing. Its third accelerator's process is killed in the fourth step."""

    def __init__(self, context):
        self.context = context

    def open(self, split, _, accelerator):
        for step in range(self.context.plans[split].steps):
            if (accelerator, step) == (3, 3):
                self.fourth_step()
            time.sleep(0.01)
            yield b"."

    def fourth_step(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Silent(Mortal):
    """Its third accelerator says when its host may fall silent, and goes on."""

    def fourth_step(self):
        Path(self.context.workload.dataset.data_folder, "now").touch()


def test_a_rank_that_is_killed_on_the_other_host_is_named_by_all(hosts, tmp_path):
    ranks = hosts.start(
        "torchrun", "++workload.workflow.generate_data=True",
        f"++workload.reader.engine=custom:{__name__}:Mortal",
    )  # fmt: skip
    message = ended(ranks)
    assert ranks[3].returncode == -signal.SIGKILL, message[3]
    for rank in range(3):
        assert ranks[rank].returncode > 0
        assert "rank 3 is gone" in message[rank][1], message[rank]
    assert not (tmp_path / "out/summary.json").exists()


@pytest.mark.slow
def test_a_host_that_falls_silent_is_given_up_within_seconds(hosts, tmp_path):
    if hosts.network.reason:
        pytest.skip(f"loopback cannot fall silent: {hosts.network.reason}")
    ranks = hosts.start(
        "torchrun", "++workload.workflow.generate_data=True", "++workload.train.epochs=4000",
        f"++workload.reader.engine=custom:{__name__}:Silent",
    )  # fmt: skip
    link = [*hosts.network.command(1), "ip", "link", "set", "eth0"]
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "data/now").exists():
            assert time.monotonic() < until, ended(ranks)
            time.sleep(0.02)
        subprocess.run([*link, "down"], check=True, timeout=20)
        message = ended(ranks)
    finally:
        subprocess.run([*link, "up"], check=True, timeout=20)
        for rank in ranks:
            rank.kill()
    for rank in (0, 1):
        assert "rank 2 is gone" in message[rank][1] or "rank 3 is gone" in message[rank][1], (
            message[rank]
        )
    for rank in (2, 3):
        assert "rank 0 is gone" in message[rank][1], message[rank]
