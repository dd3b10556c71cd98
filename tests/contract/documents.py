"""The documents that commands print with `--json`: their keys and the types of the values."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

import headrace as hr
from cluster.clusters import busy, mixed
from contract.commands import commands
from headrace.cli.app import app
from headrace.cluster.executor import Submission, executor
from headrace.cluster.manifest import write_manifest
from headrace.cluster.snapshot import save_snapshot
from headrace.telemetry.accounts import Ledger
from headrace.telemetry.writing import HistoryWriter, file_of
from insight import test_report
from telemetry.test_history import fill
from tests_shared import until, write_photos

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ["workload=default", "++workload.dataset.num_files_train=8",
         "++workload.train.computation_time=0.002", "++workload.train.epochs=1",
         "~workload.workflow.evaluation"]  # fmt: skip

ELSEWHERE = {
    "ab": "tests/insight/test_ab.py",
    "cluster run": "its document is `cluster batch`'s",
    "demo": "tests/demo",
    "export": "serves until it is ended; tests/cli/test_export.py",
    "job": "needs a job's nodes; tests/job",
    "mount": "needs FUSE; tests/cli/test_mount.py",
    "scaling": "tests/recipes/test_scaling_runs.py",
    "stage": "needs a job's nodes; tests/job",
    "tokenize": "needs the extra tokens; tests/store/test_tokenizing.py",
    "unmount": "needs FUSE; tests/cli/test_mount.py",
    "web": "serves until it is ended; tests/web/test_documents.py",
}
"""Commands whose documents cost too much here, and where they are looked at."""

_VARIES = re.compile(
    r"(.*\.)?(bytes_by_tier|changes|clear|confidence_95|cpu_s_per_gb|drift|draft_s|gpus|headline|host_cpuinfo"
    r"|host_meminfo|latency_s_p\d+|memory_limit_bytes|mount|notes|packages|pressure|rotational|stall|steady"
    r"|tiers|value|without|worse|change|change_confidence_95|bound_reason|cpu_quota|look_cpu_s|ram"
    r"|findings\.(cpu|decode|opens|plain|storage))(\[\])?"
)
"""What is null, empty or has other keys as the machine, its load or the data has it: the name alone counts."""


class Shown:
    """Documents, as texts of their keys, by command."""

    def __init__(self) -> None:
        self._root = typer.main.get_command(app)
        self.texts: dict[str, list[str]] = {}

    def run(self, *words: object, code: int = 0, name: str = "") -> dict[str, Any]:
        """Run a command in this process and keep the keys of what it prints."""
        given = [str(word) for word in words]
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            self._root.main(given if "--json" in given else [*given, "--json"])
        assert (ended.value.code or 0) == code, f"{given}: {out.getvalue()}{err.getvalue()}"
        document = json.loads(out.getvalue())
        shown = name or self._named(given)
        self.texts[f"{shown}, ends with {code}"] = sorted(set(keys(document)))
        return document

    def _named(self, words: list[str]) -> str:
        """The words of a command line that name the command."""
        command, names = self._root, []
        for word in words:
            if word not in getattr(command, "commands", {}):
                break
            names.append(word)
            command = command.commands[word]
        return " ".join(names)


def keys(value: Any, path: str = "") -> Iterator[str]:
    """One line for each leaf: where it stands, and of which type it is."""
    # An agent names the jobs of its machine, those of other tests among them.
    names_of_jobs = (
        path in {"elsewhere", "jobs"}
        and isinstance(value, list)
        and not any(isinstance(v, dict) for v in value)
    )
    if names_of_jobs or _VARIES.fullmatch(path):
        yield f"{path}: varies"
    elif isinstance(value, dict) and value:
        for key, below in value.items():
            name = key if key.isidentifier() else "*"
            yield from keys(below, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for below in value:
            yield from keys(below, f"{path}[]")
    else:
        yield f"{path}: {_KINDS[type(value)]}"


_KINDS = {dict: "{}", list: "[]", str: "text", bool: "yes or no", int: "number", float: "number",
          type(None): "null"}  # fmt: skip


def documents_text(folder: Path) -> str:
    """The keys of each command's document."""
    shown = Shown()
    for part in (_stores, _without_daemons, _daemons, _history, _cluster, _bench, _runs):
        part(shown, folder)
    ran = {name.partition(",")[0] for name in shown.texts}
    assert ran | ELSEWHERE.keys() == _with_json()
    lines = []
    for name, found in sorted(shown.texts.items()):
        lines += [f"headrace {name}", *(f"  {line}" for line in found), ""]
    lines.append("Not run here:")
    lines += [f"  headrace {name}: {where}" for name, where in sorted(ELSEWHERE.items())]
    return "\n".join([*lines, ""])


