"""One run of the soak: actors, events until there were enough kills, and what is to be found then."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from soak import leftovers, samples
from soak.actors import (
    Actor,
    Client,
    Controller,
    Daemon,
    Program,
    environment_of,
    has,
    wait_for,
)
from soak.events import Events
from soak.page import CALLS
from soak.watching import CALL_S, Watch

EPOCHS = 6

UNSEEN = ("torch", "launcher")
"""Clients whose links are in other processes: whether they have one is not asked."""


def prepare(work: Path) -> Path:
    """Write the data, and note in which order each client must get it."""
    import headrace as hr

    data = work / "data"
    (work / "tmp").mkdir(parents=True)
    samples.write_folder(data / "files")
    samples.write_store(data / "store.hr")
    for seed in (1, 2):
        loader = hr.loader(data / "store.hr", 50, seed=seed)
        epochs = [np.concatenate([b.indices for b in loader]) for _ in range(EPOCHS)]
        loader.close()
        for epoch in epochs:  # not headrace's word: the tester's
            assert sorted(epoch.tolist()) == list(range(samples.SAMPLES))
        np.save(work / f"order-{seed}.npy", np.array(epochs))
    return data


def clients_of(
    work: Path, data: Path, environment: dict[str, str], *, torch: bool, programs: bool
) -> list[Actor]:
    """Two jobs over one store, a folder of files, a run that resumes, torch's workers."""

    def client(name: str, kind: str, source: str, seed: int, batch: int, pause_s: float) -> Client:
        order = str(work / f"order-{seed}.npy")
        return Client(
            name, kind, work, environment, data=str(data / source), seed=seed, order=order,
            batch=batch, pause_s=pause_s,
        )  # fmt: skip

    found: list[Actor] = [
        client("client-a", "plain", "store.hr", 1, 20, 0.004),
        client("client-b", "plain", "store.hr", 2, 32, 0.004),
        client("client-c", "plain", "files", 1, 16, 0.004),
        client("client-d", "resume", "store.hr", 2, 20, 0.008),
    ]
    if programs and has("run"):
        found.append(Program("client-f", work, environment, data / "files"))
    if torch:
        found.append(client("client-e", "torch", "store.hr", 1, 32, 0.004))
    return found


def run(
    work: Path,
    *,
    kills: int,
    seed: int,
    torch: bool = True,
    programs: bool = False,
    private: bool = False,
    say=print,
) -> dict[str, Any]:
    """Kill until it was often enough; returns what was seen.

    Args:
        work: a folder that is not there; removed if all is well.
        kills: of all kinds together.
        seed: what is done follows from it.
        torch: with a client that has worker processes.
        programs: with one under `headrace run`.
        private: nobody else has processes or temporary files here: all that is there is ours.
        say: hears of progress.
    """
    began = time.monotonic()
    data = prepare(work)
    before = samples.digest_of(data)
    folders = (Path("/dev/shm"), work / "tmp", *([Path("/tmp")] if private else []))
    named = leftovers.names_in(*folders)
    storm = Storm(work, data, random.Random(seed), torch=torch, programs=programs)
    storm.rage(kills, lambda count: say(f"{count} kills after {time.monotonic() - began:.0f} s"))
    storm.calm()
    left, torchs = _left(storm, folders, named, private=private)
    changed = samples.digest_of(data) != before
    result = storm.result() | {
        "seed": seed, "seconds": round(time.monotonic() - began, 1),
        "leftovers": left, "left_by_torch": torchs, "user_files_changed": changed,
    }  # fmt: skip
    result["ok"] = not (
        result["problems"] or left or changed or result["wrong"] or result["hangs"]
        or result["kills"] < kills or result["longest_call_s"] > CALL_S
    )  # fmt: skip
    if result["ok"]:
        shutil.rmtree(work)
    return result


class Storm:
    """The actors, and what is done to them.

    Args:
        work: a folder with the data.
        data: the data in it.
        rng: of all that is done.
        torch: with a client that has worker processes.
        programs: with one under `headrace run`.
    """

    def __init__(
        self, work: Path, data: Path, rng: random.Random, *, torch: bool, programs: bool
    ) -> None:
        environment = environment_of(work)
        self.rng = rng
        self.daemon = Daemon(work, environment, rng)
        self.clients = clients_of(work, data, environment, torch=torch, programs=programs)
        self.actors: list[Actor] = [self.daemon, *self.clients]
        if has("control"):
            self.actors.append(Controller(work, environment))
        for actor in self.actors:
            actor.start()
        self.watch = Watch(self.clients)
        self.events = Events(self.actors, rng, self.watch)
        self.problems = self.events.problems
        self.watch.daemon_starts(self.daemon)
        for actor in self.actors:
            if not wait_for(actor.ready):
                self.problems.append(f"{actor.name} does not begin: {actor.tail()}")

    def rage(self, kills: int, said) -> None:
        """Hurt them until there were so many kills, or something is wrong."""
        deadline = time.monotonic() + 30 + 10 * kills
        told = 0
        while self.events.kills < kills and time.monotonic() < deadline and not self.problems:
            until = time.monotonic() + self.rng.expovariate(1 / 0.25)
            while time.monotonic() < until:
                self.events.due()
                time.sleep(0.01)
            self.events.one()
            if self.events.kills >= told + 25:
                told = self.events.kills
                said(told)

    def calm(self) -> None:
        """Let everybody recover, lose the daemon once more, recover, and end."""
        self.events.finish()
        self.problems += _settled(self.daemon, self.clients)
        if self.daemon.kill():
            self.events.counts["kill daemon"] += 1
        self.problems += _memory_left(self.clients)
        self.daemon.start()
        self.watch.daemon_starts(self.daemon)
        self.problems += _settled(self.daemon, self.clients)
        self.watch.close()
        for client in self.clients:
            client.end()
        self.problems += _daemon_left(self.daemon)
        self.daemon.end()
        for actor in self.actors:
            if isinstance(actor, Controller):
                actor.end()
            self.problems += actor.problems

    def result(self) -> dict[str, Any]:
        """What was counted."""
        return _counted(self.events, self.clients, self.watch) | {"problems": self.problems}


