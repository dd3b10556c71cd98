"""Conductor: the launch as the first node sees it: nodes come, helpers start, ranks run, everything ends.

One thread, one loop. However a launch ends, `_end` is passed: every node ends what it started and says so,
and the folder that the nodes met in is removed. Helpers are what runs on a node beside the ranks: staging, the
node daemon, the telemetry agent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import headrace
from headrace.cluster.launch.folders import MeetFolder
from headrace.cluster.launch.nodes import SIGNALS, LaunchNodes, NodeSpec, start_nodes
from headrace.cluster.launch.place import REQUEUE_EXIT, job_key
from headrace.cluster.launch.plan import settings_for
from headrace.cluster.launch.stop_page import StopAgreement, StopPhase, StopReason
from headrace.cluster.manifest import LaunchReport, RankFailure, add_notes, judge, resumed_at
from headrace.cluster.processes import adopt_orphans, end_descendants
from headrace.errors import JobError, LaunchError
from headrace.job.meeting import Meeting
from headrace.job.nodes import own_address

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from headrace.cluster.launch.nodes import Message, NodeState
    from headrace.cluster.launch.place import JobPlace
    from headrace.cluster.launch.plan import Launch


_TICK_S = 0.05
_CLOCK_S = 2.0
"""Clocks that differ by more make logs hard to read; nothing here depends on them."""

_FAILED_S = 1.0
"""After a rank has failed: time for the others to say what they saw of it."""

_FAILED_GRACE_S = 5.0
_GONE_S = 15.0
_STARTS_LOST_S = 2.0


class _NodesLost(LaunchError):
    """Nodes of the launch are lost; everything else is to be ended."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


