"""A program that knows nothing of headrace: opens and reads files in an order, epoch after epoch.

    python loop.py ORDER EPOCHS [cold]

ORDER has a path a line. `cold` empties the page cache before each epoch. Prints a line of JSON.
"""

import json
import sys
import time
import zlib

paths = open(sys.argv[1]).read().split("\n")
seconds, nbytes, crc = [], 0, 0
for _ in range(int(sys.argv[2])):
    if "cold" in sys.argv:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("3")
    began = time.perf_counter()
    for path in paths:
        with open(path, "rb") as f:
            data = f.read()
        nbytes += len(data)
        crc = zlib.crc32(data[:8], crc)
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds, "bytes": nbytes, "crc": crc}))
