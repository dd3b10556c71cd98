"""A TensorFlow script that knows nothing of headrace: tf.data over files, a step of fixed time.

    python tensorflow_train.py LIST WORKERS BATCH STEP_S EPOCHS

WORKERS are parallel calls of `map`; 0: one after the other. Epoch e goes through the files in the order
of `random.Random(e).shuffle`. Prints a line of JSON.
"""

import json
import os
import random
import sys
import time
import zlib

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf

paths = open(sys.argv[1]).read().split("\n")
workers, batch, step_s, epochs = (
    int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]),
)  # fmt: skip
seconds, crc, nbytes = [], 0, 0
for epoch in range(epochs):
    order = list(paths)
    random.Random(epoch).shuffle(order)
    data = tf.data.Dataset.from_tensor_slices(order)
    data = data.map(tf.io.read_file, num_parallel_calls=workers or None)
    data = data.batch(batch).prefetch(1 if workers else 0)
    began = due = time.perf_counter()
    for samples in data:
        for sample in samples.numpy():
            crc = zlib.crc32(sample[:8], crc)
            nbytes += len(sample)
        due = max(due, time.perf_counter()) + step_s
        time.sleep(max(0.0, due - time.perf_counter()))
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds, "bytes": nbytes, "crc": crc}))
