"""JAX and Grain over headrace stores: `from headrace.grain import Source, dataset`."""

from headrace.base.extras import import_extra

import_extra("grain", "headrace.grain")
from headrace.frameworks.grain import Dataset, Source, dataset  # noqa: E402

__all__ = ["Dataset", "Source", "dataset"]
