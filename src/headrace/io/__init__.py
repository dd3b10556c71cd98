"""Reading: batches of extents through the engines of the native core."""

from headrace.io.batch_reader import BatchReader, PendingBatch
from headrace.io.simulation import PRESETS, Simulation, simulation_of

__all__ = ["PRESETS", "BatchReader", "PendingBatch", "Simulation", "simulation_of"]
