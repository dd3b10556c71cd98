"""Preview: what a launch would run, and why: `headrace launch --dry-run`. Starts nothing, writes nothing."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.cluster.launch.ranks import NodeFacts, commands_for, program_of
from headrace.cluster.launch.settings import settings_for
from headrace.cluster.launch.start_nodes import node_command, srun_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.options import LaunchOptions
    from headrace.cluster.launch.plan import LaunchPlan
    from headrace.cluster.launch.ranks import NodeCommands
    from headrace.cluster.launch.settings import Setting
    from headrace.cluster.place import JobPlace

__all__ = ["Preview", "preview"]


@dataclass(frozen=True, slots=True)
class Preview:
    """What would run. Addresses and ports are found when it does: they are shown as NODE and 0."""

    plan: LaunchPlan
    starter: tuple[str, ...]
    helpers: tuple[str, ...]
    settings: tuple[Setting, ...]
    commands: tuple[NodeCommands, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "plan": asdict(self.plan),
            "starter": list(self.starter),
            "helpers": list(self.helpers),
            "settings": [asdict(s) for s in self.settings],
            "commands": [
                {"commands": [list(c) for c in n.commands], "environments": list(n.environments)}
                for n in self.commands
            ],
        }

    def text(self) -> str:
        """For people."""
        plan = self.plan
        shape = (
            f"# {len(plan.nodes)} nodes, {plan.ranks_per_node} ranks and {plan.gpus_per_node} GPUs on each, "
            f"{plan.cpus_per_rank} CPUs for each rank"
        )
        lines = [shape]
        lines += [f"# {remark}" for remark in plan.remarks]
        lines += ["", "# once: a launcher on each node", shlex.join(self.starter)]
        if self.helpers:
            lines += ["", "# on each node, beside the ranks", *self.helpers]
        lines += ["", "# variables of the ranks"]
        for s in self.settings:
            kept = " (yours: kept)" if s.kept else ""
            lines.append(f"{s.name}={shlex.quote(s.value)}  # {s.reason}{kept}")
        for name, commands in zip(plan.nodes, self.commands, strict=True):
            text = commands.text() or "# nothing: the first node starts its ranks, too"
            lines += ["", f"# node {name}", text]
        return "\n".join(lines) + "\n"


def preview(
    place: JobPlace,
    options: LaunchOptions,
    plan: LaunchPlan,
    words: Sequence[str],
    environment: Mapping[str, str],
) -> Preview:
    """What `headrace launch` with these would run."""
    facts = [NodeFacts(name, name, (0,) * (plan.ranks_per_node + 1)) for name in plan.nodes]
    interface = None if len(plan.nodes) > 1 else "lo"
    settings = settings_for(plan, options.framework, interface, environment)
    common = {s.name: s.value for s in settings if not s.kept}
    starter = (
        srun_command(place, plan.nodes) if place.scheduler == "slurm" else node_command()
    )  # fmt: skip
    helpers = []
    if options.stage:
        helpers.append(f"headrace stage {shlex.join(options.stage)} --replicas {options.replicas}")
    if options.daemon:
        helpers.append("headrace node start --foreground")
    program = program_of(words)
    return Preview(
        plan, tuple(starter), tuple(helpers), settings,
        tuple(
            commands_for(options.framework, node, plan, facts, program, common)
            for node in range(len(plan.nodes))
        ),
    )  # fmt: skip
