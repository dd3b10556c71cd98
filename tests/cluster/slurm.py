"""Slurm: a real one of several nodes on this machine, for tests: own munge, configuration and ports.

    with Slurm(folder) as slurm:
        slurm.command("sinfo")                       # or any program with `slurm.environment`
        job = slurm.sbatch("#!/bin/sh\nhostname\n", "--nodes=4")
        slurm.kill_node("node1"); slurm.start_node("node1")

Each node is a `slurmd` with a port of its own; all share host name, file system and loopback, so a process
knows its node by SLURMD_NODENAME. Nothing is isolated: without cgroups Slurm ends what is below a job's script,
but not what it left to itself. Nodes are larger than the machine
(`config_overrides`): their CPUs, memory and GPUs are what they are told to have.

Daemons run in the foreground as children of this process, and are ended by process id with all that they
started. A daemon ends when this process is killed, too. No packaged service is used or started. Root is
not needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests_shared import comes_true, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "squeue",
    "scontrol",
    "sinfo",
    "scancel",
)
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# The daemon dies with whoever started it, and is the parent of whatever its children leave behind: so all
# that a node runs is found below its slurmd.
_START = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl(1, 15)  # PR_SET_PDEATHSIG
libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
os.execv(sys.argv[1], sys.argv[1:])
"""

# Jobs start, and dead nodes are missed, within a second or two; the defaults are minutes.
SETTINGS = {
    "ClusterName": "lab",
    "SlurmUser": "{user}",
    "SlurmdUser": "{user}",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "AuthInfo": "socket={folder}/munge/socket",
    "SlurmctldHost": "{host}(127.0.0.1)",
    "SlurmctldPidFile": "{folder}/slurmctld.pid",
    "SlurmdPidFile": "{folder}/%n/slurmd.pid",
    "SlurmdSpoolDir": "{folder}/%n/spool",
    "StateSaveLocation": "{folder}/state",
    "SlurmctldLogFile": "{folder}/slurmctld.log",
    "SlurmdLogFile": "{folder}/%n/slurmd.log",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "JobCompType": "jobcomp/filetxt",
    "JobCompLoc": "{folder}/jobcomp.log",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "GresTypes": "gpu",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0",
    "SlurmdTimeout": "5",
    "MessageTimeout": "5",
    "InactiveLimit": "0",
    "KillWait": "2",
    "MinJobAge": "300",
    "CompleteWait": "0",
    "PropagateResourceLimits": "NONE",
    "TreeWidth": "64",
}


