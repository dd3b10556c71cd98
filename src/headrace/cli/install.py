"""`headrace init`, `demo`, `grafana`, `config`, `version`: first steps, and what is installed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from headrace.cli.options import CommandGroup, JsonOutput, QuietOutput
from headrace.cli.printing import Output


def version(*, output: JsonOutput) -> None:
    """Version, native build, checksum implementation, Python, platform."""
    import platform

    import numpy as np

    import headrace
    from headrace import _native

    data = {
        "headrace": headrace.__version__, "native_build": _native.build_type,
        "crc32c": _native.crc32c_implementation, "python": platform.python_version(),
        "numpy": np.__version__, "platform": platform.platform(),
    }  # fmt: skip
    rows = [f"  {k.replace('_', ' '):<14}{v}" for k, v in data.items() if k != "headrace"]
    output.result(data, f"headrace {headrace.__version__}", *rows)


def config(
    *,
    cflags: bool = Option(False, "--cflags", help="Compiler flags."),
    libs: bool = Option(False, "--libs", help="Linker flags."),
    include_dir: bool = Option(False, "--include-dir", help="The folder of headrace.h."),
    library_dir: bool = Option(False, "--library-dir", help="The folder of libheadrace.so."),
    pkgconfig_dir: bool = Option(False, "--pkgconfig-dir", help="For PKG_CONFIG_PATH."),
    cmake_dir: bool = Option(False, "--cmake-dir", help="For -Dheadrace_DIR=."),
    output: JsonOutput,
) -> None:
    """Flags and folders of the C API, on one line; all of them, named, without options."""
    import shlex

    from headrace import capi

    flags = {
        "cflags": capi.compile_flags(),
        "libs": capi.link_flags(),
        "include_dir": [str(capi.include_dir())],
        "library_dir": [str(capi.library_dir())],
        "pkgconfig_dir": [str(capi.pkgconfig_dir())],
        "cmake_dir": [str(capi.cmake_dir())],
    }
    asked = {
        "cflags": cflags, "libs": libs, "include_dir": include_dir, "library_dir": library_dir,
        "pkgconfig_dir": pkgconfig_dir, "cmake_dir": cmake_dir,
    }  # fmt: skip
    shown = {n: shlex.join(w) for n, w in flags.items() if asked[n] or not any(asked.values())}
    lines = [f"{name.replace('_', '-'):<14}{words}" for name, words in shown.items()]
    output.result(shown, *([" ".join(shown.values())] if any(asked.values()) else lines))


def init(
    name: Path | None = Argument(None, help="The project's folder; it must not exist."),
    *,
    recipe: str = Option("ddp", help="What it is made from; see --list.", metavar="NAME"),
    list_recipes: bool = Option(False, "--list", help="Show the recipes."),
    output: QuietOutput,
) -> None:
    """Make a training project that runs as it is: script, batch job, data, checkpoints, resume."""
    from importlib.metadata import Distribution

    from headrace.cluster.recipes import RECIPES, make_project, recipe_named

    if list_recipes:
        width = max(len(each.name) for each in RECIPES)
        known = [{"name": r.name, "summary": r.summary, "packages": r.packages} for r in RECIPES]
        lines = [f"{each.name:<{width}}  {each.summary}" for each in RECIPES]
        output.result({"recipes": known}, *lines)
        return
    if name is None:
        known_names = "|".join(each.name for each in RECIPES)
        raise ValueError(
            f"the project's name is missing: headrace init NAME [--recipe {known_names}]"
        )
    chosen = recipe_named(recipe)
    path, files = make_project(chosen, name), sorted(chosen.files)
    document = {"path": path, "recipe": chosen.name, "files": files, "packages": chosen.packages}
    output.result(document, f"{name}: {', '.join(files)}")
    if output.as_json:
        return
    missing = [each for each in chosen.packages if not any(Distribution.discover(name=each))]
    if missing:
        output.remark(f"These are not installed here: pip install {' '.join(missing)}")
    output.remark(f"It uses {', '.join(chosen.packages)}. {name}/README.md says how to go on:")
    output.remark(f"  cd {name} && ./job.sh      # or: sbatch job.sh")


def demo(
    *,
    data: Path | None = Option(
        None,
        help="Folder of images, a folder per class.",
        show_default="Debian's clip art",
        metavar="DIR",
    ),
    epochs: int = Option(3, min=2, help="Epochs to train."),
    out: Path = Option(Path("build/demo"), help="Where stores and checkpoints go.", metavar="DIR"),
    output: JsonOutput,
) -> int:
    """Pack real images, train on them, interrupt, resume, and compare with PyTorch's DataLoader.

    Needs torch: `pip install 'headrace[torch]'`.
    """
    from headrace.cli.progress import progress
    from headrace.demo import DemoOptions, main

    options = DemoOptions(data=data, epochs=epochs, out=out)
    return main(options, partial(progress, output), as_json=output.as_json)


grafana_app = CommandGroup("The dashboard and the alerts that go with what `--metrics` serves.")


@grafana_app.callback()
def _group() -> None:
    pass


_Target = Annotated[
    str | None,
    Option("--output", "-o", metavar="FILE", help="Where to write.", show_default="stdout"),
]


@grafana_app.command("export")
def export_dashboard(*, target: _Target = None, output: JsonOutput) -> None:
    """Write the dashboard as JSON: import it in Grafana, and choose your Prometheus."""
    from headrace.insight import dashboard

    _export(dashboard(), target, "in Grafana, Dashboards, New, Import", output)


@grafana_app.command("alerts")
def export_alerts(*, target: _Target = None, output: JsonOutput) -> None:
    """Write rules for Prometheus: starving jobs, idle GPUs, dead agents, file systems near their limits."""
    from headrace.insight import alerts

    _export(alerts(), target, "name it under rule_files in prometheus.yml", output)


def _export(text: str, target: str | None, next_step: str, output: Output) -> None:
    if target is None:
        sys.stdout.write(text)
        return
    Path(target).write_text(text, encoding="utf-8")
    output.result({"path": target, "bytes": len(text.encode())}, f"wrote {target}: {next_step}")
