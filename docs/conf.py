"""Sphinx: MyST pages, furo, and the API from the docstrings."""

from __future__ import annotations

import headrace

project = "headrace"
author = "The headrace authors"
project_copyright = "The headrace authors"
release = version = headrace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "headrace"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Docstrings are Google style; code in them is written with single backticks.
default_role = "code"
# The pages link to files of the repository that are not pages.
suppress_warnings = ["myst.xref_missing"]
