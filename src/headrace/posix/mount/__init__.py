"""A store as a read-only folder, for programs that open files: FUSE, without root.

`protocol` has the kernel's requests and answers as bytes, `filesystem` what is answered, `sample_bytes` the
checked ranges of samples; `attaching` is fusermount3 and the mount table, `process` begins and ends it all.
"""

from headrace.posix.mount.process import MountedStore, MountOptions, mount, serve, unmount

__all__ = ["MountOptions", "MountedStore", "mount", "serve", "unmount"]
