"""TensorFlow over headrace stores: `from headrace.tensorflow import Loader, dataset`."""

from headrace.frameworks.tensorflow.loader import Loader, dataset

__all__ = ["Loader", "dataset"]
