"""The demo: real images go in, a model trains on them through headrace, is killed and goes on.

* images: what to run it on, which images, and their stores
* training: the network, and the process that trains it
* run: all of it, and headrace beside torch's own loader; report: the results
"""

from headrace.demo.images import DemoOptions
from headrace.demo.report import DemoReport
from headrace.demo.run import main, run

__all__ = ["DemoOptions", "DemoReport", "main", "run"]
