"""The matrix: launchers that people use, and how each is started on this machine.

A launcher starts one script of `scripts/` and returns how that ended. Heavy frameworks live in a layer over the
environment (`make .venv-launchers`); a launcher whose programs or packages are missing says which.
"""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import headrace as hr
from launchers.judge import SAMPLES, Ended, outcome
from tests_shared import ROOT, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.slurm import Slurm
    from launchers.judge import Outcome

__all__ = ["LAUNCHERS", "Launcher", "Run", "make_data", "torchrun"]

SCRIPTS = Path(__file__).with_name("scripts")
LAYER = ROOT / ".venv-launchers/bin/python"
RUN_S = 240.0
STORES = ("loader", "store")
LOADERS = (*STORES, "drop-in", "torch")
SHARDED = (*LOADERS, "drop-in sharded", "torch sharded")
IN_FRAMEWORKS = ("store", "drop-in", "torch")  # those that start anew for each loader
COMMAND = "import sys; sys.argv[0] = {name!r}; from {module} import {entry}; {entry}()"


def make_data(folder: Path) -> Path:
    """Write 600 samples, as files and as a packed store; each holds its own number."""
    (folder / "files/all").mkdir(parents=True)
    for number in range(SAMPLES):
        (folder / f"files/all/{number:03d}.txt").write_text(str(number))
    hr.pack(folder / "files", folder / "packed.hr")
    return folder