def _with_json() -> set[str]:
    """All commands that have the option."""
    return {
        name.removeprefix("headrace ")
        for name, command in commands()
        if any("--json" in option.opts for option in command.params)
    }


def _stores(shown: Shown, folder: Path) -> None:
    photos = write_photos(folder / "photos", per_class=3)
    shown.run("pack", photos, "a.hr")
    shown.run("index", photos, "b.hr")
    shown.run("append", photos, "a.hr", code=3)
    more = write_photos(folder / "more", per_class=2)
    for path in sorted(more.rglob("*.png")):
        path.rename(path.with_name(f"more{path.name}"))
    shown.run("append", more, "a.hr")
    shown.run("info", "a.hr")
    shown.run("info", photos, name="info, of a folder")
    shown.run("ls", "a.hr")
    shown.run("cat", "a.hr", "cats/0.png")
    shown.run("read", "a.hr", "--batch-size", "4", "--trace", "run")
    shown.run("verify", "a.hr")
    shown.run("repair", "a.hr")
    shown.run("image", "a.hr", "a.img")
    loader = hr.loader("a.hr", 4, cache_dir=folder / "cached", cache_bytes=1 << 30)
    list(loader)
    loader.close()
    shown.run("cache", "ls", "cached")
    shown.run("cache", "rm", "cached", "--all")
    with pytest.MonkeyPatch.context() as patch:  # a busy machine has the same document, later
        patch.setattr("headrace.insight.doctor.reads._LATE_LEAST_S", 60.0)
        patch.setattr(import_module("headrace.insight.doctor.examine"), "_PATIENCE_S", 60.0)
        shown.run("doctor", photos, "--seconds", "1", "--workers", "1")
    volume = next((folder / "a.hr").glob("*.hrv"))
    with volume.open("r+b") as file:
        file.seek(4100)
        file.write(b"damaged")
    shown.run("verify", "a.hr", code=1)


def _without_daemons(shown: Shown, folder: Path) -> None:
    del folder
    shown.run("version")
    shown.run("config")
    shown.run("init", "mine")
    shown.run("init", "--list", name="init, --list")
    shown.run("grafana", "export", "-o", "grafana.json")
    shown.run("grafana", "alerts", "-o", "alerts.yaml")
    shown.run("node", "unit")
    shown.run("info", "nothing.hr", code=3)


