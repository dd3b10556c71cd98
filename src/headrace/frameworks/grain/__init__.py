"""Grain and JAX: a random-access source, and whole batches as a checkpointable `IterDataset`.

* source: `Source`, for Grain's own samplers, transformations and workers
* dataset: `Dataset`, whole batches in headrace's order, and Grain's iterators over them
* elements: what a batch is: rows, headrace's own buffer, or decoded samples; as numpy or JAX arrays
"""

from headrace.frameworks.grain.dataset import Dataset, dataset
from headrace.frameworks.grain.source import Source

__all__ = ["Dataset", "Source", "dataset"]
