"""headrace feeds deep-learning training at the storage's speed."""

__version__ = "0.1.0"
