"""Fuzz targets of the Python parsers: bytes in, and a word for what became of them.

    python -m fuzz wire --seconds 60

Each module named in `TARGETS` has `seeds()`, good inputs to begin with, and `one_input(data)`, which
returns `accepted` or `refused` and raises whatever must not happen. The runner uses atheris where it is
installed, and else changes the seeds at random by itself; `make fuzz` runs all of them.
"""

TARGETS = ("wire", "frames", "session", "mapped", "control", "policy", "chap", "target", "store")
