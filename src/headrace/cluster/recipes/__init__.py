"""Recipes: training jobs that run as they are, and the projects that are made of them.

The repository's folder `recipes/` is the one source; the wheel carries it as `files/recipes` in this package.
"""

from headrace.cluster.recipes.project import Project, make_project
from headrace.cluster.recipes.recipe import RECIPES, Recipe, recipe_named, recipes_folder

__all__ = [
    "RECIPES",
    "Project",
    "Recipe",
    "make_project",
    "recipe_named",
    "recipes_folder",
]