def _daemons(shown: Shown, folder: Path) -> None:
    short = Path(tempfile.mkdtemp(prefix="hrk-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_RUNTIME_DIR", str(short / "rt"))
        patch.setenv("HEADRACE_JOB", "alpha")
        try:
            shown.run("node", "status", code=1)
            shown.run("node", "start", "--ram", "64M", "--window", "8M")
            try:
                loader = hr.loader("b.hr", 3, plane="node")
                list(loader)
                # The daemon is told now and then what a loader's steps waited for.
                until(lambda: shown.run("node", "status")["labels"])
                shown.run("top", "--interval", "0.1")
                loader.close()
                shown.run("node", "logs")
            finally:
                shown.run("node", "stop")
            shown.run("top", code=1)
            (folder / "p.yaml").write_text("jobs: {a: {cap: {bytes_per_s: 5M}}}\n")
            shown.run("control", "status", code=1)
            shown.run("control", "start", "--db", folder / "c.db")
            try:
                shown.run("policy", "diff", "p.yaml", code=1)
                shown.run("policy", "apply", "p.yaml")
                shown.run("policy", "get")
                shown.run("control", "status")
                shown.run("control", "logs")
            finally:
                shown.run("control", "stop")
            shown.run("agent", "status", code=1)
            shown.run("agent", "start", "--history", folder / "seen")
            try:
                shown.run("agent", "status")
                shown.run("agent", "logs")
            finally:
                shown.run("agent", "stop")
        finally:
            shutil.rmtree(short)


def _history(shown: Shown, folder: Path) -> None:
    ledger, now = Ledger(), time.time() - 600
    fill(ledger, job="4711", start_s=now, name="resnet", account="physics", alias="4700_11")
    writer = HistoryWriter(file_of(folder / "history", "node0"), "node0")
    assert writer.write(ledger, now=True)
    writer.close()
    shown.run("starving", "--history", "history")
    shown.run("job-report", "4711", "--history", "history")
    shown.run("usage", "--from", "history", "--history", "history")


def _cluster(shown: Shown, folder: Path) -> None:
    save_snapshot(mixed(), folder / "mixed.json")
    save_snapshot(busy(), folder / "busy.json")
    (folder / "job.sh").write_text("#!/bin/bash\nsrun true\n")
    asked = ["cluster", "batch", "--from", "mixed.json", "--dry-run", "-g", "2"]
    # What follows a script is its own.
    shown.run(*asked, "--json", "job.sh", "--", name="cluster batch")
    shown.run("cluster", "queue", "--from", "busy.json")
    shown.run("cluster", "init", "--from", "mixed.json")
    (folder / "fails.sh").write_text("#!/bin/sh\necho said\nexit 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_JOBS_DIR", str(folder / "jobs"))
        here = ("--executor", "local")
        failing = Submission((folder / "fails.sh").read_bytes(), directory=folder)
        job = executor("local").submit(failing)
        shown.run("cluster", "wait", job, *here, code=1)
        for command in ("status", "logs", "resubmit", "cancel"):
            shown.run("cluster", command, job, *here)
        executor("local").wait(executor("local").own(), 30)
    run = {
        "run": {"job": "1", "nodes": ["a"]}, "versions": {"torch": "2.13.0"},
        "order": {"seed": 7, "hash": "00ff"}, "environment": {}, "result": {"wall_s": 1.0},
    }  # fmt: skip
    write_manifest(folder / "one.json", run)
    write_manifest(folder / "two.json", run | {"order": {"seed": 8, "hash": "00fe"}})
    shown.run("compare-runs", "one.json", "two.json", code=1)


def _bench(shown: Shown, folder: Path) -> None:
    shown.run("bench", "generate", *SMALL, "++hydra.run.dir=out")
    for name in ("one", "two"):
        given = [*SMALL, "--engine=null", "--quiet", "++workload.reader.batch_size=1"]
        shown.run("bench", "run", *given, f"++hydra.run.dir={name}", name="bench run")
    shown.run("bench", "report", "two")
    shown.run("bench", "compare", "one", "two")
    shown.run("bench", "trace", "two", "-o", "trace.json")
    shown.run("bench", "workloads")
    words = ["--accelerators", "1..1", "--until", "au<0.1", "--engine=null", "--no-ceiling"]
    shown.run("bench", "sweep", *SMALL, *words, "++workload.reader.batch_size=1")
    (folder / "disk").mkdir()
    with pytest.MonkeyPatch.context() as patch:  # beside other programs there is no advice
        patch.setattr("headrace.bench.storage.OTHERS_MANY", math.inf)
        shown.run("bench", "storage", "disk", "--size", "8M", "--seconds", "0.1", "--files", "16")


def _runs(shown: Shown, folder: Path) -> None:
    test_report.full_run(folder / "full").close()
    shown.run("report", "full")
    shown.run("verify-epoch", "full")
    shown.run("whatif", "unet3d_h100", "--storage", "lustre")
