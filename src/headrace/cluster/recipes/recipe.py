"""Recipe: one way to train on many ranks; which there are, and where their files lie."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ClusterError, ClusterRequestError

__all__ = ["RECIPES", "Recipe", "recipe_named", "recipes_folder"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe.

    Attributes:
        name: of its folder, and for `headrace init --recipe`.
        summary: what it shows.
        packages: that pip must find beside headrace itself.
    """

    name: str
    summary: str
    packages: tuple[str, ...]

    @property
    def files(self) -> dict[str, Path]:
        """What a project of it has: each file's name, and where its text lies.

        Raises:
            ClusterError: this installation has no recipes.
        """
        folder = recipes_folder()
        own = sorted(path for path in (folder / self.name).iterdir() if path.is_file())
        return {path.name: path for path in (*own, folder / "prepare.py")}


RECIPES: Final = (
    Recipe(
        "ddp",
        "PyTorch DistributedDataParallel: a model on each rank, gradients averaged",
        ("torch", "pillow"),
    ),
    Recipe(
        "fsdp",
        "PyTorch FSDP: weights and optimizer cut among the ranks, each saves its own part",
        ("torch", "pillow"),
    ),
    Recipe(
        "tensorflow",
        "TensorFlow MultiWorkerMirroredStrategy, a worker for each rank",
        ("tensorflow", "pillow"),
    ),
    Recipe(
        "jax",
        "JAX: the batches of all processes as one array over one mesh",
        ("jax", "grain", "pillow"),
    ),
    Recipe(
        "mpi",
        "MPI, Horovod's way: gradients averaged by one all-reduce of mpi4py's",
        ("torch", "mpi4py", "pillow"),
    ),
)


def recipe_named(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ClusterRequestError: there is none.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    names = [recipe.name for recipe in RECIPES]
    near = difflib.get_close_matches(name.lower(), names, 1)
    raise ClusterRequestError(
        f"recipe is {name!r}, expected one of {', '.join(names)}.",
        next_step=f"Did you mean {near[0]}?" if near else "`headrace init --list` shows them.",
    )


def recipes_folder() -> Path:
    """The folder of recipes: in the installed package, or in the checkout that is installed editably.

    Raises:
        ClusterError: there is neither.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "files" / "recipes", here.parents[3] / "recipes"):
        if (folder / "prepare.py").is_file():
            return folder
    raise ClusterError(
        f"{here / 'files'}: this installation of headrace has no recipes.",
        path=str(here / "files"),
        next_step="Install it again, from a wheel or from a whole checkout.",
    )
