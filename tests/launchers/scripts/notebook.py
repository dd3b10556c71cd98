"""A notebook: its kernel is a process of its own, and runs a cell."""

import sys
from pathlib import Path

from jupyter_client.manager import start_new_kernel

CELL = """
import sys
sys.path.insert(0, {here!r})
from consumed import arguments, consume
args = arguments({words!r})
for name in args.loaders:
    consume(args, name)
"""

if __name__ == "__main__":
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        cell = CELL.format(here=str(Path(__file__).parent), words=sys.argv[1:])
        reply = client.execute_interactive(cell, timeout=120)["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if reply["status"] != "ok":
        sys.exit("\n".join(reply["traceback"]))
