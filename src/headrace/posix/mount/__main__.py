"""The process of a mount in the background; started by `mount`."""

from headrace.posix.mount.process import child

if __name__ == "__main__":
    child()