class Conductor:
    """Launches one program, from the first node of its job.

    Args:
        launch: what, where and how.
        say: gets what is worth a line in the job's log.
        restarts: how often the program was begun before in this job.
        resumed: gets from where the ranks go on, in words.

    Attributes:
        job: what the processes of the job call it: HEADRACE_JOB_ID.
        survivors: the job without the nodes that were lost, if the launch is to go on there.
    """

    def __init__(
        self, launch: Launch, say: Callable[[str], object] = len, *, restarts: int = 0,
        resumed: Callable[[str], object] = len,
    ) -> None:  # fmt: skip
        self._launch = launch
        self.place, self.options, self.plan, _ = launch
        self.survivors: JobPlace | None = None
        self.report = LaunchReport(
            job=self.place.job_id, restarts=self.place.restarts, nodes=self.plan.nodes,
            ranks=self.plan.ranks,
        )  # fmt: skip
        self._say, self._say_resumed = say, resumed
        self._token = secrets.token_hex(16)
        # An array's task by the number that Slurm counts with, as everybody else in the job knows it.
        is_slurm = self.place.scheduler == "slurm"
        number = os.environ.get("SLURM_JOB_ID") if is_slurm else self.place.job_id
        self.job, starts = number or self._token[:12], str(self.place.restarts + restarts)
        self._variables = {"HEADRACE_JOB_ID": self.job, "HEADRACE_RESTARTS": starts}
        self._signals: list[int] = []
        self._agreement: StopAgreement | None = None
        self._failure: RankFailure | None = None
        self._limit_s: float | None = None
        self._unheard = 0  # the signal that no script has been told of
        self._meeting: Meeting
        self.nodes: LaunchNodes
        self._starts: list[subprocess.Popen[bytes]]

    # -- the whole --------------------------------------------------------------------------------

    def run(self) -> LaunchReport:
        """From start to end; raises LaunchError if it could not begin; nothing is left all the same."""
        began_s = time.monotonic()
        adopt_orphans()
        on_signal = lambda number, _: self._signals.append(number)  # noqa: E731
        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            with contextlib.ExitStack() as parts:
                self._open(parts)
                try:
                    self._gather()
                    self.nodes.send("helpers")
                    self._wait_for_stage(began_s)
                    self._start_ranks()
                    self._watch()
                except BaseException as e:
                    # What goes wrong now must not hide the error.
                    with contextlib.suppress(Exception):
                        self._end()
                    if not isinstance(e, _NodesLost):
                        raise
                    self.report.lost, self.report.why = e.names, e.message
                else:
                    self._end()
            self._conclude()
        finally:
            self.report.wall_s = time.monotonic() - began_s
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.report

    def _open(self, parts: contextlib.ExitStack) -> None:
        """The folder to meet in, the socket that nodes connect to, and the nodes' launchers."""
        options, plan, place = self.options, self.plan, self.place
        for remark in plan.remarks:
            self._remark(remark)
        spreads = place.scheduler in {"slurm", "ray", "kubernetes"}
        address = own_address(len(plan.nodes)) if spreads else "127.0.0.1"
        is_here = address.startswith("127.")
        meet = parts.enter_context(contextlib.closing(MeetFolder(options.meet, self._token, place)))
        for folder in meet.swept:
            self._remark(f"removed what a killed launch had left: {folder}")
        self._meeting = Meeting(meet.meeting)
        if options.stage:
            self._variables["HEADRACE_JOB_FOLDER"] = str(meet.meeting)
            self._variables["HEADRACE_STORE"] = "headrace://job"
        listen = address if is_here else ""
        key = job_key() if place.scheduler == "kubernetes" and len(plan.nodes) > 1 else ""
        nodes = LaunchNodes(plan.nodes, listen, self._token, options.silence_s, key)
        self.nodes = parts.enter_context(contextlib.closing(nodes))
        # The nodes may stand in other folders.
        sources = tuple(s if "://" in s else str(Path(s).absolute()) for s in options.stage)
        spec = NodeSpec(
            addresses=(address,) if is_here else (address, socket.gethostname()), port=nodes.port,
            token=self._token, launch=self._launch._replace(options=replace(options, stage=sources)),
            variables=self._variables,
        )  # fmt: skip
        nodes.invitation = spec.encode()
        parts.callback(end_descendants, _GONE_S)
        self._starts = start_nodes(spec)

    def _remark(self, text: str) -> None:
        self.report.remarks.append(text)
        self._say(text)

    # -- before the ranks -------------------------------------------------------------------------

    def _gather(self) -> None:
        """Until all nodes have come."""
        until_s = time.monotonic() + self.options.connect_s
        while missing := [n for n in self.nodes.all if not n.hello]:
            self._tick_before()
            codes = [p.poll() for p in self._starts]
            late, ended = time.monotonic() > until_s, None not in codes
            if (late or ended) and (silent := self.place.silent_nodes([n.name for n in missing])):
                raise _NodesLost(f"Slurm does not reach {', '.join(silent)} either.", silent)
            missed = f"{len(missing)} of {len(self.nodes.all)} nodes did not come"
            if ended and any(not n.hello for n in self.nodes.all):
                raise LaunchError(
                    f"{missed}: what starts them ended with status {codes[0]}.",
                    next_step="Its own message is above.",
                )
            if late:
                names = ", ".join(n.name for n in missing[:8])
                raise LaunchError(
                    f"{missed} within {self.options.connect_s:g} s: {names}.",
                    next_step="See whether they reach this node's address, and whether srun waits for "
                    "room (squeue --steps), or pods do not begin (kubectl get pods).",
                )
        for node in self.nodes.all:
            for left in node.hello.get("left", ()):
                if not (left["processes"] or left["nbytes"]):
                    continue
                self._remark(
                    f"node {node.name}: removed what a killed launch had left: {left['processes']} "
                    f"processes, {left['nbytes']:,} bytes in {left['folder']}"
                )
        for remark in clock_remarks({n.name: n.skew_s for n in self.nodes.all}):
            self._remark(remark)

    def _tick_before(self) -> None:
        """One turn while ranks do not run yet: whoever is lost or fails now ends the launch."""
        self._receive(begun=False)
        if any(n.lost for n in self.nodes.all):
            raise self._lost()
        if self._signals:
            number = self._signals[0]
            self.report.outcome, self.report.exit_code = "cancelled", 128 + number
            raise LaunchError(f"Ended by {signal.Signals(number).name} before the ranks had begun.")

    def _receive(self, *, begun: bool) -> None:
        """Waits a little, and takes what has come; `begun`: ranks run already."""
        for node, message in self.nodes.receive(_TICK_S):
            match message["kind"]:
                case "hello" if "failure" in message:
                    why = f"node {node.name}: {message['failure']}"
                    raise LaunchError(why, next_step=message.get("next"))
                case "hello" if message["version"] != headrace.__version__:
                    raise LaunchError(
                        f"node {node.name} has headrace {message['version']}, "
                        f"this one {headrace.__version__}.",
                        next_step="Use one environment on all nodes.",
                    )
                case "helper_ended":
                    # Where a job is cancelled all its processes may be signalled, staging too.
                    if not self._is_cancelled():
                        is_needed = (
                            message["name"] == "stage" and not begun and not self._is_staged()
                        )
                        self._remark(_helper_end(node, message, is_needed=is_needed))
                case "ranks" if not self.report.resumed and (resumed := resumed_at(self.nodes.all)):
                    self.report.resumed = resumed
                    try:
                        self._say_resumed(resumed)
                    except LaunchError as e:  # a full disk is no reason to end ranks that run
                        self._remark(e.message)
                case "signal":
                    self._signals.append(message["number"])
                case "failure":
                    what = f"node {node.name}: {message['what']}"
                    self._failure = RankFailure(what, message["code"])

    def _lost(self) -> _NodesLost:
        lost = [n for n in self.nodes.all if n.lost and n.running != 0]
        text = "; ".join(f"node {n.name} is lost: {n.lost}" for n in lost)
        return _NodesLost(f"{text}.", tuple(n.name for n in lost))

    def _is_staged(self) -> bool:
        """Whether ranks can open what is staged."""
        try:
            return not self.options.stage or self._meeting.job() is not None
        except JobError:
            return False

    def _wait_for_stage(self, began_s: float) -> None:
        if not self.options.stage:
            return
        until_s = time.monotonic() + self.options.stage_s
        while not self._is_staged():
            self._tick_before()
            if time.monotonic() > until_s:
                raise LaunchError(
                    f"Staging has not begun on all nodes within {self.options.stage_s:g} s.",
                    path=str(self._meeting.folder),
                    next_step="A large source takes long to list: make it a store once "
                    "(headrace index SOURCE TARGET), or pass --stage-wait.",
                )
        self.report.stage_s = time.monotonic() - began_s

    # -- the ranks --------------------------------------------------------------------------------

    def _start_ranks(self) -> None:
        first, framework = self.nodes.all[0].hello, self.options.framework
        chosen = settings_for(self.plan, framework, first.get("interface"), os.environ)
        settings = {s.name: s.value for s in chosen if not s.kept}
        self.nodes.send("ranks", facts=[node.facts for node in self.nodes.all], settings=settings)
        left_s = self.place.left_s()
        if left_s is not None:
            # A job too short for that is asked when half of its time is left.
            self._limit_s = time.monotonic() + left_s - min(self.options.stop_before_s, left_s / 2)

    def _watch(self) -> None:
        """Until all ranks have ended, or something ends them."""
        failed_s = None
        while any(n.running != 0 for n in self.nodes.all):
            self._receive(begun=True)
            now_s = time.monotonic()
            lost = any(n.lost and n.running != 0 for n in self.nodes.all)
            if self._failure or lost or RankFailure.among(self.nodes.all):
                failed_s = failed_s or now_s
                # A dead node shows by its silence; what fails on the others may be sooner.
                all_answer = all(n.silent_s < now_s - failed_s for n in self.nodes.all if n.there)
                if now_s - failed_s > _FAILED_S and (lost or all_answer):
                    if lost:  # ranks that fail together with a node fail because of it
                        raise self._lost()
                    return
            self._answer_signals(now_s)
            if self._stop_is_over(now_s):
                return

    # -- stopping ---------------------------------------------------------------------------------

    def _is_cancelled(self) -> bool:
        signals, agreement = set(self._signals), self._agreement
        return bool(signals - {signal.SIGUSR1}) or (
            agreement is not None and agreement.reason.cancels
        )

    def _answer_signals(self, now_s: float) -> None:
        before_s = self.options.stop_before_s
        while self._signals:
            number = self._signals.pop(0)
            requeues = number == signal.SIGUSR1
            within_s = max(self.options.grace_s, before_s if requeues else 0.0)
            name = signal.Signals(number).name
            text = f"asked to start again ({name})" if requeues else f"asked to end ({name})"
            self._unheard = number
            self._ask(StopReason(text, number, within_s), now_s)
        if self._limit_s is not None and now_s > self._limit_s:
            self._limit_s = None
            left_s, now_s = self.place.left_s(), time.monotonic()  # Slurm may take its time
            if left_s is not None and left_s > 2 * before_s + 60:
                self._limit_s = now_s + left_s - before_s  # somebody gave the job more time
            else:
                within_s = max(1.0, (left_s or 0.0) - 2.0)
                self._ask(StopReason("the time limit", 0, within_s), now_s)

    def _ask(self, reason: StopReason, now_s: float) -> None:
        if self._agreement is None or self._agreement.phase is StopPhase.NOBODY:
            self._agreement = StopAgreement(reason, now_s)
            for node in self.nodes.all:
                node.held = None
            self.nodes.send("hold")
        else:
            self._agreement.overridden(reason, now_s)

    def _stop_is_over(self, now_s: float) -> bool:
        """Moves the agreement on; whether the ranks are to be ended now."""
        agreement = self._agreement
        if agreement is None:
            return False
        reason = agreement.reason
        if agreement.counted([n.held for n in self.nodes.all if n.there], now_s):
            self.nodes.send("stop_at", check=agreement.check)
            if agreement.phase is StopPhase.LEAVING:
                self._say(f"{reason.text}: all ranks save and leave after the same step")
            elif not reason.cancels:
                what = "those that never do are cut off"
                # The script asks nobody whether to stop: it gets the signal itself, if it knows what that is.
                if self._unheard:
                    self.nodes.send("forward", number=self._unheard)
                    self._unheard = 0
                    what = "those that handle SIGUSR1 get it"
                text = (
                    f"{reason.text}: the ranks do not ask whether to stop (hr.cluster.should_stop), or "
                    f"not yet; {what}"
                )
                if text not in self.report.remarks:
                    self._remark(text)
        if any(note.leaving for node in self.nodes.all for note in node.notes):
            agreement.leaves(now_s)
        if agreement.late(now_s):
            self._remark(
                f"{reason.text}: the ranks did not leave within {reason.within_s:g} s, and were ended"
            )
            return True
        return agreement.phase is StopPhase.NOBODY and reason.cancels

    # -- the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Every node ends what it started, and says so."""
        asked, report = self._agreement, self.report
        # Ranks that were asked and did not leave have had their time.
        unasked = asked is not None and asked.reason.cancels and asked.phase is StopPhase.NOBODY
        grace_s = self.options.grace_s if unasked else _FAILED_GRACE_S
        self.nodes.send("end_ranks", grace_s=grace_s)
        self._until(lambda n: n.quiet, grace_s + _GONE_S)
        if self.options.stage:
            for document in self._meeting.nodes().values():
                report.staged_samples += document.ready
                report.staged_bytes += document.written
                report.source_bytes += document.source_bytes
        if head := self._meeting.head() if self.options.stage else None:
            self._meeting.end(str(head["session"]))  # the nodes part in good order
        self.nodes.send("end", stage_knows=bool(head))
        self._until(lambda n: n.gone is not None, _GONE_S)
        for node in self.nodes.all:
            if node.gone is not None:
                report.ended += node.gone["ended"]
                report.stuck += node.gone["stuck"]
            elif node.there:
                self._remark(f"node {node.name} did not say that it ended everything")
        # What starts the nodes may wait for one that is lost, and a killed guard's processes come to us.
        wait_s = _STARTS_LOST_S if any(n.lost for n in self.nodes.all) else _GONE_S
        until_s = time.monotonic() + (
            wait_s if all(n.gone or n.lost for n in self.nodes.all) else 0.0
        )
        while any(p.poll() is None for p in self._starts) and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        ended, stuck = end_descendants(_GONE_S)
        report.ended += ended
        report.stuck += stuck

    def _until(self, done: Callable[[NodeState], bool], seconds: float) -> None:
        """Waits for all nodes that can be spoken to."""
        until_s = time.monotonic() + seconds
        while any(n.there and not done(n) for n in self.nodes.all) and time.monotonic() < until_s:
            list(self.nodes.receive(_TICK_S))

    def _conclude(self) -> None:
        """What became of it, and a new start if that is wanted."""
        add_notes(self.report, self.nodes.all)
        reason = self._agreement.reason if self._agreement is not None else None
        if self.report.lost and not (reason and reason.cancels):
            self.report.outcome, self.report.exit_code = "stopped", REQUEUE_EXIT
            if self._go_on_with_survivors():
                return
        else:
            # All have said by now what they saw of it.
            failure = self._failure or RankFailure.among(self.nodes.all)
            judge(self.report, self.nodes.all, failure, self._agreement)
            if self.report.outcome != "stopped" or reason is None or reason.cancels:
                return
        if self.options.requeue and self.place.is_requeued_when_asked():
            self.report.outcome = "requeued"
        elif self.options.requeue:
            self.report.next_step = (
                "Submit the job again: it goes on from its checkpoint. With sbatch --requeue it does so "
                "by itself."
            )

    def _go_on_with_survivors(self) -> bool:
        """Gives the lost nodes up; whether the script may go on with those that are left."""
        lost = self._lost_others()
        rest = tuple(name for name in self.place.nodes if name not in lost)
        if lost and (refusal := self.place.keep_nodes(rest)):
            self._remark(f"the job keeps {', '.join(sorted(lost))}: {refusal}")
            return False
        if self.options.nodes is None or len(rest) < self.options.nodes[0]:
            return False
        self.survivors = replace(self.place, nodes=rest)
        self.report.outcome = "continued"
        return True

    def _lost_others(self) -> set[str]:
        # This node is alive, whatever became of its launcher.
        return set(self.report.lost) - set(self.place.nodes[:1])

    def requeue(self) -> None:
        """Starts the job again, if that is the outcome. The last thing to do: it ends this process, too."""
        if self.report.outcome == "requeued":
            sys.stdout.flush()
            sys.stderr.flush()
            self.place.requeue(self._lost_others())


