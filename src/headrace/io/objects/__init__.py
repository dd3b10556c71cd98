"""Objects: ranges of objects in S3, Google, Azure, on web servers and wherever fsspec reaches.

The parts are imported from their modules: `engine` brings an event loop's machinery, which programs
that read local stores shall not pay for.
"""
