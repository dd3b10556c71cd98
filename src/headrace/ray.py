"""Ray Data over headrace stores: `import headrace.ray; ds = headrace.ray.read("photos.store")`."""

from headrace.base.extras import import_extra

import_extra("ray", "headrace.ray")
from headrace.frameworks.ray import StoreSource, read  # noqa: E402

__all__ = ["StoreSource", "read"]
