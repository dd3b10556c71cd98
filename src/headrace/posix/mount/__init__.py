"""A store as a read-only folder, for programs that open files: FUSE, without root.

`protocol` has the kernel's requests and answers as bytes, `nodes` the numbers of files and folders,
`filesystem` what is answered, `sample_bytes` the checked ranges of samples; `serving` are the threads over
/dev/fuse, `attaching` is fusermount3 and the mount table, `process` begins and ends it all.
"""

from headrace.posix.mount.process import MountOptions, State, mount, serve, unmount

__all__ = ["MountOptions", "State", "mount", "serve", "unmount"]
