"""Engines under test: what reads the batches of emulated accelerators."""
