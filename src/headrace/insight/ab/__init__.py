"""A/B: the same command with and without headrace, in turn, and what the difference is worth."""
