"""TensorFlow: whole batches as a `tf.data.Dataset`, with a state for `tf.train.Checkpoint`.

* elements: what one batch is in TensorFlow: strings, rows, or headrace's own buffer
* loader: `Loader`, its `tf.data` graph, and the passes of each iterator
"""
