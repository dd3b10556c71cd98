"""The demo: real images go in, a model trains on them through headrace, is killed and goes on.

* options: what to run it on
* images, stores: which images, and their stores
* model, training: the network, and the process that trains it
* comparison: headrace beside torch's own loader
* run: all of it; report, show: what was found
"""

from headrace.demo.main import main
from headrace.demo.options import DemoOptions
from headrace.demo.report import DemoReport
from headrace.demo.run import run

__all__ = ["DemoOptions", "DemoReport", "main", "run"]
