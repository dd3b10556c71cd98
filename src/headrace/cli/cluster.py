"""`headrace cluster`: run a command, submit a script, look at the queue; sizes are asked in GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import cluster_queue, exit_codes
from headrace.cli.cluster_options import DryRun, From, SiteFile, Where, asking
from headrace.cli.output import Json, Output, Quiet

__all__ = ["app", "batch", "init", "run"]

app = typer.Typer(
    help="Run training on a Slurm cluster, or here in the same words.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND ...]", help="Default: a shell.", show_default=False),
    ] = None,
    *,
    asked: dict[str, Any],
    dry_run: DryRun = False,
    executor: Where = None,
    site: SiteFile = None,
    source: From = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: as one JSON document.")
    ] = False,
) -> int:
    """Run a command in the foreground, or a shell, on the nodes that are asked for, and end as it ends.

    The command runs once, on the first node; `srun` in it starts one task for each GPU.
    """
    from headrace.cli.cluster_submit import Asked, run_command

    output = Output(as_json=as_json, quiet=quiet)
    return run_command(Asked(asked, executor, site, source, dry_run), command or [], output)


def batch(
    script: Annotated[str, typer.Argument(help="A script; - for standard input.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENTS ...]", help="For the script.", show_default=False),
    ] = None,
    *,
    asked: dict[str, Any],
    dry_run: DryRun = False,
    executor: Where = None,
    site: SiteFile = None,
    source: From = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Submit a script. It is sent byte for byte, with our directives after its own.

    Options of ours may stand in the script too: `#HEADRACE --gpus=8 --container=torch`.
    """
    from headrace.cli.cluster_submit import Asked, submit_script

    output = Output(as_json=as_json, quiet=quiet)
    return submit_script(
        Asked(asked, executor, site, source, dry_run), script, arguments or [], output
    )


def init(
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Default: ~/.config/headrace/site.yaml; - for standard output."
        ),
    ] = None,
    ondemand: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write apps for Open OnDemand there, and no site's file."),
    ] = None,
    module: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write modulefiles there (Lmod, Environment Modules)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files.")] = False,
    executor: Where = None,
    source: From = None,
    as_json: Json = False,
) -> int:
    """Write the site's file from what the cluster says it has, with comments. Most clusters need none."""
    from headrace.cli.cluster_submit import cluster_snapshot
    from headrace.cli.site_files import write_site_files
    from headrace.cluster.site import find_site
    from headrace.cluster.site_init import site_text

    snapshot = cluster_snapshot(executor, source)
    output = Output(as_json=as_json)
    if ondemand is not None or module is not None:
        files = write_site_files(
            snapshot, ondemand=ondemand, module=module, site_file=find_site(), overwrite=overwrite
        )
        if as_json:
            output.document({"files": files})
        else:
            output.line(f"wrote {', '.join(map(str, files))}")
        return exit_codes.OK
    return _write_site(output, site_text(snapshot), out, overwrite=overwrite)


def _write_site(output: Output, text: str, out: Path | None, *, overwrite: bool) -> int:
    from headrace.cluster.site import own_site
    from headrace.errors import ClusterError

    as_json = output.as_json
    if out is not None and str(out) == "-":
        if as_json:
            output.document({"path": None, "text": text})
        else:
            sys.stdout.write(text)
        return exit_codes.OK
    path = out or own_site()
    if path.exists() and not overwrite:
        raise ClusterError(
            f"{path} exists.",
            path=str(path),
            next_step="Give another path with --out, or --overwrite to replace it.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if as_json:
        output.document({"path": str(path), "text": text})
    else:
        output.line(f"wrote {path}; each key in it may be changed or left out")
    return exit_codes.OK


_OURS_END = {"allow_interspersed_args": False}
"""What follows the command or script is its own."""

app.command(name="run", context_settings=_OURS_END)(
    asking(run, without=("array", "output", "error", "requeue"))
)
app.command(name="batch", context_settings=_OURS_END)(asking(batch))
app.command(name="queue")(cluster_queue.queue)
app.command(name="init")(init)
