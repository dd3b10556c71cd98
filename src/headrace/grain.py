"""JAX and Grain over headrace stores: `from headrace.grain import Source, dataset`."""

from headrace.frameworks.grain import Dataset, Source, dataset

__all__ = ["Dataset", "Source", "dataset"]
