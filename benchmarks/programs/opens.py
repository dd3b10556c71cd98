"""A program that knows nothing of headrace: what an open costs.

    python opens.py ORDER ROUNDS

Opens and closes each file of ORDER, again and again; prints the microseconds of the fastest round's opens.
"""

import json
import os
import sys
import time

paths = open(sys.argv[1]).read().split("\n")
best = 1e9
for path in paths:
    with open(path, "rb") as f:
        f.read()
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    for path in paths:
        os.close(os.open(path, os.O_RDONLY))
    best = min(best, time.perf_counter() - began)
print(json.dumps({"us_per_open": 1e6 * best / len(paths)}))
