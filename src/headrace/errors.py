"""Errors a user may want to catch.

* HeadraceError
  x StoreError
    + StoreNotFound    (also FileNotFoundError)
    + StoreExists      (also FileExistsError)
    + SampleNotFound   (also LookupError)
    + CorruptStore     a directory, manifest or volume contradicts itself
    + CorruptSample    a sample's bytes differ from its checksum
    + SourceError      data to be packed or indexed cannot be used as it is
      - SourceChanged  a foreign file is not as it was when it was indexed
  x VolumeError        (also OSError)
    + VolumeTimeout    (also TimeoutError)
    + FabricError      an NVMe/TCP target or host cannot be reached, or refuses
      - ProtocolError  it breaks the protocol
      - AuthenticationFailed (also PermissionError) it, or this host, did not prove who it is
  x RankError          (also ValueError) which rank this process is: nobody says, or two disagree
  x OrderError         (also ValueError)
    + StateMismatch    a saved state that belongs to other data or another order
  x CheckpointError   a checkpoint cannot be saved or loaded
    + CheckpointNotFound (also FileNotFoundError)
    + CorruptCheckpoint  its files are not as they were written
  x NodeError         the node daemon cannot be started, reached or stopped
  x MountError        a store cannot be mounted, or a mount not be taken away
  x ControlError      the controller cannot be started, reached or stopped, or refuses
  x JobError          a job's nodes cannot meet, or its store cannot be opened
  x ClusterError       Slurm, or the local executor, cannot do what was asked, or does not answer
    + ClusterTimeout   (also TimeoutError)
    + ClusterRequestError (also ValueError) no node can meet the request, or it contradicts itself
    + LaunchError      a job's processes cannot be started, or did not end well
  x TelemetryError     what was recorded of jobs cannot be written or read
  x TraceError         what was written of a run is damaged, or no run's
  x RecordError        a record of a program's reads is damaged, or holds nothing of use
  x DecodeError        the user's own decode function failed on a sample
  x ProgramError       the user's own program failed, or cannot be looked at
  x BenchError         a benchmark cannot be run, or its result would not be one
    + WorkloadError    (also ValueError) its workload is wrong, or asks for what is not done
  x MissingPackage     (also ImportError) an optional package is not installed

The caller's own mistakes are plain `ValueError`/`TypeError`, raised at once with the value.

Every error carries `path`, `offset_bytes` and `next_step` where they are known, and survives
pickling, because loaders raise in worker processes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AuthenticationFailed",
    "BenchError",
    "CheckpointError",
    "CheckpointNotFound",
    "ClusterError",
    "ClusterRequestError",
    "ClusterTimeout",
    "ControlError",
    "CorruptCheckpoint",
    "CorruptSample",
    "CorruptStore",
    "DecodeError",
    "FabricError",
    "HeadraceError",
    "JobError",
    "LaunchError",
    "MissingPackage",
    "MountError",
    "NodeError",
    "OrderError",
    "ProgramError",
    "ProtocolError",
    "RankError",
    "RecordError",
    "SampleNotFound",
    "SourceChanged",
    "SourceError",
    "StateMismatch",
    "StoreError",
    "StoreExists",
    "StoreNotFound",
    "TelemetryError",
    "TraceError",
    "VolumeError",
    "VolumeTimeout",
    "WorkloadError",
]


class HeadraceError(Exception):
    """Base of all errors of headrace.

    Args:
        message: what is wrong, where, what was found and what was expected.
        path: the file or folder concerned.
        offset_bytes: where in it.
        next_step: what the user can do; becomes the message's last sentence.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset_bytes: int | None = None,
        next_step: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.offset_bytes = offset_bytes
        self.next_step = next_step
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}" if self.next_step else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[HeadraceError], message: str, fields: dict[str, Any]) -> HeadraceError:
    error = cls(message)
    error.__dict__.update(fields)
    return error


class StoreError(HeadraceError):
    """A store cannot do what was asked."""


class StoreNotFound(StoreError, FileNotFoundError):
    """No store lies at the given path."""


class StoreExists(StoreError, FileExistsError):
    """The target of a pack or an index exists already."""


class SampleNotFound(StoreError, LookupError):
    """No sample has this name or index."""


class CorruptStore(StoreError):
    """A directory, manifest or volume contradicts itself, or is shorter than it says."""


class CorruptSample(StoreError):
    """A sample's bytes differ from its checksum.

    Attributes:
        index: the sample's index.
        name: the sample's name.
    """

    index: int = -1
    name: str = ""


class SourceError(StoreError):
    """Data to be packed or indexed cannot be used as it is."""


class SourceChanged(SourceError):
    """A foreign file is not as it was when it was indexed."""

    index: int = -1
    name: str = ""


class VolumeError(HeadraceError, OSError):
    """The operating system refused a read; `errno` is set where it gave one."""


class VolumeTimeout(VolumeError, TimeoutError):
    """A read did not complete within its deadline."""


class FabricError(VolumeError):
    """The other end of an NVMe/TCP connection cannot be reached, or refuses what was asked."""


class ProtocolError(FabricError):
    """The other end of an NVMe/TCP connection breaks the protocol; the connection was closed."""


class AuthenticationFailed(FabricError, PermissionError):
    """Host and controller of an NVMe/TCP connection do not believe each other; it was closed."""


class RankError(HeadraceError, ValueError):
    """Which rank this process is: nobody says, or two that should know disagree."""


class OrderError(HeadraceError, ValueError):
    """An order cannot be made from these arguments."""


class StateMismatch(OrderError):
    """A saved state belongs to other data or to another order."""


class CheckpointError(HeadraceError):
    """A checkpoint cannot be saved or loaded."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The folder holds no whole checkpoint, or not the one of this step."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint's files are not as they were written."""


class NodeError(HeadraceError):
    """The node daemon cannot be started, reached or stopped."""


class JobError(HeadraceError):
    """A job's nodes cannot meet in their folder, or its global store cannot be opened."""


class MountError(HeadraceError):
    """A store cannot be mounted on a folder, or a mount cannot be taken away."""


class ControlError(HeadraceError):
    """The controller cannot be started, reached or stopped, or refuses what it was asked."""


class ClusterError(HeadraceError):
    """Slurm, or the executor in its place, cannot do what was asked, or does not answer."""


class ClusterTimeout(ClusterError, TimeoutError):
    """A scheduler's command, or what was waited for, took longer than it may."""


class ClusterRequestError(ClusterError, ValueError):
    """What is asked for contradicts itself, or no node of the cluster can meet it."""


class LaunchError(ClusterError):
    """The processes of a job cannot be started, or did not end well."""


class TelemetryError(HeadraceError):
    """What was recorded of nodes and jobs cannot be written or read."""


class TraceError(HeadraceError):
    """What was written of a run cannot be read: it is damaged, newer than this headrace, or no run's."""


class RecordError(HeadraceError):
    """A record of a program's reads is damaged, of another version, or holds nothing of use."""


class DecodeError(HeadraceError):
    """The user's own decode function failed on a sample; its error is the cause.

    Attributes:
        index: the sample's index.
        name: the sample's name.
    """

    index: int = -1
    name: str = ""


class ProgramError(HeadraceError):
    """The user's own program failed, took too long, or did nothing that could be looked at."""


class BenchError(HeadraceError):
    """A benchmark cannot be run as it is asked for, or was cut short: there is no result."""


class WorkloadError(BenchError, ValueError):
    """A workload is wrong, or asks for what is not done here; the message names file, line and key."""


class MissingPackage(HeadraceError, ImportError):
    """A package that only some of headrace needs is not installed; the next step installs it."""
