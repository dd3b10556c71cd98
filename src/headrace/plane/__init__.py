"""The data plane of one process: batches read ahead in order, and the loader that delivers them."""

from headrace.plane.batch import Batch
from headrace.plane.loader import Loader, LoaderStats

__all__ = ["Batch", "Loader", "LoaderStats"]
