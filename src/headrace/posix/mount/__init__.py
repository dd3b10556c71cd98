"""A store as a read-only folder, for programs that open files: FUSE, without root.

    protocol       the kernel's requests and answers, as bytes
    nodes          the numbers of files and folders
    filesystem     what is answered
    sample_bytes   ranges of samples, checked
    serving        threads over /dev/fuse
    attaching      fusermount3 and the mount table
    process        foreground, background, unmount
"""

from headrace.posix.mount.process import MountOptions, State, mount, serve, unmount

__all__ = ["MountOptions", "State", "mount", "serve", "unmount"]
