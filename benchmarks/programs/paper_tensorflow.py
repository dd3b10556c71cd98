"""The same as `paper_torch`, with TensorFlow: tf.data over files, PRISMA's stage, or headrace's loader.

    python -m benchmarks.programs.paper_tensorflow JSON

Ways: `tensorflow` (WORKERS parallel reads, 0: one after the other, -1: AUTOTUNE), `prisma`, `store`.
"""

import itertools
import json
import os
import random
import sys
import time
import zlib

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf
from benchmarks.programs.prisma_stage import Prisma

SIDE = 64
PIXELS = 3 * SIDE * SIDE


def tensors(data):
    """Pixels as float32, the stamp, and the length of a sample."""
    head = tf.io.decode_raw(tf.strings.substr(data, 0, PIXELS), tf.uint8)
    pixels = tf.pad(head, [[0, PIXELS - tf.size(head)]])
    stamp = tf.io.decode_raw(tf.strings.substr(data, 0, 8), tf.int64)[0]
    return tf.reshape(pixels, (3, SIDE, SIDE)), stamp, tf.strings.length(data)


def conv(filters, size, **more):
    return tf.keras.layers.Conv2D(filters, size, activation="relu", **more)


def dense(*sizes):
    return [tf.keras.layers.Flatten(), *(tf.keras.layers.Dense(n, activation="relu") for n in sizes),
            tf.keras.layers.Dense(10)]  # fmt: skip


def network(name):
    pool = tf.keras.layers.MaxPool2D
    layers = {
        "lenet": lambda: [
            tf.keras.layers.AveragePooling2D(2), conv(6, 5), pool(), conv(16, 5), pool(), *dense(120, 84)],
        "alexnet": lambda: [
            conv(24, 5, strides=2), pool(), conv(64, 3, padding="same"), pool(), conv(96, 3, padding="same"),
            conv(64, 3, padding="same"), conv(64, 3, padding="same"), pool(), *dense(256, 256)],
    }  # fmt: skip
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((SIDE, SIDE, 3)), *layers[name]()])
    optimiser = tf.keras.optimizers.SGD(0.01)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(pixels, stamps, training):
        pixels = tf.transpose(tf.cast(pixels, tf.float32) / 255, (0, 2, 3, 1))
        with tf.GradientTape() as tape:
            loss = loss_of(stamps % 10, model(pixels))
        if training:
            optimiser.apply_gradients(
                zip(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                    strict=True,
                )
            )
        return loss

    # Compiled before anything is measured.
    for training in (True, False):
        step(tf.zeros((2, 3, SIDE, SIDE), tf.uint8), tf.zeros(2, tf.int64), training)
    return lambda pixels, stamps, training: float(step(pixels, stamps, training))


def accelerator(step_s):
    due = 0.0

    def step(_pixels, _stamps, training):
        nonlocal due
        now = time.perf_counter()
        due = max(due, now) + (step_s if training else step_s / 3)
        time.sleep(max(0.0, due - now))

    return step


def dataset(spec, order, prisma=None):
    """Batches of the files that `order`, a variable, has when an epoch begins; traced once."""
    if prisma is not None:

        def served():
            return map(prisma.read, (path.decode() for path in order.numpy()))

        data = tf.data.Dataset.from_generator(served, output_signature=tf.TensorSpec((), tf.string))
        return data.map(tensors).batch(spec["batch"]).prefetch(1)
    # PRISMA does not serve validation: that is read one file after the other.
    parallel = {0: None, -1: tf.data.AUTOTUNE}.get(spec["workers"], spec["workers"])
    data = tf.data.Dataset.range(len(order.numpy())).map(lambda k: tf.gather(order, k))
    options = tf.data.Options()
    if parallel is None:  # else TensorFlow turns the maps into parallel ones by itself
        options.autotune.enabled = False
        options.experimental_optimization.map_parallelization = False
    elif parallel > 0:  # else no more threads than cores
        options.threading.private_threadpool_size = parallel + 2
    data = data.with_options(options)
    data = data.map(tf.io.read_file, num_parallel_calls=parallel).map(tensors).batch(spec["batch"])
    return data.prefetch(tf.data.AUTOTUNE) if parallel else data


def loaders(spec, orders):
    """Of training and of validation: functions that begin an epoch."""
    if spec["way"] != "store":
        prisma = None
        if spec["way"] == "prisma":
            whole = itertools.chain.from_iterable(given(spec, orders[0].numpy()))
            prisma = Prisma(list(whole), spec["warm_up_s"])
        kinds = dataset(spec, orders[0], prisma), dataset(spec, orders[1])
        return [lambda kind=kind: iter(kind) for kind in kinds]
    from headrace.tensorflow import Loader

    options = {
        "ram_bytes": spec["ram_bytes"],
        "simulate": spec["simulate"],
        "epochs": None,
        "seed": 1,
    }
    both = [Loader(path, spec["batch"], order=order, decode=tensors, **options)
            for path, order in zip(spec["stores"], ("shuffled", "sequential"), strict=True)]  # fmt: skip
    endless = [iter(loader.dataset()) for loader in both]
    return [lambda k=k: itertools.islice(endless[k], len(both[k])) for k in (0, 1)]


def given(spec, paths):
    """The orders of all epochs."""
    for epoch in range(spec["epochs"]):
        order = [path.decode() for path in paths]
        random.Random(epoch).shuffle(order)
        yield order


def main():
    spec = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    orders = [tf.Variable(open(path).read().split("\n")) for path in spec["lists"]]
    epochs = list(given(spec, orders[0].numpy()))
    step = network(spec["model"]) if spec["model"] != "accelerator" else accelerator(spec["step_s"])
    both = loaders(spec, orders)
    seen = {
        "train_s": [],
        "valid_s": [],
        "bytes": 0,
        "samples": 0,
        "stamps": 0,
        "crc": 0,
        "loss": None,
    }
    for order in epochs:
        print("begin", os.getpid(), flush=True)
        sys.stdin.readline()
        orders[0].assign(order)
        for training, begin in zip((True, False), both, strict=True):
            began = time.perf_counter()
            for one in begin():
                pixels, stamps, sizes = one[0] if spec["way"] == "store" else one
                loss = step(pixels, stamps, training)
                seen["loss"] = loss if training else seen["loss"]
                seen["bytes"] += int(sizes.numpy().sum())
                seen["samples"] += len(sizes)
                seen["stamps"] += int(stamps.numpy().sum())
                seen["crc"] = zlib.crc32(stamps.numpy().tobytes(), seen["crc"])
            seen["train_s" if training else "valid_s"].append(time.perf_counter() - began)
    print("end", os.getpid(), flush=True)
    sys.stdin.readline()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
