"""Plan: a request and a script made ready to be submitted, and everything that was decided on the way.

What is said nearer wins: the command line, `SBATCH_` variables, `#HEADRACE` lines, `#SBATCH` lines, the site.
A script that sizes its job in Slurm's own words (--nodes, --gres, ...) and is given no size keeps them, and
nothing is laid out.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.cluster.containers import find_container, has_steps
from headrace.cluster.executor import (
    EXECUTOR_VARIABLE,
    Submission,
    executor,
    executor_name,
    ray_address,
)
from headrace.cluster.layout import JobLayout, candidates, lay_out, time_limit
from headrace.cluster.notation import compress_hosts
from headrace.cluster.request import (
    JOB_OPTIONS,
    NOT_IN_THE_FOREGROUND,
    WORDS_OF_OURS,
    JobRequest,
    OptionKind,
    read_request,
    read_shorthand,
    request_of_words,
)
from headrace.cluster.script import PARTS, Directive, Script, Word, read_script, read_words
from headrace.cluster.site import find_site, read_site
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.containers import Container
    from headrace.cluster.executor import ExecutorName
    from headrace.cluster.site import Site
    from headrace.cluster.snapshot import ClusterSnapshot


# -- modules and environments --------------------------------------------------------------------------

_MODULE = '. "${LMOD_PKG:-${MODULESHOME:-/usr/share/modules}}/init/sh"'
"""What defines `module` where the caller's shell did not bring it along."""


def environment_lines(request: JobRequest, site: Site) -> list[str]:
    """Lines of POSIX shell; none where nothing is asked for. What fails ends the job, with the reason."""
    lines: list[str] = []

    def must(command: str, why: str) -> None:
        lines.append(f"{command} || {{ echo 'headrace: {why}' >&2; exit 1; }}")

    if request.modules:
        setup = [f". {shlex.quote(file)}" for file in site.modules_setup]
        lines += setup or [f"type module >/dev/null 2>&1 || {_MODULE}"]
        names = shlex.join([*site.modules_load, *request.modules])
        must(f"module load {names}", "the modules cannot be loaded")
    if request.conda:
        own = f". {shlex.quote(site.conda_setup)}"
        lines.append(own if site.conda_setup else 'eval "$(conda shell.posix hook)"')
        activate = f"conda activate {shlex.quote(request.conda)}"
        must(activate, "the conda environment cannot be activated")
    if request.venv:
        activate = shlex.quote(f"{request.venv.rstrip('/')}/bin/activate")
        must(f". {activate}", "the Python environment cannot be activated")
    return ["# headrace: modules and environments", *lines] if lines else []


# -- plans ---------------------------------------------------------------------------------------------

_SIZES: Final = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket",
    "ntasks-per-core", "cpus-per-task", "cpus-per-gpu", "gres", "gpus", "gpus-per-node",
    "gpus-per-task", "gpus-per-socket", "mem", "mem-per-cpu", "mem-per-gpu", "sockets-per-node",
    "cores-per-socket", "tres-per-task",
})  # fmt: skip
"""Slurm's words for sizes; two that say the same in other words contradict each other."""

_IN_GPUS: Final = frozenset({"gpus", "cpus-per-gpu", "mem-per-gpu"})
"""Those that leave the layout open."""

_SIZED: Final = _SIZES - _IN_GPUS | PARTS
"""With one of them a script sizes its job in Slurm's own words, or has parts that differ."""

