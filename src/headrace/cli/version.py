"""`headrace version`: what is installed, and what it can use here."""

from __future__ import annotations

from headrace.cli.output import Json, Output


def version(*, as_json: Json = False) -> None:
    """Version, native build, checksum implementation, Python, platform."""
    import platform

    import numpy as np

    import headrace
    from headrace import _native

    output = Output(as_json=as_json)
    data = {
        "headrace": headrace.__version__,
        "native_build": _native.build_type,
        "crc32c": _native.crc32c_implementation,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    if as_json:
        output.document(data)
    else:
        output.line(f"headrace {data.pop('headrace')}")
        for name, value in data.items():
            output.line(f"  {name.replace('_', ' '):<14}{value}")
