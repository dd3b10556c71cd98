"""Containers: Apptainer, enroot, and pyxis (enroot inside `srun`), on any number of nodes, with their GPUs.

A script that starts its work with `srun` keeps running outside, and each of its steps runs inside, on every
node. A script that does not is run inside as a whole, which is possible on one node only.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.text import nearest
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.site import Site


_SUFFIXES: Final = (".sif", ".sqsh", ".simg", "")
_REGISTRIES: Final = ("HEADRACE_CONTAINER_REGISTRY", "HAL_CONTAINER_REGISTRY")
_FILES_MAX: Final = 100_000
"""Looked at in a registry."""

_STEPS = re.compile(rb"^[^#\n]*\b(srun|headrace\s+launch)\b", re.MULTILINE)

_FLAGS: Final = [
    "--contiguous", "--disable-status", "--exact", "--exclusive", "--help", "--hold", "--immediate",
    "--interactive", "--kill-on-bad-exit", "--label", "--multi-prog", "--no-allocate", "--no-kill",
    "--overcommit", "--overlap", "--oversubscribe", "--preserve-env", "--propagate", "--pty",
    "--quiet", "--reboot", "--resv-ports", "--send-libs", "--spread-job", "--test-only",
    "--unbuffered", "--usage", "--use-min-nodes", "--verbose", "--version", "--whole",
]  # fmt: skip
"""Of srun: without a value, or with one after an equals sign."""


@dataclass(frozen=True, slots=True)
class Container:
    """One image and how it is started.

    Attributes:
        runtime: "apptainer", "pyxis" or "enroot".
        image: as the runtime takes it.
        mounts: HOST[:INSIDE[:ro]].
        gpus: whether the job has any; "rocm" for AMD's.
    """

    runtime: str
    image: str
    mounts: tuple[str, ...] = ()
    gpus: str = ""

    def words(self) -> list[str]:
        """What goes before a command. Not for pyxis, which is told by `srun_options`."""
        if self.runtime == "enroot":
            mounts = [word for mount in self.mounts for word in ("--mount", _both_sides(mount))]
            return ["enroot", "start", *mounts, self.image]
        gpus = {"": [], "nv": ["--nv"], "rocm": ["--rocm"]}[self.gpus]
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpus, *binds, self.image]

    def srun_options(self) -> list[str]:
        """What pyxis adds to `srun`; GPUs come by enroot's own hook."""
        mounts = ",".join(map(_both_sides, self.mounts))
        inside = [f"--container-mounts={mounts}"] if mounts else []
        return [f"--container-image={self.image}", *inside]

    def around(self, command: Sequence[str]) -> list[str]:
        """A command inside, or as it is where `srun` sees to it."""
        return [*command] if self.runtime == "pyxis" else [*self.words(), *command]

    def step_lines(self) -> list[str]:
        """Shell lines after which each `srun` of a script runs inside."""
        head = "# headrace: each srun of this script runs in the container"
        if self.runtime == "pyxis":
            return [head, f'srun() {{ command srun {shlex.join(self.srun_options())} "$@"; }}']
        inside = shlex.join(self.words())
        flags = "|".join(_FLAGS)
        return [
            head,
            f"export HEADRACE_CONTAINER={shlex.quote(inside)}",
            "srun() {",
            "  hr_at=0 hr_value=",
            "  for hr_word do  # up to the command",
            '    if [ -n "$hr_value" ]; then hr_value=',
            '    else case "$hr_word" in',
            f"      --*=*|{flags}) ;;",
            "      -[EHIKXZhklOqQsuvV]|-[!-]?*) ;;",
            "      -*) hr_value=1 ;;",
            "      *) break ;;",
            "    esac; fi",
            "    hr_at=$((hr_at + 1))",
            "  done",
            "  hr_i=0",
            "  for hr_word do",
            "    shift",
            f'    [ "$hr_i" -ne "$hr_at" ] || set -- "$@" {inside}',
            '    set -- "$@" "$hr_word"',
            "    hr_i=$((hr_i + 1))",
            "  done",
            '  command srun "$@"',
            "}",
        ]

    def script_lines(self, interpreter: Sequence[str]) -> list[str]:
        """Shell lines after which the script itself goes on inside, on its one node."""
        run = f'{shlex.join(interpreter)} "$0" "$@"'
        if self.runtime == "pyxis":
            mounts = ",".join(["$0:$0", *(_both_sides(mount) for mount in self.mounts)])
            image = shlex.quote(self.image)
            step = f"srun --nodes=1 --ntasks=1 --container-image={image}"
            start = f'{step} --container-mounts="{mounts}" {run}'
        else:
            words = self.words()
            bind = '--mount "$0:$0"' if self.runtime == "enroot" else '--bind "$0:$0:ro"'
            start = f"{shlex.join(words[:-1])} {bind} {shlex.quote(self.image)} {run}"
        return [
            "# headrace: this script goes on in the container",
            'if [ -z "${HEADRACE_INSIDE-}" ]; then',
            "  export HEADRACE_INSIDE=1",
            f"  exec {start}",
            "fi",
        ]


