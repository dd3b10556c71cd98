"""The parts of the data-plane benchmark (`benchmarks.plane`); each has `run(options) -> Section`."""
