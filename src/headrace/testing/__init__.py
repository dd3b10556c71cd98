"""What tests and experiments of users need: storage that is slow, or fails, on demand."""

from headrace.io.simulation import PRESETS, Simulation
from headrace.testing.simulated_files import SlowVolume, simulated_files

__all__ = ["PRESETS", "Simulation", "SlowVolume", "simulated_files"]
