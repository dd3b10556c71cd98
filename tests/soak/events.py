"""Events: what is done to the actors, each counted only when it happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING

from headrace.node.link import ALIVE_S
from soak.actors import Actor, Daemon, state_of, wait_for

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from soak.watching import Watch

RESTART_S = 0.3
"""The longest that a killed process stays away."""


class Events:
    """Hurts actors at random.

    Args:
        actors: all of them; the first is the daemon.
        rng: what happens follows from its seed, when it happens does not.
        watch: is told of what is stopped.

    Attributes:
        counts: what happened, by kind and role.
    """

    def __init__(self, actors: list[Actor], rng: random.Random, watch: Watch) -> None:
        self.actors = actors
        self.rng = rng
        self.watch = watch
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._later: list[tuple[float, Callable[[], None]]] = []

    @property
    def kills(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith("kill "))

    def one(self, kinds: dict[str, int] | None = None) -> None:
        """Do one thing."""
        weights = kinds or {"kill": 14, "stop": 3, "terminate": 1, "race": 1}
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        actor = self.rng.choices(self.actors, [a.weight for a in self.actors])[0]
        if actor is self.daemon and self.rng.random() < 0.8 and not self.watch.served_long():
            return  # seldom while it starts: it should be used by somebody
        if actor is self.daemon or kind in ("terminate", "race"):
            self.watch.daemon_goes()
        if kind == "kill":
            self.kill(actor)
        elif kind == "stop":
            self.stop(actor)
        elif kind == "terminate":
            self.terminate(self.daemon)
        else:
            self.race()

    @property
    def daemon(self) -> Daemon:
        assert isinstance(self.actors[0], Daemon)
        return self.actors[0]

    def due(self) -> None:
        """Do what was put off until now; see that nobody ended by himself."""
        now = time.monotonic()
        for item in sorted((i for i in self._later if i[0] <= now), key=lambda i: i[0]):
            self._later.remove(item)
            item[1]()
        for actor in self.actors:
            if not self._is_away(actor):
                actor.look()

    def finish(self) -> None:
        """Bring everything back that is away or stopped."""
        for _, function in sorted(self._later, key=lambda item: item[0]):
            function()
        self._later.clear()

    # -- kinds ------------------------------------------------------------------------------------

    def kill(self, actor: Actor) -> None:
        """SIGKILL to an actor, or to one of its workers; now and then to one that is stopped."""
        if not actor.alive or self._is_away(actor):
            return
        role, pids = self.rng.choices(*_roles(actor))[0]
        if role != actor.role:
            self._kill_worker(role, self.rng.choice(pids))
            if actor.ends_with_worker:
                self._ends_too(actor)
            return
        if self.rng.random() < 0.15:
            actor.process.send_signal(signal.SIGSTOP)
            if wait_for(lambda: state_of(actor.process.pid) in "TZ", 5.0):
                self.counts[f"stop {role}, then kill"] += 1
        workers = [p for _, pids in actor.victims().items() for p in pids[:]]
        if actor.kill():
            self.counts[f"kill {role}"] += 1
        self._bring_back(actor)
        self._see_gone(actor, [p for p in workers if p != actor.process.pid])

    def _kill_worker(self, role: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            if wait_for(lambda: state_of(pid) in ("", "Z"), 5.0):
                self.counts[f"kill {role}"] += 1

    def _ends_too(self, actor: Actor) -> None:
        assert actor.process is not None
        try:
            actor.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{actor.name} outlives what it ran: {actor.tail()}")
            actor.kill()
        actor.after_death()
        self._bring_back(actor)

    def _see_gone(self, actor: Actor, pids: list[int]) -> None:
        """Workers of a killed program must end by themselves."""
        if pids and not wait_for(lambda: all(state_of(p) in ("", "Z") for p in pids), 30.0):
            self.problems.append(f"workers {pids} of {actor.name} outlive it by 30 s")

    def stop(self, actor: Actor) -> None:
        """SIGSTOP to an actor or one of its workers; SIGCONT later, often past all deadlines."""
        if not actor.alive or self._is_away(actor):
            return
        role, pids = self.rng.choices(*_roles(actor))[0]
        pid = self.rng.choice(pids)
        seconds = self.rng.choice([0.1, 0.5, ALIVE_S + 0.5, ALIVE_S + 2.0])
        client = actor.page is not None
        if client:
            self.watch.stopped(actor)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        if wait_for(lambda: state_of(pid) == "T", 5.0):
            kind = "past the deadline" if seconds > ALIVE_S else "briefly"
            self.counts[f"stop {role} {kind}"] += 1

        def go_on() -> None:
            if client:
                self.watch.going_on(actor)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        if client:  # nothing else happens to it meanwhile: how long it was stopped is known
            go_on.__dict__["actor"] = actor
        self._later.append((time.monotonic() + seconds, go_on))

    def terminate(self, daemon: Daemon) -> None:
        """SIGTERM to the daemon, several at once now and then; it must end by itself and clean up."""
        if not daemon.alive or self._is_away(daemon) or not wait_for(daemon.ready):
            return
        for _ in range(self.rng.choice([1, 1, 3])):
            daemon.process.send_signal(signal.SIGTERM)
        try:
            code = daemon.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the daemon does not end on SIGTERM: {daemon.tail()}")
            daemon.kill()
        else:
            self.counts["terminate daemon"] += 1
            if code:
                self.problems.append(f"the daemon ended with {code}: {daemon.tail()}")
            if daemon.folder.exists():
                left = [p.name for p in daemon.folder.iterdir()]
                self.problems.append(f"a daemon that ended left {left}")
        self._bring_back(daemon)

    def race(self) -> None:
        """Kill the daemon and start three at once: one rules, the others say so and end."""
        daemon = self.daemon
        if not daemon.alive or self._is_away(daemon):
            return
        if daemon.kill():
            self.counts["kill daemon"] += 1
        rivals = [
            subprocess.Popen(
                daemon.command(), env=daemon.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
            )
            for _ in range(3)
        ]  # fmt: skip
        daemon.pids += [r.pid for r in rivals]
        if not wait_for(lambda: sum(r.poll() is None for r in rivals) == 1):
            self.problems.append(f"{sum(r.poll() is None for r in rivals)} daemons rule")
        for rival in rivals:
            if rival.poll() is None:
                rival.kill()
                _, said = rival.communicate()
                self.counts["kill daemon"] += rival.returncode == -signal.SIGKILL
            else:
                _, said = rival.communicate()
                if b"a node daemon runs already" not in said:
                    self.problems.append(f"a rival ended with {rival.returncode}: {said[-2000:]!r}")
        self.counts["race of three daemons"] += 1
        self._bring_back(daemon)

    def _bring_back(self, actor: Actor) -> None:
        def again() -> None:
            actor.start()
            if actor is self.daemon:
                self.watch.daemon_starts(actor)

        again.__dict__["actor"] = actor
        self._later.append((time.monotonic() + self.rng.uniform(0, RESTART_S), again))

    def _is_away(self, actor: Actor) -> bool:
        return any(f.__dict__.get("actor") is actor for _, f in self._later)


def _roles(actor: Actor) -> tuple[list[tuple[str, list[int]]], list[int]]:
    """Whom of an actor it may hit: its workers more often, as they are back sooner."""
    victims = sorted(actor.victims().items())
    return victims, [1 if role == actor.role else 3 for role, _ in victims]
