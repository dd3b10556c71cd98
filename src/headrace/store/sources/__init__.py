"""Sources: what can be packed or indexed, each kind in a file of its own."""
