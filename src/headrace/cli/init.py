"""`headrace init`: a project of one's own, made from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import Json, Output, Quiet


def init(
    name: Annotated[
        Path | None, typer.Argument(help="The project's folder; it must not exist.")
    ] = None,
    *,
    recipe: Annotated[str, typer.Option(help="What it is made from; see --list.")] = "ddp",
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a training project that runs as it is: script, batch job, data, checkpoints, resume."""
    from headrace.cluster.recipes import RECIPES, make_project, recipe_named

    output = Output(as_json=as_json, quiet=quiet)
    if list_recipes:
        _list(output)
        return
    if name is None:
        raise ValueError(
            "the project's name is missing: headrace init NAME "
            f"[--recipe {'|'.join(each.name for each in RECIPES)}]"
        )
    chosen = recipe_named(recipe)
    project = make_project(chosen, name)
    if as_json:
        output.document(
            {"path": project.path, "recipe": project.recipe, "files": project.files,
             "packages": chosen.packages}
        )  # fmt: skip
        return
    output.line(f"{name}: {', '.join(project.files)}")
    output.remark(f"It needs {', '.join(chosen.packages)}. {name}/README.md says how to go on:")
    output.remark(f"  cd {name} && ./job.sh      # or: sbatch job.sh")


def _list(output: Output) -> None:
    from headrace.cluster.recipes import RECIPES

    if output.as_json:
        output.document(
            {"recipes": [
                {"name": each.name, "summary": each.summary, "packages": each.packages}
                for each in RECIPES
            ]}
        )  # fmt: skip
        return
    width = max(len(each.name) for each in RECIPES)
    for each in RECIPES:
        output.line(f"{each.name:<{width}}  {each.summary}")
