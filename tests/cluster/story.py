"""One job's life as docs/howto/lost-node.md tells it, by the same commands on every executor: a node dies.

`tell` types the commands and returns the terminal's log; `check_page` compares that with the page, or writes it
there: `--update-log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import headrace as hr
from cluster.launch.launching import MARK, Launch
from documents.blocks import blocks_of
from documents.output import difference
from headrace.base.peers import user_name
from recipes.jobs import tools
from tests_shared import ROOT, until, write_real_images

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pytest

PAGE = ROOT / "docs/howto/lost-node.md"
TRAINER = ROOT / "tests/cluster/launch/train_ddp.py"
RANKS, PER_CLASS = 2, 64
SAMPLES = 3 * PER_CLASS
WAIT_S = 200.0


def add_option(parser: pytest.Parser) -> None:
    """`--update-log`, of whichever folder of tests is collected."""
    with contextlib.suppress(ValueError):  # another folder's conftest has added it
        parser.addoption("--update-log", action="store_true", help=f"write the logs of {PAGE.name}")


class Terminal:
    """A shell in a folder, and all that was typed and printed there."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment, self.log = folder, environment, ""

    def run(self, command: str) -> str:
        """Run a command unseen."""
        ended = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{self.log}"
        assert "Traceback" not in ended.stdout
        return ended.stdout

    def type(self, command: str) -> str:
        """Run a command that the log shows."""
        printed = self.run(command)
        self.log += f"$ {command}\n{printed}"
        return printed


