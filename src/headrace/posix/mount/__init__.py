"""A store as a read-only folder, for programs that open files: FUSE, without root.

`protocol` has the kernel's requests and answers as bytes, `filesystem` what is answered, from checked ranges of
samples; `process` attaches it to a folder, serves, and ends it all.
"""

from headrace.posix.mount.process import MountedStore, MountOptions, mount, serve, unmount

__all__ = ["MountOptions", "MountedStore", "mount", "serve", "unmount"]
