"""PyTorch: a map-style data set and a loader over stores.

* tensors: batches as tensors over headrace's own buffers
* decode: a user's decode function, sample by sample, with its random numbers
* dataset: `Dataset`, for torch's own loaders and samplers
* loader: `DataLoader`, which delivers in headrace's order and resumes exactly
* whole, threads, workers: its three ways from bytes to batches
"""

from headrace.frameworks.torch.dataset import Dataset
from headrace.frameworks.torch.decode import Sample
from headrace.frameworks.torch.loader import DataLoader
from headrace.frameworks.torch.tensors import TensorBatch

__all__ = ["DataLoader", "Dataset", "Sample", "TensorBatch"]
