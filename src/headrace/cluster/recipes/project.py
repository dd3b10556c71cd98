"""Project: a folder of the user's own, made from a recipe. It appears whole, and never over anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ClusterError

if TYPE_CHECKING:
    from headrace.cluster.recipes.recipe import Recipe

__all__ = ["Project", "make_project"]


@dataclass(frozen=True, slots=True)
class Project:
    """What was made."""

    path: Path
    recipe: str
    files: tuple[str, ...]


def make_project(recipe: Recipe, folder: str | os.PathLike[str]) -> Project:
    """Make a project in a folder that does not exist, or is empty.

    Args:
        recipe: what it is made from.
        folder: where; folders above it are made.

    Raises:
        ClusterError: there is something already, or the folder cannot be written.
    """
    target = Path(folder).absolute()
    _check_free(target)
    files = recipe.files
    made: Path | None = None
    mask = _umask()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        for name, source in files.items():
            shutil.copyfile(source, made / name)
            (made / name).chmod((0o777 if name.endswith(".sh") else 0o666) & ~mask)
        made.chmod(0o777 & ~mask)  # mkdtemp keeps others out
        made.rename(target)  # refuses a folder that got files meanwhile
    except OSError as e:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise ClusterError(
            f"{target}: the project cannot be written: {e.strerror or e}.",
            path=str(target),
            next_step="Name a folder that you may write.",
        ) from e
    return Project(target, recipe.name, tuple(sorted(files)))


def _check_free(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        found = sorted(path.name for path in target.iterdir())
        if not found:
            return
        what = f"a folder with {', '.join(found[:3])}{' and more' if len(found) > 3 else ''}"
    else:
        what = "no folder"
    raise ClusterError(
        f"{target}: is {what}, expected nothing there: what is yours is not overwritten.",
        path=str(target),
        next_step="Name another folder.",
    )


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