def clock_remarks(skews_s: dict[str, float]) -> list[str]:
    """What to say of nodes whose clocks differ from this node's."""
    return [
        f"node {name}: its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}: times in its "
        "log lines differ by as much. Nothing of headrace depends on it; ask for NTP."
        for name, skew in skews_s.items()
        if abs(skew) > _CLOCK_S
    ]


# -- helpers -------------------------------------------------------------------------------------------

_WITHOUT = {
    "stage": "its samples are read from a replica or from the source",
    "node": "loaders read directly",
    "agent": "its figures are missing in the report",
}


def _helper_end(node: NodeState, message: Message, *, is_needed: bool) -> str:
    """What to say of a helper that has ended by itself, which none should."""
    name, code, log = message["name"], message["code"], message["log"].splitlines()
    why = [line.removeprefix("error: ") for line in log if line.startswith("error: ")][-1:]
    if is_needed:
        steps = [line[8:].strip() for line in log if line.startswith("  next: ")]
        raise LaunchError(
            f"node {node.name}: staging failed: {why[0] if why else f'it ended with status {code}'}",
            next_step=steps[-1] if steps else None,
        )
    text = f"node {node.name}: `headrace {name}` ended with status {code}"
    return f"{': '.join([text, *why])}; {_WITHOUT[name]}"
