"""Modules and environments: the shell lines that make them ready, before a user's first command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cluster.request import Request
    from headrace.cluster.site import Site

__all__ = ["environment_lines"]

_MODULE = '. "${LMOD_PKG:-${MODULESHOME:-/usr/share/modules}}/init/sh"'
"""What defines `module` where the caller's shell did not bring it along."""


def environment_lines(request: Request, site: Site) -> list[str]:
    """Lines of POSIX shell; none where nothing is asked for. What fails ends the job, with the reason."""
    lines: list[str] = []
    if request.modules:
        setup = [f". {shlex.quote(file)}" for file in site.module_setup]
        lines += setup or [f"type module >/dev/null 2>&1 || {_MODULE}"]
        names = " ".join(shlex.quote(name) for name in (*site.module_load, *request.modules))
        lines.append(_or_end(f"module load {names}", "the modules cannot be loaded"))
    if request.conda:
        setup_file = shlex.quote(site.conda_setup)
        lines.append(f". {setup_file}" if site.conda_setup else 'eval "$(conda shell.posix hook)"')
        lines.append(
            _or_end(
                f"conda activate {shlex.quote(request.conda)}",
                "the conda environment cannot be activated",
            )
        )
    if request.venv:
        activate = shlex.quote(f"{request.venv.rstrip('/')}/bin/activate")
        lines.append(_or_end(f". {activate}", "the Python environment cannot be activated"))
    return ["# headrace: modules and environments", *lines] if lines else []


def _or_end(command: str, why: str) -> str:
    return f"{command} || {{ echo 'headrace: {why}' >&2; exit 1; }}"
