"""PyTorch: `from headrace.torch import DataLoader`, in the place of torch's, or over a store.

What loads stores is imported when it is asked for: over a torch data set it is not needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.base.extras import import_extra

if TYPE_CHECKING:
    from headrace.frameworks.torch.dataloader import DataLoader, adopt
    from headrace.frameworks.torch.dataset import Dataset, Sample, TensorBatch
    from headrace.frameworks.torch.store_loader import StoreLoader
    from headrace.frameworks.torch.tokens import TokenDataLoader, TokenTensors

__all__ = [
    "DataLoader", "Dataset", "Sample", "StoreLoader", "TensorBatch", "TokenDataLoader", "TokenTensors", "adopt",
]  # fmt: skip

_HOMES = {
    "DataLoader": "dataloader",
    "Dataset": "dataset",
    "Sample": "dataset",
    "StoreLoader": "store_loader",
    "TensorBatch": "dataset",
    "TokenDataLoader": "tokens",
    "TokenTensors": "tokens",
    "adopt": "dataloader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.torch' has no attribute {name!r}")
    import_extra("torch", "headrace.torch")
    module = import_module(f"headrace.frameworks.torch.{_HOMES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
