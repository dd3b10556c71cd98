"""PyTorch: a drop-in DataLoader, and data sets and a loader over stores.

* dataloader: `DataLoader`, torch's own with headrace's data plane; `dropin`: how it is done
* adopting: the same in the place of a loader that a library made
* tensors: batches as tensors over headrace's own buffers
* decode: a user's decode function, sample by sample, with its random numbers
* dataset: `Dataset`, for torch's own loaders and samplers
* store_loader: `StoreLoader`, which delivers in headrace's order and resumes exactly
* whole, threads, workers: its three ways from bytes to batches
"""

from headrace.frameworks.torch.dataloader import DataLoader, adopt
from headrace.frameworks.torch.dataset import Dataset, Sample
from headrace.frameworks.torch.store_loader import StoreLoader
from headrace.frameworks.torch.tensors import TensorBatch

__all__ = ["DataLoader", "Dataset", "Sample", "StoreLoader", "TensorBatch", "adopt"]
