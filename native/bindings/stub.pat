# For nanobind's stubgen (make stub): what differs between builds and machines is typed, not quoted.
headrace._native.build_type:
    build_type: str

headrace._native.rewrite_outcomes:
    rewrite_outcomes: tuple[str, ...]

headrace._native.crc32c_implementation:
    crc32c_implementation: str
