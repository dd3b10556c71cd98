"""TensorFlow over headrace stores: `from headrace.tensorflow import Loader, dataset`."""

from headrace.base.extras import import_extra

import_extra("tensorflow", "headrace.tensorflow")
from headrace.frameworks.tensorflow.loader import Loader, dataset  # noqa: E402

__all__ = ["Loader", "dataset"]
