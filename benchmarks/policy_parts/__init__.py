"""Parts of the policy benchmark: the published baseline, simulated workloads, real processes."""
