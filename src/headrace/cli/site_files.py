"""What `headrace cluster init --ondemand DIR --module DIR` writes for a whole site."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cluster.snapshot import ClusterSnapshot

__all__ = ["write_site_files"]


def write_site_files(
    snapshot: ClusterSnapshot,
    *,
    ondemand: Path | None,
    module: Path | None,
    site_file: Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the portal's apps and the modulefiles, where they are asked for; the files.

    Args:
        snapshot: of the cluster.
        ondemand: folder of Open OnDemand's apps.
        module: a folder of MODULEPATH.
        site_file: the site's own settings, which both then name.
        overwrite: replace files of other content.

    Raises:
        ClusterError: a file is there with other content, or cannot be written.
    """
    from headrace.cluster.modulefile import modulefiles
    from headrace.cluster.ondemand import ondemand_files
    from headrace.cluster.site_facts import site_facts, write_files

    facts = site_facts(snapshot, site_file=site_file)
    written = []
    if ondemand is not None:
        written += write_files(ondemand, ondemand_files(facts), overwrite=overwrite)
    if module is not None:
        written += write_files(module, modulefiles(facts), overwrite=overwrite)
    return written
