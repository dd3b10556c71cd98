"""What commands print, and the options that all of them have for it."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.base.text import printable
from headrace.cli.printing import Output, plain

__all__ = ["Json", "Output", "Quiet", "Verbose", "plain", "printable"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; errors with traceback.")]
