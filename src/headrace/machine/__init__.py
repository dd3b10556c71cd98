"""What the machine, and the control groups that we run in, let us take, and what its counters say."""