@dataclass
class Run:
    """One start of a script by a launcher.

    Attributes:
        data: what `make_data` wrote.
        folder: of this run alone: records in `out`, logs beside it.
        script: a file of `scripts/`.
        words: its arguments behind the folders.
        slurm: for launchers that need one.
        python: the interpreter that has what the script imports.
    """

    data: Path
    folder: Path
    script: str
    words: tuple[str, ...]
    slurm: Slurm | None = None
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True)

    @property
    def out(self) -> Path:
        """Where processes leave what they consumed."""
        return self.folder / "out"

    @property
    def program(self) -> list[str]:
        """The script and its arguments."""
        return [str(SCRIPTS / self.script), str(self.data), str(self.out), *self.words]

    @property
    def env(self) -> dict[str, str]:
        """This process's, without a job around it; with Slurm, where its programs find the cluster."""
        strange = (
            "SLURM", "SBATCH", "OMPI", "PMI", "PMIX", "HEADRACE_", "TORCHELASTIC", "RANK", "WORLD", "LOCAL_",
            "MASTER_", "GROUP_",
        )  # fmt: skip
        base = os.environ if self.slurm is None else self.slurm.environment
        own = {k: v for k, v in base.items() if k == "SLURM_CONF" or not k.startswith(strange)}
        if self.slurm is None:
            own.pop("SLURM_CONF", None)
        return {
            **own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
            "HEADRACE_HISTORY": str(self.folder / "history"), "HEADRACE_RUNTIME_DIR": str(self.folder / "r"),
            "XDG_CONFIG_HOME": str(self.folder / "config"), "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "disabled", "TQDM_DISABLE": "1",
            "PYTHONWARNINGS": "default::UserWarning", **self.environment,
        }  # fmt: skip

    def run(self, *commands: Sequence[str]) -> Ended:
        """Run commands side by side, each the head of a process group; the worst exit status counts."""
        log = self.folder / "log"
        with log.open("ab") as out:
            processes = [
                subprocess.Popen(
                    command, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )
                for command in commands
            ]  # fmt: skip
        until_s = time.monotonic() + RUN_S
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, until_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                codes.append(124)
        return Ended(max(codes, key=abs), log.read_text(errors="replace"))

    def submit(self, body: str, *options: str) -> Ended:
        """Submit a batch script and wait for its end."""
        assert self.slurm is not None
        log = self.folder / "log"
        words = [
            "sbatch",
            "--wait",
            "--time=10",
            f"--output={log}",
            *options,
            str(self.folder / "job.sh"),
        ]
        (self.folder / "job.sh").write_text(f"#!/bin/bash\n{body}\n")
        submitted = subprocess.run(
            words,
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        printed = log.read_text(errors="replace") if log.exists() else ""
        return Ended(submitted.returncode, printed + submitted.stderr)

    def type_into(self, command: Sequence[str], line: str) -> Ended:
        """Start an interactive shell on a terminal of its own, type a line, and leave."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe(command[0], list(command), {**self.env, "PS1": "$ "})
        text, until_s, typed = b"", time.monotonic() + RUN_S, False
        while time.monotonic() < until_s:
            try:
                text += os.read(terminal, 4096)
            except OSError:  # the shell has gone
                break
            if not typed and b"Granted job allocation" in text:
                os.write(terminal, f"{line}; exit $?\n".encode())
                typed = True
        else:
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        return Ended(
            os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode(errors="replace")
        )


@dataclass(frozen=True)
class Launcher:
    """A way in which people start training.

    Attributes:
        name: in the table.
        start: it, for one run.
        processes: that consume.
        script: of `scripts/`.
        loaders: that it is tried with.
        words: more arguments of the script.
        apart: a start for each loader; else one for all.
        packages: that must be importable; the layer has those that the environment lacks.
        programs: that must be there.
        slurm: whether it needs one.
        refuses: whether it contradicts itself, so that nothing may be delivered.
        light: loaders with which it is cheap enough for `make test`.
    """

    name: str
    start: Callable[[Run], Ended]
    processes: int
    script: str = "plain.py"
    loaders: tuple[str, ...] = LOADERS
    words: tuple[str, ...] = ()
    apart: bool = False
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    slurm: bool = False
    refuses: bool = False
    light: tuple[str, ...] = ()

    def python(self) -> str | None:
        """The interpreter that has its packages; None: none has."""
        return next((p for p in (sys.executable, str(LAYER)) if _has(p, self.packages)), None)

    def missing(self) -> str | None:
        """What this machine lacks for it."""
        programs = [name for name in self.programs if shutil.which(name) is None]
        if programs:
            return f"no {', '.join(programs)}"
        if self.python() is None:
            return f"no {', '.join(self.packages)}: `make launchers` installs them"
        return None

    def outcomes(
        self, data: Path, folder: Path, slurm: Slurm | None, loaders: Sequence[str] | None = None
    ) -> list[Outcome]:
        """Start it, with each loader alone or with all at once; what each loader delivered."""
        chosen = [name for name in self.loaders if loaders is None or name in loaders]
        python = self.python()
        assert python is not None
        results = []
        for number, names in enumerate([[name] for name in chosen] if self.apart else [chosen]):
            words = (*self.words, "--loaders", *names)
            here = slurm if self.slurm else None
            run = Run(data, folder / str(number), self.script, words, here, python)
            ended = self.start(run)
            results += [outcome(self.name, name, ended, run.out) for name in names]
        return results


@cache
def _has(python: str, packages: tuple[str, ...]) -> bool:
    if not Path(python).exists():
        return False
    code = "import importlib.util as i, sys; sys.exit(any(i.find_spec(n) is None for n in sys.argv[1:]))"
    return subprocess.run([python, "-c", code, *packages], check=False).returncode == 0


def headrace(run: Run, name: str, *words: str) -> list[str]:
    """A command of ours, as its entry point runs it."""
    module, entry = ("headrace.cli", "main") if name == "headrace" else ("headrace.cli.sw", name)
    return [run.python, "-c", COMMAND.format(name=name, module=module, entry=entry), *words]


def torchrun(run: Run, *options: str) -> list[str]:
    """One node's torchrun."""
    return [run.python, "-m", "torch.distributed.run", *options, *run.program]


# -- each launcher ---------------------------------------------------------------------------------


def _python(run: Run) -> Ended:
    return run.run([run.python, *run.program])


def _srun(run: Run) -> Ended:
    return run.run(["srun", "--ntasks=4", "--time=10", run.python, *run.program])


def _srun_exported(run: Run) -> Ended:
    """What an earlier experiment left in the shell contradicts what srun says."""
    run.environment.update(RANK="0", WORLD_SIZE="1")
    return _srun(run)


def _srun_lightning(run: Run) -> Ended:
    # Lightning wants to be told so much, and takes interactive jobs for none. It would look for the first node
    # by its name, which the tests' nodes have in Slurm only.
    run.environment["MASTER_ADDR"] = "127.0.0.1"
    words = [
        "srun",
        "--nodes=1",
        "--ntasks=2",
        "--ntasks-per-node=2",
        "--job-name=train",
        "--time=10",
    ]
    return run.run([*words, run.python, *run.program])


def _sbatch_body(run: Run) -> Ended:
    return run.submit(shlex.join([run.python, *run.program]), "--ntasks=4")


def _sbatch_srun(run: Run) -> Ended:
    return run.submit(f"srun {shlex.join([run.python, *run.program])}", "--ntasks=4", "--nodes=2")


def _sbatch_torchrun(run: Run) -> Ended:
    """As PyTorch's own examples have it: a step with a task for each node, which starts the node's ranks."""
    port = free_ports(1)[0]
    words = torchrun(
        run, "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}",
        "--node-rank=RANK_OF_NODE",
    )  # fmt: skip
    command = shlex.join(words).replace("RANK_OF_NODE", "$SLURM_NODEID")
    return run.submit(
        f"srun bash -c {shlex.quote(command)}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
    )


def _sbatch_mpirun(run: Run) -> Ended:
    # All nodes of the tests' Slurm are one host, and mpirun's own daemons cannot be started twice there.
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "ras", "^slurm", "--mca", "plm",
             "isolated", "-n", "2", run.python, *run.program]  # fmt: skip
    return run.submit(shlex.join(words), "--ntasks=4")


