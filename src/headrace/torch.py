"""PyTorch over headrace stores: `from headrace.torch import DataLoader, Dataset`."""

from headrace.frameworks.torch import DataLoader, Dataset, Sample, TensorBatch

__all__ = ["DataLoader", "Dataset", "Sample", "TensorBatch"]
