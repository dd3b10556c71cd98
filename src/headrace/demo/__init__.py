"""The demo: real images go in, a model trains on them through headrace, is killed and goes on.

* images: what to run it on, which images, and their stores
* run: the process that trains a network, all of the demo, headrace beside torch's own loader, and the report
"""

from headrace.demo.images import DemoOptions
from headrace.demo.run import DemoReport, main, run

__all__ = ["DemoOptions", "DemoReport", "main", "run"]
