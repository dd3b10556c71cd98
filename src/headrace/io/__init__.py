"""Reading: batches of extents through the engines of the native core."""

from headrace.io.batch_reader import BatchReader, PendingBatch

__all__ = ["BatchReader", "PendingBatch"]
