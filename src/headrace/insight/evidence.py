"""Evidence: what is known of a run beside its steps; defined where loaders and agents can use it, too."""

from __future__ import annotations

from headrace.control.stalls import Evidence

__all__ = ["Evidence"]
