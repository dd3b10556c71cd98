"""TensorFlow: whole batches as a `tf.data.Dataset`, with a state for `tf.train.Checkpoint`.

* elements: what one batch is in TensorFlow: strings, rows, or headrace's own buffer
* pipeline: one iterator's passes through epochs, and the `tf.data` graph around them
* loader: `Loader`, which holds them together and is saved in checkpoints
"""

from headrace.frameworks.tensorflow.loader import Loader, dataset

__all__ = ["Loader", "dataset"]
