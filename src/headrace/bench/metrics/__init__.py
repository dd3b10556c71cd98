"""Metrics: figures from recorded timelines. Pure functions: no clock, no file, no thread.

* timeline: what a run records of each accelerator
* dlio: DLIO's throughput and accelerator utilisation, upstream's and MLCommons' formulas
* mlperf: utilisation as MLPerf Storage's rules define it
* own: where the time went, percentiles, steadiness, confidence
* verdict: whether a result is about the storage at all
"""
