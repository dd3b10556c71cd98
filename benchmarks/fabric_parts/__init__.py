"""The parts of the fabric's benchmark: networks, both ends, what they are compared with."""