def environment_of(executor: str, launch: Launch) -> dict[str, str]:
    """Of the terminal, and so of the job's processes; nothing of the tester's own home is seen."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE", "XDG_"))}
    folder = launch.folder / "tools"
    path = f"{folder if folder.is_dir() else tools(folder)}:{own['PATH']}"
    return {
        **own, "HEADRACE_EXECUTOR": executor, "HEADRACE_HISTORY": str(launch.folder / "history"),
        "HOME": str(launch.folder), "TMPDIR": str(launch.disk), MARK: launch.mark, "PATH": path,
        "COLUMNS": "100", "NO_COLOR": "1",
    }  # fmt: skip


def steps_of(folder: Path) -> list[list[tuple[int, list[int]]]]:
    """(step, samples) of all ranks, for each life of the job."""
    lives: dict[int, list[tuple[int, list[int]]]] = {}
    for path in (folder / "steps").glob("rank-*"):
        life = lives.setdefault(int(path.name.split(".")[1]), [])
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        life += [(step, indices) for _, step, indices in map(json.loads, whole)]
    return [lives[life] for life in sorted(lives)]


def tell(
    executor: str,
    launch: Launch,
    kill_node: Callable[[str], object],
    hurry: Callable[[str], object] = str,
    more: Mapping[str, str] | None = None,
) -> str:
    """Init, submit, watch, a node lost, resumed, report, usage; the log.

    Args:
        executor: by its name.
        launch: its folder is the reader's.
        kill_node: what a power cut does to the node of this name.
        hurry: lets a job that was requeued start before its scheduler's pause is over.
        more: of the environment.
    """
    folder, began_s = launch.folder, time.time()
    terminal = Terminal(folder, {**environment_of(executor, launch), **(more or {})})
    write_real_images(folder / "images", PER_CLASS)
    shutil.copy(TRAINER, folder / "train.py")
    (script,) = (b.text for b in blocks_of(PAGE) if b.remarks.get("file") == "job.sh")
    (folder / "job.sh").write_text(
        script.replace("train.py", "train.py checkpoints steps --pace 0.8")
    )

    terminal.type("headrace cluster init --out site.yaml")
    submit = "headrace cluster batch --nodes 2 --gpus 2 --time 10m job.sh"
    job = terminal.type(submit).split()[-1]

    def status() -> dict[str, Any]:
        return json.loads(terminal.run(f"headrace cluster status {job} --json"))["jobs"][0]

    def behind_a_checkpoint() -> bool:
        steps = [step for life in steps_of(folder) for step, _ in life]
        return len(steps) >= RANKS * 8 and hr.checkpoint.latest(folder / "checkpoints") is not None

    def agents_know_it() -> bool:
        rows = json.loads(terminal.run("headrace cluster queue --json"))["running"]
        return any(row["stall"] is not None for row in rows)

    assert until(behind_a_checkpoint, WAIT_S), status()
    assert until(agents_know_it, 60.0), status()
    terminal.type(f"headrace cluster status {job}")
    terminal.type("headrace cluster queue")
    nodes = status()["nodes"]
    assert len(set(nodes)) == 2
    terminal.log += f"$ # {nodes[1]} loses its power\n"
    kill_node(nodes[1])
    assert until(lambda: status()["restarts"] > 0, 90.0), status()
    saved = hr.checkpoint.latest(folder / "checkpoints")
    hurry(job)
    assert until(lambda: len(steps_of(folder)) > 1 and steps_of(folder)[1], WAIT_S), status()
    terminal.type(f"headrace cluster status {job}")
    terminal.type(f"headrace cluster wait {job}")
    assert str(status()["resumed"]).startswith("resumed at step ")
    terminal.type(f"headrace cluster logs {job} | grep -o 'job {job}[:,].*'")
    terminal.type(f"headrace job-report {job}")
    # Books of a cluster hold the jobs of other tests, too: those were over before.
    terminal.type(f"headrace usage --by job --last {time.time() - began_s:.0f}s")

    # What the model has learned from, as its last checkpoint says: each sample once.
    loads = (
        hr.checkpoint.load(folder / "checkpoints", rank=r, world_size=RANKS) for r in range(RANKS)
    )
    assert (
        sum(load.tree["parts"]["seen"]["counts"].numpy() for load in loads).tolist()
        == [1] * SAMPLES
    )
    # What was done: the steps up to the checkpoint, and those of the second life, are the whole epoch.
    first, second = steps_of(folder)
    assert saved is not None
    assert [step for step, _ in first if step > saved]  # the loss cost something: it is made up for
    done = [i for step, indices in first if step <= saved for i in indices]
    assert sorted(done + [i for _, indices in second for i in indices]) == list(range(SAMPLES))
    # A torchrun that dies with its node leaves its own folder of logs.
    left = lambda: [text for text in launch.left() if "/torchelastic_" not in text]  # noqa: E731
    assert until(lambda: not left(), 15.0), left()
    return terminal.log


def named(log: str, folder: Path) -> str:
    """The log with names that are the same for everybody: of the user, the folder, jobs and nodes."""
    log = log.replace(str(folder), "~").replace(user_name(os.geteuid()), "anna")
    log = re.sub(r"\bddp-[0-9a-f]{6}\b", "ddp-1f3a9c", log)
    nodes = dict.fromkeys(re.findall(r"-([0-9a-f]{8})\b", log))
    for letter, part in zip("abcdefgh", nodes, strict=False):
        log = log.replace(part, letter * 8)
    return "".join(f"{line.rstrip()}\n" for line in log.splitlines())


_VARIES = {
    r"^  (?!GPU-hours|steps).*\n": "",  # what a report says of CPUs, memory and causes is the machine's
    r"^(headrace: job .* nodes,).*": r"\1",
    r"^(wasted GPU-hours:).*": r"\1",
    r"(is lost:).*": r"\1",
    r"\border [0-9a-f]{16}": "order",
    r"\bat least (?=[\d,]+ samples)": "",  # where a rank was killed between two messages
    r"\n {40,}\S.*": "",  # a line of a table that goes on below
    r"[,;] resumed\b.*?(\)|$)": "",  # not known yet when a status was asked for early
    r"\brestarted (once|\d+ times)": "restarted",
    r"node\[[\d,-]+\]": "node[]",
    r"-([a-h])\1{7}\b": "-node",
    r"under 0\.0001": "0.0",
    r"\b\d+[smh]\b": "0s",
    r"^\S+ +idle .*\n": "",
}


def compared(log: str) -> str:
    """Without what is another thing each time; a cluster that ran others' jobs before gives another number."""
    (job,) = re.findall(r"^Submitted batch job (\S+)$", log, flags=re.MULTILINE)
    log = re.sub(
        rf"(^|\b(?:job|status|wait|logs|report|for|anna) ){job}\b",
        r"\1JOB",
        log,
        flags=re.MULTILINE,
    )
    for pattern, kept in _VARIES.items():
        log = re.sub(pattern, kept, log, flags=re.MULTILINE)
    return log


def check_page(executor: str, log: str, folder: Path, config: pytest.Config) -> None:
    """The page shows this log, but for numbers; or is written so."""
    log = named(log, folder)
    remark = f"def test_the_story_of_a_job_on_{executor}("
    (shown,) = (
        block for block in blocks_of(PAGE)
        if block.language == "console" and executor in block.remarks.get("run by", "").rpartition("_on_")[2]
    )  # fmt: skip
    assert remark in (ROOT / shown.remarks["run by"].partition("::")[0]).read_text()
    if config.getoption("--update-log", default=False):
        text = PAGE.read_text()
        assert text.count(shown.text) == 1
        PAGE.write_text(text.replace(shown.text, log))
    else:
        differs = difference(compared(shown.text), compared(log))
        assert not differs, f"{differs}\nall of it:\n{log}"
