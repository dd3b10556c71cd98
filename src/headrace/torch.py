"""PyTorch: `from headrace.torch import DataLoader`, in the place of torch's, or over a store."""

from headrace.frameworks.torch import (
    DataLoader,
    Dataset,
    Sample,
    StoreLoader,
    TensorBatch,
    adopt,
)

__all__ = ["DataLoader", "Dataset", "Sample", "StoreLoader", "TensorBatch", "adopt"]