def has_steps(script: bytes) -> bool:
    """Whether a script starts work with `srun`, or with what uses it."""
    return _STEPS.search(script) is not None


def _both_sides(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"


def find_container(
    asked: str, site: Site, *, gpus: str, environment: Mapping[str, str] = os.environ
) -> Container:
    """The image that a file, a URL or a name in the registry means; `gpus`: "nv", "rocm", or "" for none.

    Raises:
        ClusterRequestError: there is no such image.
    """
    if re.match(r"[a-z][a-z0-9+.-]*://", asked, re.ASCII):
        runtime = site.containers_runtime or "apptainer"
        image = asked if runtime == "apptainer" else _enroot_image(asked, runtime)
        return Container(runtime, image, site.containers_mounts, gpus)
    path = Path(asked).absolute()
    if "/" not in asked and not path.is_file():
        named = (environment[name] for name in _REGISTRIES if environment.get(name))
        folders = next(named, site.containers_registry)
        path = _in_registry(asked, [Path(f) for f in folders.split(":") if f])
    elif not path.exists():
        raise ClusterRequestError(f"there is no container image {path}.", path=str(path))
    runtime = site.containers_runtime or ("pyxis" if path.suffix == ".sqsh" else "apptainer")
    return Container(runtime, str(path), site.containers_mounts, gpus)


def _enroot_image(url: str, runtime: str) -> str:
    """docker://nvcr.io/nvidia/pytorch:25.01 -> nvcr.io#nvidia/pytorch:25.01, as pyxis takes it."""
    kind, _, rest = url.partition("://")
    if runtime != "pyxis" or kind != "docker":
        raise ClusterRequestError(
            f"the container {url!r} cannot be started by {runtime}.",
            next_step="Import it first: enroot import -o IMAGE.sqsh URL; then give the file.",
        )
    host, slash, path = rest.partition("/")
    return f"{host}#{path}" if slash and ("." in host or ":" in host) else rest


def _in_registry(name: str, folders: Sequence[Path]) -> Path:
    if not folders:
        raise ClusterRequestError(
            f"the container {name!r} is no file, and there is no registry to look in.",
            next_step=f"Give a path, or set {_REGISTRIES[0]} or containers.registry of the site's file.",
        )
    wanted = {name + suffix for suffix in _SUFFIXES}
    seen: set[str] = set()
    for folder in folders:
        for suffix in _SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
        for path in sorted(islice(folder.rglob("*"), _FILES_MAX)):
            if path.name in wanted and path.is_file():
                return path
            if path.suffix in _SUFFIXES[:-1]:
                seen.add(path.stem)
    hint = f"Did you mean {close}? " if (close := nearest(name, sorted(seen))) else ""
    where = ", ".join(str(folder) for folder in folders)
    raise ClusterRequestError(
        f"there is no container {name!r} in {where}.",
        next_step=f"{hint}{len(seen)} images are there; or give a path.",
    )
