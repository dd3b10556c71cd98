"""TensorFlow: whole batches as a `tf.data.Dataset`, with a state for `tf.train.Checkpoint`.

* elements: what one batch is in TensorFlow: strings, rows, or headrace's own buffer
* run: one iterator's way through epochs: what was produced, and what was delivered
* pipeline: the `tf.data` graph around it
* loader: `Loader`, which holds them together and is saved in checkpoints
* cluster: this process's place among the workers that TF_CONFIG names
"""

from headrace.frameworks.tensorflow.loader import Loader, dataset

__all__ = ["Loader", "dataset"]
