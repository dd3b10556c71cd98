"""Grain and JAX: a random-access source, and whole batches as a checkpointable `IterDataset`.

* dataset: `Source`, for Grain's own samplers and workers; `Dataset`, whole batches in headrace's order
* elements: what a batch is: rows, headrace's own buffer, or decoded samples; as numpy or JAX arrays
"""