def _swrun_shell(run: Run) -> Ended:
    return run.type_into(
        headrace(run, "swrun", "-p", "gpux4"), shlex.join([run.python, *run.program])
    )


def _cluster_run(run: Run) -> Ended:
    return run.run(
        headrace(run, "headrace", "cluster", "run", "-g", "4", "--", run.python, *run.program)
    )


def _launch(framework: str) -> Callable[[Run], Ended]:
    def start(run: Run) -> Ended:
        options = ("--framework", framework, "--ranks-per-node", "2", "--no-agent", "--no-daemon")
        local = ("--local", str(run.folder))
        return run.run(headrace(run, "headrace", "launch", *options, *local, *run.program))

    return start


def _torchrun(run: Run) -> Ended:
    return run.run(torchrun(run, "--standalone", "--nproc-per-node=2"))


def _torchrun_two_nodes(run: Run) -> Ended:
    where = (
        "--nnodes=2",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_ports(1)[0]}",
    )
    return run.run(*(torchrun(run, *where, f"--node-rank={node}") for node in range(2)))


def _accelerate(run: Run) -> Ended:
    # With --cpu it starts one process, whatever the number; the script asks for CPUs itself.
    return run.run(
        [run.python, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
         "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_ports(1)[0]}", *run.program]
    )  # fmt: skip


def _mpirun(run: Run) -> Ended:
    return run.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", run.python, *run.program]
    )


def _ray(run: Run) -> Ended:
    """Ray gives its own daemons 30 s to start, which a busy machine may take longer for."""
    for _ in range(4):
        ended = _python(run)
        if "node timed out during startup" not in ended.text:
            break
        (run.folder / "log").unlink()
    return ended


def _deepspeed(run: Run) -> Ended:
    run.environment["DS_ACCELERATOR"] = "cpu"
    return run.run(
        [run.python, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_ports(1)[0]}",
         *run.program]
    )  # fmt: skip