_SIZE_FIELDS: Final = frozenset(option.field for option in JOB_OPTIONS if option.slurm in _SIZES)
_LAID_OUT: Final = _SIZE_FIELDS | {"partition", "time", "node_type", "gpu_type"}
_VARIABLES: Final = {"gres": "SBATCH_GRES"} | {
    o.slurm: o.variable for o in JOB_OPTIONS if o.variable
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a plan is made for.

    Attributes:
        site: what is special.
        runs_on: its executor; Slurm's for a snapshot that was saved.
        remarks: what the user may want to know of it.
    """

    snapshot: ClusterSnapshot
    site: Site
    runs_on: ExecutorName = "slurm"
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str | None = None, site: Path | None = None, source: Path | None = None
    ) -> Cluster:
        """That of the executor of this name, as it is now or was saved (`source`), with its site's file."""
        rules, remarks = read_site(site or find_site()), list[str]()
        snapshot = cluster_snapshot(name, source)
        if rules.cluster and snapshot.cluster and rules.cluster != snapshot.cluster:
            remarks.append(
                f"{rules.path} is of cluster {rules.cluster}, this is {snapshot.cluster}."
            )
        runs_on = executor_name(name) if source is None else "slurm"
        if runs_on in {"local", "ray"} and not name and not os.environ.get(EXECUTOR_VARIABLE):
            what = "this machine" if runs_on == "local" else f"the Ray cluster at {ray_address()}"
            remarks.append(f"there is no Slurm here (no sbatch): {what} runs it.")
        return cls(snapshot, rules, runs_on, remarks=tuple(remarks))

    def is_short(self, partition: str) -> bool:
        """Whether a partition's name is one of HAL's short words for sizes."""
        names = [known.name for known in self.snapshot.partitions]
        return bool(partition) and read_shorthand(partition, names) is not None


def cluster_snapshot(
    name: str | None, source: Path | None = None, *, jobs: bool = False
) -> ClusterSnapshot:
    """A saved snapshot (`source`), or what the cluster of the executor of this name has now."""
    if source is None:
        return executor(name).snapshot(jobs=jobs)
    from headrace.cluster.snapshot import load_snapshot

    return load_snapshot(source)


class BatchPlan(NamedTuple):
    """A script that can be submitted."""

    submission: Submission
    layout: JobLayout | None
    remarks: tuple[str, ...]
    runs_on: ExecutorName = "slurm"

    @property
    def command(self) -> list[str] | None:
        """What is run, with the script on its standard input; None: nothing, without Slurm."""
        if self.runs_on != "slurm":
            return None
        arguments = ["/dev/stdin", *self.submission.arguments] if self.submission.arguments else []
        return ["sbatch", "--parsable", *self.submission.options, *arguments]


class RunPlan(NamedTuple):
    """A command in the foreground."""

    command: tuple[str, ...]
    layout: JobLayout
    remarks: tuple[str, ...]


# -- a script ----------------------------------------------------------------------------------------


def plan_batch(
    data: bytes, name: str, asked: JobRequest, cluster: Cluster, arguments: Sequence[str] = ()
) -> BatchPlan:
    """A script made ready.

    Raises:
        ClusterRequestError: it cannot be submitted as it is, or nothing can meet what it asks for.
    """
    if asked.directory:  # what submits goes there, and gives the option besides
        asked = dataclasses.replace(asked, directory=str(Path(asked.directory).absolute()))
    script = read_script(data, name, WORDS_OF_OURS)
    lines, ours = JobRequest(), JobRequest()
    slurms = [each for each in script.directives if not each.ours]
    names = {word.name for each in slurms for word in each.words}
    for each in script.directives:
        where = f"{name}, line {each.line}"
        if each.ours:
            ours = request_of_words(each.words, where, ours=True).over(ours)
        else:
            lines = request_of_words(each.words, where).over(lines)
    given = cluster.environment
    variables = {o.field: given.get(o.variable, "") for o in JOB_OPTIONS if o.variable}
    env = read_request(variables, "SBATCH_ variables")
    site = JobRequest(account=cluster.site.account, qos=cluster.site.qos)
    nearer = asked.over(env).over(ours)
    remarks = list(script.remarks)
    if nearer.gpus and names & _SIZED:
        lines = dataclasses.replace(
            lines, gpus=None, nodes=None, tasks_per_node=None, cpus=None, memory=None
        )
        remarks.append(f"{name} sizes its job itself; the size asked for nearer holds instead.")
    request = nearer.over(lines).over(site)
    is_sized = nearer.said() & {"gpus", "nodes"}
    if is_sized and not nearer.partition and cluster.is_short(lines.partition):
        # A short word of the script gives way to GPUs or nodes that are asked for nearer.
        request = dataclasses.replace(request, partition="")
    layout = None
    if _is_open(names, nearer, request, cluster):
        layout = _lay_out(request, cluster)
        remarks += layout.remarks
    words, disabled = _words(slurms, name, cluster, request, nearer.over(site), layout, remarks)
    preamble = _preamble(request, script, layout, cluster, remarks)
    if preamble and not script.is_shell:
        text = _wrapped(script, words, preamble, disabled)
    else:
        text = script.with_lines(words, preamble, disabled=disabled)
    options = [str(w) for w in words if given.get(_VARIABLES.get(w.name, ""))]
    if layout and given.get("SBATCH_GPUS"):
        options.append(f"--gpus={layout.gpus}")
    submission = Submission(
        text, (*options, *_passed_on(asked)), tuple(arguments),
        Path(request.directory) if asked.directory else None, cluster=cluster.snapshot.cluster,
        image=request.container if cluster.runs_on == "kubernetes" else "",
    )  # fmt: skip
    return BatchPlan(submission, layout, tuple(remarks), cluster.runs_on)


def _lay_out(request: JobRequest, cluster: Cluster) -> JobLayout:
    snapshot, more = cluster.snapshot, []
    if cluster.runs_on == "local":  # it has as many "GPUs" as are asked for
        from headrace.cluster.local.executor import local_snapshot

        short = read_shorthand(request.partition, ())
        gpus = request.gpus or (short.gpus if short else 0)
        snapshot = local_snapshot(-(-gpus // (request.nodes or 1)), request.nodes or 1)
        if gpus and not cluster.snapshot.nodes[0].gpus:
            more.append(f"this machine has no GPUs: the {gpus} asked for are processes here.")
        if len(names := [node.name for node in snapshot.nodes]) > 1:
            more.append(f"the nodes, {compress_hosts(names)}, are all this machine.")
    layout = lay_out(request, snapshot, cluster.site)
    return dataclasses.replace(layout, remarks=(*layout.remarks, *more))


def _passed_on(asked: JobRequest) -> list[str]:
    for option in asked.slurm:
        if not option.startswith("-"):
            raise ClusterRequestError(
                f"--slurm is {option!r}, expected an option of sbatch.",
                next_step="Write it with its value joined: --slurm=--mail-type=END.",
            )
    return [str(word) for word in read_words(asked.slurm)]


def _is_open(names: set[str], nearer: JobRequest, request: JobRequest, cluster: Cluster) -> bool:
    """Whether the size is ours to lay out; `names` are of Slurm's options in the script."""
    if names & PARTS:
        return False
    if nearer.gpus or nearer.gpu_type or nearer.node_type or cluster.is_short(request.partition):
        return True
    return not names & _SIZED and bool(request.said() & _SIZE_FIELDS)


def _words(  # noqa: PLR0917 - who asks for what, and what has been decided
    directives: Sequence[Directive],
    name: str,
    cluster: Cluster,
    request: JobRequest,
    nearer: JobRequest,
    layout: JobLayout | None,
    remarks: list[str],
) -> tuple[list[Word], set[int]]:
    """The words to add, in order, and the lines (from 1) of Slurm's directives to disable."""
    laid_out, dropped, left = list[Word](), WORDS_OF_OURS, frozenset({"partition", "time"})
    if layout is not None:
        laid_out, left = layout.words(), _LAID_OUT
        dropped |= _SIZES - {word.name for word in laid_out}
    elif not PARTS & {word.name for each in directives for word in each.words}:
        laid_out = _limits(request, nearer, cluster, remarks)
    elif nearer.partition:
        laid_out = [Word("partition", nearer.partition)]
    restated: list[Word] = []
    disabled: set[int] = set()
    kept: set[str] = set()
    for each in directives:
        if any(word.name in dropped for word in each.words):
            disabled.add(each.line)
            restated += [word for word in each.words if word.name not in dropped]
        else:
            kept |= {word.name for word in each.words}
    # What is said elsewhere than in Slurm's words in the script.
    fields: list[Word] = []
    for option in JOB_OPTIONS:
        value = getattr(request, option.field)
        is_said = option.slurm and option.field in request.said() - left
        if is_said and (getattr(nearer, option.field) == value or option.slurm not in kept):
            unit = "M" if option.kind is OptionKind.MEMORY and value else ""
            fields.append(Word(option.slurm, None if value is True else f"{value}{unit}"))
    if layout is not None:
        kind = ",".join(filter(None, [request.constraint, layout.constraint]))
        away = ",".join([*filter(None, [request.exclude]), *layout.exclude])
        fields = [word for word in fields if word.name not in ("constraint", "exclude")]
        fields += [Word(n, v) for n, v in (("constraint", kind), ("exclude", away)) if v]
    if not request.name:
        fields.append(Word("job-name", Path(name).name))
    names = {word.name for word in (*laid_out, *fields)}
    return [*[word for word in restated if word.name not in names], *laid_out, *fields], disabled


def _limits(
    request: JobRequest, nearer: JobRequest, cluster: Cluster, remarks: list[str]
) -> list[Word]:
    """Partition and time of a script that sizes its job itself."""
    words = [Word("partition", nearer.partition)] if nearer.partition else []
    if request.time or request.partition:
        plain = dataclasses.replace(request, node_type="")
        partitions = candidates(plain, cluster.snapshot, cluster.site, minutes=None)
        is_default = [p for p in partitions if p.is_default]
        partition = partitions[0] if request.partition or not is_default else is_default[0]
        own: list[str] = []
        time, capped = time_limit(partition, request.time, cluster.site, own, bare_hours=False)
        if capped or (nearer.time and time):
            remarks += own
            words.append(Word("time", time))
    return words


def _preamble(
    request: JobRequest, script: Script, layout: JobLayout | None, cluster: Cluster,
    remarks: list[str],
) -> list[str]:  # fmt: skip
    lines = environment_lines(request, cluster.site)
    if request.venv and not Path(request.venv, "bin/activate").exists():
        remarks.append(f"{request.venv} has no bin/activate here; it must have one on the nodes.")
    if not request.container or cluster.runs_on == "kubernetes":
        return lines
    container = _container(request, layout, cluster)
    if not script.is_shell:
        raise ClusterRequestError(
            f"{script.name}: a script of {' '.join(script.interpreter)} cannot be put "
            f"into a container as it is.",
            path=script.name, next_step="Write a shell script that starts it with srun.",
        )  # fmt: skip
    if has_steps(script.data):
        remarks.append(
            f"container {container.image}: each srun of the script runs inside, the rest outside."
        )
        return [*lines, *container.step_lines()]
    nodes = layout.nodes if layout is not None else request.nodes or 1
    if nodes > 1:
        raise ClusterRequestError(
            f"{script.name}: the script starts nothing with srun, so all of it would run in the "
            f"container on the first of {nodes} nodes.",
            path=script.name, next_step="Start the work with srun: then each step runs inside, on all nodes.",
        )  # fmt: skip
    remarks.append(f"container {container.image}: the whole script runs inside.")
    return [*container.script_lines(script.interpreter), *lines]


def _container(request: JobRequest, layout: JobLayout | None, cluster: Cluster) -> Container:
    is_amd = layout is not None and layout.gpu_type.lower().startswith("mi")
    kind = "" if layout is not None and not layout.gpus else "rocm" if is_amd else "nv"
    given = cluster.environment
    return find_container(request.container, cluster.site, gpus=kind, environment=given)


def _wrapped(script: Script, words: list[Word], preamble: list[str], disabled: set[int]) -> bytes:
    """A script that is no shell's, behind a shell that makes its environment ready. Its bytes are kept."""
    names, slurms = {word.name for word in words}, (d for d in script.directives if not d.ours)
    own = [word for d in slurms if d.line not in disabled for word in d.words]
    head = dataclasses.replace(script, lines=(b"#!/bin/bash\n",), insert_at=1)
    mark = "HEADRACE_SCRIPT"
    while mark.encode() in script.data:
        mark += "_"
    # Read from a descriptor: no file is left behind.
    call = f"exec {shlex.join(script.interpreter)} /dev/fd/9 \"$@\" 9<<'{mark}'"
    text = head.with_lines([*[w for w in own if w.name not in names], *words], [*preamble, call])
    body = script.data if script.data.endswith(b"\n") else script.data + b"\n"
    return text + body + mark.encode() + b"\n"


# -- a command ---------------------------------------------------------------------------------------

_SHELL: Final = ("bash", "-i")


def plan_run(
    asked: JobRequest, command: Sequence[str], cluster: Cluster, *, terminal: bool
) -> RunPlan:
    """A command in the foreground, or a shell: once, on the first node, with the whole allocation to itself."""
    for option in JOB_OPTIONS:
        if option.field in NOT_IN_THE_FOREGROUND & asked.said():
            raise ClusterRequestError(
                f"{option.flag} makes no sense for a command in the foreground.",
                next_step="Write a script: headrace cluster batch SCRIPT.",
            )
    if cluster.runs_on == "kubernetes":
        raise ClusterRequestError(
            "a command in the foreground is not run on Kubernetes.",
            next_step="Submit a script: headrace cluster batch SCRIPT, and headrace cluster logs --follow JOB.",
        )
    site = cluster.site
    request = asked.over(JobRequest(account=site.account, qos=site.qos))
    layout = _lay_out(request, cluster)
    lines = environment_lines(request, site)
    inner = list(command) or list(_SHELL)
    if lines:
        text = "; ".join([line for line in lines if not line.startswith("#")] + ['exec "$@"'])
        inner = ["bash", "-c", text, "bash", *inner]
    step = ["srun", "--interactive", "--preserve-env", *(["--pty"] if terminal else [])]
    if request.container:
        container = _container(request, layout, cluster)
        inner = container.around(inner)
        step += container.srun_options() if container.runtime == "pyxis" else []
    if cluster.runs_on != "slurm":
        return RunPlan(tuple(inner), layout, layout.remarks)
    name = Path(command[0]).name if command else "interactive"
    words, _ = _words((), name, cluster, request, request, layout, [])
    allocate = ["salloc", *(str(word) for word in words), *_passed_on(asked)]
    return RunPlan((*allocate, *step, *inner), layout, layout.remarks)