def missing() -> list[str]:
    """Programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]


class Slurm:
    """A cluster.

    Args:
        folder: of its own; it is made. Its path must be short: the socket of munge lies in it.
        nodes: node0, node1, ...
        gpus: of each node, of type "h100".
        cpus: of each node, half of them on each of two sockets.
        memory_mib: of each node.
        settings: of slurm.conf, on top of `SETTINGS`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        gpus: int = 2,
        *,
        cpus: int = 8,
        memory_mib: int = 16000,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.nodes = tuple(f"node{i}" for i in range(nodes))
        self.gpus = gpus
        self.cpus = cpus
        self.memory_mib = memory_mib
        self.settings = dict(settings or {})
        self.conf = self.folder / "slurm.conf"
        self.ports: tuple[int, ...] = ()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of this process, so that Slurm's programs find this cluster, and no job or other cluster."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**own, "SLURM_CONF": str(self.conf), "PATH": SEARCH}

    env = environment

    # -- starting and stopping ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, seconds: float = 30.0) -> None:
        """Start all daemons, and return when every node is idle."""
        for attempt in range(3):
            self._configure()
            try:
                self._start_all(seconds)
            except (
                RuntimeError
            ):  # somebody else took a port meanwhile, if it goes well the next time
                self.stop()
                if attempt == 2:
                    raise
            else:
                return

    def stop(self) -> None:
        """End every daemon and all that they run; sockets and links to devices are removed, logs stay."""
        for name in self.nodes:
            self.kill_node(name)
        # The kernel's list of children may miss one while others come and go.
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) not in self._pids():
                with contextlib.suppress(OSError):
                    if f"SLURM_CONF={self.conf}".encode() in (process / "environ").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)
        for name in ("slurmctld", "munged"):
            if (daemon := self._daemons.pop(name, None)) is not None:
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        shutil.rmtree(self.folder / "devices", ignore_errors=True)
        for path in self.folder.rglob("*"):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()

    def _pids(self) -> set[int]:
        return {os.getpid(), *(daemon.pid for daemon in self._daemons.values())}

    def _configure(self) -> None:
        self.ports = tuple(free_ports(1 + len(self.nodes)))
        for name in ("munge", "state", *(f"{node}/spool" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o711)
        key = self.folder / "munge/key"
        key.unlink(missing_ok=True)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        facts = {"folder": self.folder, "host": host, "user": _user()}
        lines = [f"{k}={v.format(**facts)}" for k, v in {**SETTINGS, **self.settings}.items()]
        lines.append(f"SlurmctldPort={self.ports[0]}")
        gres = f"Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
            f"Sockets=2 CoresPerSocket={self.cpus // 2} ThreadsPerCore=1 RealMemory={self.memory_mib} "
            f"Feature=lab,{name} State=UNKNOWN {gres}"
            for name, port in zip(self.nodes, self.ports[1:], strict=True)
        ]
        lines += [
            "PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=60 DefMemPerCPU=1000",
            f"PartitionName=debug Nodes={self.nodes[0]} MaxTime=30 DefMemPerCPU=1000",
        ]
        self.conf.write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text(self._gres())
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _gres(self) -> str:
        # Indices need character devices, one for each GPU: any will do, and a link to one is one. A GRES
        # that is only counted makes nodes invalid.
        devices = self.folder / "devices"
        devices.mkdir(exist_ok=True)
        for i in range(self.gpus):
            path = devices / f"gpu{i}"
            path.unlink(missing_ok=True)
            path.symlink_to(os.devnull)
        lines = ["AutoDetect=off"]
        lines += [
            f"NodeName={name} Name=gpu Type=h100 File={devices}/gpu{i}"
            for name in self.nodes
            for i in range(self.gpus)
        ]
        return "\n".join(lines) + "\n"

    def _start_all(self, seconds: float) -> None:
        munge = self.folder / "munge"
        self._start(
            "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        if not comes_true((munge / "socket").is_socket, seconds):
            raise self._failure("munged")
        self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in self.nodes:
            self._start_slurmd(name)
        self.wait_for_nodes("idle", seconds=seconds)

    def _start_slurmd(self, name: str) -> None:
        self._start("slurmd", "-D", "-f", str(self.conf), "-N", name, key=name)

    def _start(self, program: str, *arguments: str, key: str | None = None) -> None:
        path = shutil.which(program, path=SEARCH)
        assert path is not None, f"{program} is missing"
        with (self.folder / f"{key or program}.out").open("ab") as out:
            self._daemons[key or program] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, path, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def _failure(self, name: str) -> RuntimeError:
        return RuntimeError(f"{name} does not start, or not in time:\n{self._logs()}")

    def _logs(self) -> str:
        logs = [
            *sorted(self.folder.glob("*.out")),
            self.folder / "slurmctld.log",
            self.folder / "munge/log",
        ]
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in logs if p.exists())

    # -- nodes -------------------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        """What a power cut does: slurmd and all that runs below it is gone at once."""
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGSTOP)  # it starts nothing more
        # A process that forks meanwhile is found the next time around.
        while below := [pid for pid in descendants(daemon.pid) if _state(pid) not in "ZX"]:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def lose_node(self, name: str) -> None:
        """Kill a node, and tell slurmctld so, as a site's health check would; alone it takes some 20 s."""
        self.kill_node(name)
        self.command("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def start_node(self, name: str, seconds: float = 30.0) -> None:
        """Start a node again, and return when it is idle."""
        self._start_slurmd(name)
        self.wait_for_nodes("idle", "mixed", "allocated", names=(name,), seconds=seconds)

    def wait_for_nodes(
        self, *states: str, names: Sequence[str] = (), seconds: float = 30.0
    ) -> None:
        """Return when nodes (all, unless named) are in one of states, as `sinfo -o %T` prints them."""
        asked = names or self.nodes
        if not comes_true(lambda: set(self.node_states(*asked)) <= set(states), seconds):
            found = f"{','.join(asked)}: {self.node_states(*asked)}, not {' or '.join(states)}"
            raise RuntimeError(f"{found}\n{self._logs()}")

    def node_states(self, *names: str) -> list[str]:
        """The states of nodes, as `sinfo -o %T` prints them."""
        ended = self.run(
            "sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"
        )
        states = (
            dict(line.split() for line in ended.stdout.splitlines()) if not ended.returncode else {}
        )
        return [states.get(name, "unknown") for name in names]

    def processes(self, name: str) -> list[int]:
        """All processes below a node's slurmd, stepds and jobs."""
        daemon = self._daemons.get(name)
        return [p for p in descendants(daemon.pid) if _state(p) not in "ZX"] if daemon else []

    def stop_controller(self) -> None:
        """slurmctld is gone; jobs go on."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait(20)

    def start_controller(self, seconds: float = 30.0) -> None:
        """Start slurmctld again, with the state it had."""
        self._start("slurmctld", "-D", "-f", str(self.conf))
        if not comes_true(lambda: self.run("scontrol", "ping").stdout.count("UP") == 1, seconds):
            raise self._failure("slurmctld")

    # -- commands ----------------------------------------------------------------------------------

    def run(self, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program where it finds this cluster; it may fail."""
        return subprocess.run(
            command, env=self.environment, input=text, text=True, capture_output=True, check=False,
            timeout=60,
        )  # fmt: skip

    def command(self, *command: str, text: str | None = None) -> str:
        """What a program prints, run where it finds this cluster; it must succeed."""
        ended = self.run(*command, text=text)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}{ended.stdout}"
        return ended.stdout

    def sbatch(self, script: str, *options: str) -> str:
        """Submit a script; the job's id. Its output is in `folder` unless an option says where."""
        return self.command(
            "sbatch", "--parsable", f"--chdir={self.folder}", *options, text=script
        ).strip()

    def said_of(self, job_id: str) -> str:
        """All that Slurm knows of a job, for a test that fails."""
        return self.run("scontrol", "show", "job", job_id).stdout + self._logs()

    def job_state(self, job_id: str) -> str:
        """A job's state, in Slurm's long words."""
        return self.command(
            "squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"
        ).strip()

    def wait_for_job(self, job_id: str, *states: str, seconds: float = 60.0) -> str:
        """Return when a job is in one of some states; by default when it is over."""
        wanted = set(states) or {
            "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        }  # fmt: skip
        deadline = time.monotonic() + seconds
        while set(self.job_state(job_id).split()) - wanted:
            assert time.monotonic() < deadline, (
                f"job {job_id} is {self.job_state(job_id)}, not {wanted}:\n"
                + self.command("scontrol", "show", "job", job_id)
            )
            time.sleep(0.05)
        return self.job_state(job_id)

    def begin_now(self, job_id: str) -> None:
        """A job that was requeued waits two minutes; this one does not.

        The credential of its first start is revoked up to the second in which it was requeued: a
        second start within that second would be refused ("Job credential revoked").
        """
        self.command("scontrol", "update", f"jobid={job_id}", "starttime=now+2")

    def end_time_limit(self, job_id: str, seconds: int = 1) -> None:
        """Let a running job's time be over in seconds, not minutes. Slurm looks every 30 s."""
        self.command("scontrol", "update", f"jobid={job_id}", f"endtime=now+{seconds}")

    def cancel_all(self) -> None:
        """No job is left, nor what it ran, and all nodes that run are idle."""
        self.run("scancel", f"--user={_user()}")
        running = [name for name in self.nodes if name in self._daemons]
        self.wait_for_nodes("idle", names=running)
        # Without cgroups, what a job left to itself outlives it.
        comes_true(lambda: not any(map(self.processes, running)), 1.0)
        for pid in [pid for name in running for pid in self.processes(name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def heal(self) -> None:
        """Whatever a test did to it: every daemon runs, every node is idle, and there is no job."""
        if "slurmctld" not in self._daemons:
            self.start_controller()
        for name in self.nodes:
            if name not in self._daemons:
                self.start_node(name)
        self.cancel_all()


def descendants(pid: int) -> list[int]:
    """All processes below one, its children before theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
