"""A program that knows nothing of headrace: decodes all pictures of a folder, in a new random order each epoch.

    python shuffled.py FOLDER EPOCHS

Prints a line of JSON: seconds of each epoch and of the second half of the first, bytes, a sum of pixels.
"""

import json
import os
import random
import sys
import time

from PIL import Image

folder, epochs = sys.argv[1], int(sys.argv[2])
names = sorted(os.listdir(folder))
seconds, half, nbytes, total = [], 0.0, 0, 0
for epoch in range(epochs):
    random.Random(epoch).shuffle(names)
    began = time.perf_counter()
    for at, name in enumerate(names):
        if epoch == 0 and 2 * at == len(names):
            half = time.perf_counter()
        with open(os.path.join(folder, name), "rb") as file, Image.open(file) as image:
            total += sum(image.convert("RGB").getpixel((1, 1)))
            nbytes += file.tell()
    seconds.append(time.perf_counter() - began)
    if epoch == 0:
        half = time.perf_counter() - half
print(json.dumps({"seconds": seconds, "half": half, "bytes": nbytes, "crc": total}))
