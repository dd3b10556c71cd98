"""What `benchmarks.verdict` is made of: servers, injections, mixtures."""
