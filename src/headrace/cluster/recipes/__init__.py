"""Recipes: training jobs that run as they are, and the projects that are made of them.

The repository's folder `recipes/` is the one source; the wheel carries it as `files/recipes` in this package.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from headrace.base.files import explained, temporary_name
from headrace.base.text import nearest
from headrace.errors import ClusterError, ClusterRequestError

__all__ = ["RECIPES", "TrainingRecipe", "make_project", "recipe_named", "recipes_folder"]


class TrainingRecipe(NamedTuple):
    """One recipe."""

    name: str
    summary: str
    packages: tuple[str, ...]

    @property
    def files(self) -> dict[str, Path]:
        """What a project of it has: each file's name, and where its text lies."""
        folder = recipes_folder()
        own = sorted(path for path in (folder / self.name).iterdir() if path.is_file())
        return {path.name: path for path in (folder / "prepare.py", *own)}


RECIPES: Final = (
    TrainingRecipe("ddp", "PyTorch DistributedDataParallel: a model on each rank, gradients averaged",
                   ("torch", "pillow")),
    TrainingRecipe("fsdp", "PyTorch FSDP: weights and optimizer cut among the ranks, each saves its own part",
                   ("torch", "pillow")),
    TrainingRecipe("tensorflow", "TensorFlow MultiWorkerMirroredStrategy, a worker for each rank",
                   ("tensorflow", "pillow")),
    TrainingRecipe("jax", "JAX: the batches of all processes as one array over one mesh",
                   ("jax", "grain", "pillow")),
    TrainingRecipe("mpi", "MPI, Horovod's way: gradients averaged by one all-reduce of mpi4py's",
                   ("torch", "mpi4py", "pillow")),
    TrainingRecipe("gpt", "A small GPT on windows of tokens, by DistributedDataParallel", ("torch",)),
)  # fmt: skip


def recipe_named(name: str) -> TrainingRecipe:
    """The recipe of a name."""
    names = [recipe.name for recipe in RECIPES]
    if name in names:
        return RECIPES[names.index(name)]
    near = nearest(name.lower(), names)
    raise ClusterRequestError(
        f"recipe is {name!r}, expected one of {', '.join(names)}.",
        next_step=f"Did you mean {near}?" if near else "`headrace init --list` shows them.",
    )


def recipes_folder() -> Path:
    """The folder of recipes: in the installed package, or in the checkout that is installed editably."""
    here = Path(__file__).resolve().parent
    for folder in (here / "files" / "recipes", here.parents[3] / "recipes"):
        if (folder / "prepare.py").is_file():
            return folder
    raise ClusterError(
        f"{here / 'files'}: this installation of headrace has no recipes.",
        path=str(here / "files"),
        next_step="Install it again, from a wheel or from a whole checkout.",
    )


# -- projects ------------------------------------------------------------------------------------------


def make_project(recipe: TrainingRecipe, folder: str | os.PathLike[str]) -> Path:
    """Make a project in a folder that does not exist, or is empty; its path."""
    target = Path(folder).absolute()
    is_folder = target.is_dir() and not target.is_symlink()
    names = sorted(path.name for path in target.iterdir()) if is_folder else []
    if names or (os.path.lexists(target) and not is_folder):
        more = " and more" if len(names) > 3 else ""
        what = f"a folder with {', '.join(names[:3])}{more}" if names else "no folder"
        raise ClusterError(
            f"{target}: is {what}, expected nothing there: what is yours is not overwritten.",
            path=str(target),
            next_step="Name another folder.",
        )
    files = recipe.files
    temporary = Path(temporary_name(target))
    os.umask(mask := os.umask(0o022))
    what, next_step = "the project cannot be written", "Name a folder that you may write."
    try:
        with explained(ClusterError, target, what, next_step):
            temporary.mkdir(parents=True)
            for name, source in files.items():
                shutil.copyfile(source, temporary / name)
                (temporary / name).chmod((0o777 if name.endswith(".sh") else 0o666) & ~mask)
            temporary.rename(target)  # refuses a folder that got files meanwhile
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
