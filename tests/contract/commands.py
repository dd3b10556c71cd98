"""The command line as users have it: help, exit codes, environment variables, and the recipes."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import typer

from headrace.cli import dlio, exit_codes, sw
from headrace.cli.app import app
from headrace.cluster.recipes import RECIPES
from headrace.config import ENVIRONMENT_PREFIX, ReaderOptions
from tests_shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS: dict[str, Callable[[], None]] = {
    "dlio_benchmark": dlio.main,
    "dlio_benchmark_query": dlio.query,
    "swbatch": sw.swbatch,
    "swqueue": sw.swqueue,
    "swrun": sw.swrun,
}
"""Commands beside `headrace`; pyproject.toml installs them."""


def commands() -> Iterator[tuple[str, Any]]:
    """Each command of `headrace` and how it is named, groups before what is in them."""
    waiting = [("headrace", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        below = getattr(command, "commands", {})
        waiting += [(f"{name} {word}", below[word]) for word in sorted(below, reverse=True)]


def help_text() -> str:
    """What each command prints with `--help`, at the width of `COLUMNS`."""
    root = typer.main.get_command(app)
    shown = {}
    for name, _ in commands():
        shown[name] = _printed(
            functools.partial(root.main, prog_name="headrace"), [*name.split()[1:], "--help"]
        )
    with pytest.MonkeyPatch.context() as patch:
        for name, program in PROGRAMS.items():
            patch.setattr("sys.argv", [name, "--help"])
            shown[name] = _printed(lambda _, program=program: program(), [])
    return "\n".join(f"$ {name} --help\n{text}" for name, text in shown.items())


def _printed(run: Callable[[list[str]], object], words: list[str]) -> str:
    """What a command prints before it ends with 0."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code in (0, None), shlex.join(words)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def exit_codes_text() -> str:
    """Each exit code and its name; those of `launch` and `run` are in docs/reference/cli.md."""
    codes = sorted((getattr(exit_codes, name), name) for name in exit_codes.__all__)
    return "".join(f"{code} {name}\n" for code, name in codes)


def environment_text() -> str:
    """The variables that our sources name, and which of them the documentation speaks of."""
    named = re.compile(r"""["'](HEADRACE_[A-Z0-9_]+)["']""")
    kinds = ("*.py", "*.lua", "*.cc", "*.h", "*.c")
    sources = [p for kind in kinds for d in ("src/headrace", "native", "recipes")
               for p in (ROOT / d).rglob(kind)]  # fmt: skip
    found = {name for path in sources for name in named.findall(path.read_text())}
    found |= {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in ReaderOptions.__dataclass_fields__}
    pages = (
        "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
        + (ROOT / "README.md").read_text()
    )
    documented = set(re.findall(r"\bHEADRACE_[A-Z0-9_]+\b", pages))
    return "".join(
        f"{name}{' documented' if name in documented else ''}\n"
        for name in sorted(found - {ENVIRONMENT_PREFIX})
    )


def recipes_text() -> str:
    """Each recipe's files, the options of its programs, and what its job script asks Slurm for."""
    lines = []
    for recipe in RECIPES:
        lines.append(f"{recipe.name}: needs {' '.join(recipe.packages)}")
        for name, path in sorted(recipe.files.items()):
            lines.append(f"  {name}")
            if path.suffix == ".py":
                lines += [f"    {option}" for option in _options(path.read_text())]
            elif path.suffix == ".sh":
                found = re.findall(r"^#SBATCH .*", path.read_text(), re.MULTILINE)
                lines += [f"    {line}" for line in found]
        lines.append("")
    return "\n".join(lines)


def _options(source: str) -> Iterator[str]:
    """The arguments of each `add_argument`, but for their help."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = [ast.unparse(each) for each in node.args]
            given += [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords if k.arg != "help"]
            yield ", ".join(given)