def _left(
    storm: Storm, folders: tuple[Path, ...], named: set[str], *, private: bool
) -> tuple[list[str], int]:
    """What stayed behind, and how much stayed that torch leaves anyhow."""
    pids = [pid for actor in storm.actors for pid in actor.pids]

    def living() -> list[str]:
        return leftovers.processes(leftovers.all_processes() if private else pids)

    wait_for(lambda: not living(), 10.0)
    left = living()
    names = leftovers.names_in(*folders) - named
    torchs = {name for name in names if leftovers.is_torchs(name)}
    left += sorted(names - torchs)
    for actor in storm.actors:
        if isinstance(actor, Daemon | Controller) and actor.folder.exists():
            left += [str(p) for p in (actor.folder, *actor.folder.iterdir())]
    return left, len(torchs)


def _settled(daemon: Daemon, clients: list[Actor]) -> list[str]:
    """After the storm: everybody reads over the daemon again, and has let go of dead ones' memory."""
    problems = []
    if not wait_for(daemon.ready):
        problems.append(f"no daemon at the end: {daemon.tail()}")
    for client in clients:
        assert client.page is not None
        epochs = client.page.epochs
        if not wait_for(lambda c=client, e=epochs: c.page.epochs > e + 1):
            problems.append(f"{client.name} does not go on: {client.tail()}")
        if client.role not in UNSEEN and not wait_for(lambda c=client: c.page.attached):
            problems.append(f"{client.name} does not find the daemon: {client.tail()}")
    return problems


def _memory_left(clients: list[Actor]) -> list[str]:
    """Without a daemon, all read directly, and have let go of the memory of all that there were."""
    problems = []
    for client in clients:
        if client.role in UNSEEN:
            continue

        def mapped(client: Actor = client) -> dict[int, int]:
            assert client.process is not None
            return leftovers.shared_memory(client.process.pid)

        if not wait_for(lambda mapped=mapped: not mapped(), 20.0):
            problems.append(f"{client.name} has memory of dead daemons mapped: {mapped()}")
    return problems


def _daemon_left(daemon: Daemon) -> list[str]:
    """What a daemon without clients still has open: one listener, its lock, its data, no clients."""
    if not daemon.alive:
        return ["the daemon ended by itself"]
    assert daemon.process is not None
    pid = daemon.process.pid
    sockets = 2 if has("control") else 1  # that on which it listens, and that to the controller

    def idle() -> bool:
        found = leftovers.descriptors(pid)
        return found.get("socket", 0) <= sockets and not found.get("pidfd", 0)

    if not wait_for(idle, 20.0):
        return [f"a daemon without clients has {leftovers.descriptors(pid)} open"]
    return []


def _counted(events: Events, clients: list[Actor], watch: Watch) -> dict[str, Any]:
    pages = [client.page for client in clients if client.page is not None]
    longest = max(pages, key=lambda page: page.longest_ns)
    recoveries = sorted(watch.recoveries_s)
    totals = {
        name: sum(getattr(page, name) for page in pages)
        for name in (
            "batches", "node_batches", "direct_batches", "samples", "epochs", "wrong",
            "worker_errors", "resumes",
        )
    }  # fmt: skip
    return {
        "kills": events.kills,
        "counts": dict(sorted(events.counts.items())),
        "starts": {actor.name: actor.counts["starts"] for actor in events.actors},
        **totals,
        "hangs": watch.hangs,
        "longest_call_s": round(longest.longest_ns / 1e9, 3),
        "longest_call": CALLS[longest.longest_call],
        "call_deadline_s": CALL_S,
        "recoveries": len(recoveries),
        "recovery_s_p50": round(statistics.median(recoveries), 3) if recoveries else None,
        "recovery_s_p99": (
            round(recoveries[int(len(recoveries) * 0.99)], 3) if recoveries else None
        ),
    }
