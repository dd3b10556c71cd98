"""What `benchmarks.bench` runs: headrace's side, the real DLIO, and fio."""