SLURM = {"slurm": True, "programs": ("srun", "sbatch")}
APART = {"loaders": IN_FRAMEWORKS, "apart": True}
LIGHTNING = {"script": "lightning_fit.py", "packages": ("lightning",), **APART}
TRAINER = {"script": "hf_trainer.py", "packages": ("transformers",), **APART}

LAUNCHERS = (
    Launcher("python", _python, 1, light=STORES[:1]),
    Launcher("srun -n 4", _srun, 4, light=STORES[:1], **SLURM),
    Launcher(
        "srun -n 4, RANK=0 WORLD_SIZE=1 exported", _srun_exported, 4, loaders=STORES, refuses=True,
        light=STORES[:1], **SLURM,
    ),
    Launcher("sbatch --ntasks=4, python", _sbatch_body, 1, light=STORES[:1], **SLURM),
    Launcher("sbatch --ntasks=4, srun", _sbatch_srun, 4, **SLURM),
    Launcher("sbatch, srun, torchrun", _sbatch_torchrun, 4, "ddp.py", SHARDED, **SLURM),
    Launcher(
        "sbatch --ntasks=4, mpirun -n 2", _sbatch_mpirun, 2, slurm=True, programs=("sbatch", "mpirun"),
        light=STORES[:1],
    ),
    Launcher("shell of swrun -p gpux4", _swrun_shell, 1, light=STORES[:1], **SLURM),
    Launcher("headrace cluster run -g 4", _cluster_run, 1, light=STORES[:1], **SLURM),
    Launcher("headrace launch, plain", _launch("plain"), 2, light=STORES[:1]),
    Launcher("headrace launch, torch", _launch("torch"), 2, "ddp.py", SHARDED),
    Launcher(
        "headrace launch, mpi", _launch("mpi"), 2, loaders=STORES, programs=("mpirun",)
    ),
    Launcher("torchrun, 1 node", _torchrun, 2, "ddp.py", SHARDED),
    Launcher("torchrun, loader made first", _torchrun, 2, "ddp.py", STORES, ("--early",)),
    Launcher("torchrun, 2 nodes", _torchrun_two_nodes, 4, "ddp.py", SHARDED),
    Launcher("torchrun, 2 workers a loader", _torchrun, 2, "ddp.py", SHARDED, ("--workers", "2")),
    Launcher("mp.spawn", _python, 2, "spawn.py", SHARDED, light=SHARDED),
    Launcher("mp.spawn, loader made first", _python, 2, "spawn.py", STORES, ("--early",)),
    Launcher("Lightning's own", _python, 2, **LIGHTNING),
    Launcher("Lightning's own, in its hook", _python, 2, words=("--hook",), **LIGHTNING),
    Launcher("Lightning under torchrun", _torchrun, 2, **LIGHTNING),
    Launcher("Lightning under torchrun, in its hook", _torchrun, 2, words=("--hook",), **LIGHTNING),
    Launcher("Lightning under srun", _srun_lightning, 2, **LIGHTNING, **SLURM),
    Launcher("Accelerate", _accelerate, 2, "accelerated.py", SHARDED, packages=("accelerate",)),
    Launcher(
        "Accelerate, prepare", _accelerate, 2, "accelerated.py", LOADERS, ("--prepare",),
        packages=("accelerate",),
    ),
    Launcher("Trainer of Hugging Face", _torchrun, 2, **TRAINER),
    Launcher("Trainer of Hugging Face, prepare", _torchrun, 2, words=("--prepare",), **TRAINER),
    Launcher("Ray Train", _ray, 2, "ray_train.py", SHARDED, packages=("ray",)),
    Launcher("DeepSpeed", _deepspeed, 2, "deepspeed_train.py", SHARDED, packages=("deepspeed",)),
    Launcher("mpirun -n 2", _mpirun, 2, programs=("mpirun",), light=STORES[:1]),
    Launcher(
        "Jupyter kernel in sbatch --ntasks=4", _sbatch_body, 1, "notebook.py", packages=("ipykernel",), **SLURM
    ),
)  # fmt: skip
