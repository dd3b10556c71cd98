"""Host: one association with a controller: connect, identify, keep alive, open queues, shut down.

The control path of an initiator. I/O queues are opened here and handed over to the native data path;
the association lives as long as its admin queue, which a thread keeps alive.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.base.lifetime import Closing
from headrace.errors import AuthenticationFailed, FabricError
from headrace.fabric import command as nvme
from headrace.fabric.chap import Parties
from headrace.fabric.chap_exchange import GROUPS, HASHES, ChapSetup, Exchange
from headrace.fabric.command import Admin, Completion, Sqe
from headrace.fabric.identity import (
    CONTROLLER_VARIABLE,
    HOST_VARIABLE,
    HostSecret,
    Secret,
    secret_of_environment,
)
from headrace.fabric.pdu import DDGST, HDGST
from headrace.fabric.queue import ConnectedQueue, Queue

if TYPE_CHECKING:
    import os

    from headrace.fabric.chap import DhGroup
    from headrace.fabric.identity import Hash, HostIdentity

_ANY_CONTROLLER = 0xFFFF
_DISCOVERY_TRIES = 5
_MDTS_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How an association is made. Most users leave this alone."""

    hdgst: bool = True
    """Offer header digests; the controller may decline. They cost little, and nothing else finds a
    flipped bit that passes TCP's 16-bit sum."""
    ddgst: bool = True
    """The same of data. Samples have checksums of their own; raw blocks have not."""
    entries: int = 128
    """Of an I/O queue; fewer where the controller has fewer."""
    kato_ms: int = 15_000
    """A controller that hears nothing for so long ends the association; 0: it never does."""
    timeout_s: float = 10.0
    """For each control command, and for the connection."""
    dhchap_secret: Secret | str | os.PathLike[str] | None = field(
        default_factory=lambda: secret_of_environment(HOST_VARIABLE)
    )
    """What this host proves to know to controllers that ask: see `Secret.read`. By default from
    HEADRACE_DHCHAP_SECRET, or the file that HEADRACE_DHCHAP_SECRET_FILE names."""
    dhchap_controller_secret: Secret | str | os.PathLike[str] | None = field(
        default_factory=lambda: secret_of_environment(CONTROLLER_VARIABLE)
    )
    """What every controller must prove to know; one that does not ask us to authenticate is refused
    then. By default from HEADRACE_DHCHAP_CONTROLLER_SECRET, or ..._FILE."""
    dhchap_hashes: tuple[Hash, ...] = HASHES
    """Offered for the proofs; the controller chooses."""
    dhchap_groups: tuple[DhGroup, ...] = GROUPS
    """Offered for the exchange; the controller chooses."""

    def __post_init__(self) -> None:
        if not 2 <= self.entries <= 1 << 16:
            raise ValueError(f"entries is {self.entries}, expected 2 to 65536")
        if self.kato_ms < 0 or self.timeout_s <= 0:
            raise ValueError(f"kato_ms is {self.kato_ms}, timeout_s {self.timeout_s}")
        if not self.dhchap_hashes or not self.dhchap_groups:
            raise ValueError("dhchap_hashes and dhchap_groups: expected at least one of each")
        for name in ("dhchap_secret", "dhchap_controller_secret"):
            if (source := getattr(self, name)) is not None:
                object.__setattr__(self, name, Secret.read(source))
        if self.dhchap_controller_secret is not None:
            if self.dhchap_secret is None:
                raise ValueError("dhchap_controller_secret is set, and dhchap_secret is not")
            if self.dhchap_controller_secret == self.dhchap_secret:
                raise ValueError("dhchap_secret and dhchap_controller_secret: expected two secrets")

    @property
    def offered(self) -> int:
        """DGST of our ICReq."""
        return (HDGST if self.hdgst else 0) | (DDGST if self.ddgst else 0)

    def chap(self, parties: Parties) -> ChapSetup | None:
        """What a host authenticates with; None: it has no secret."""
        host, controller = self.dhchap_secret, self.dhchap_controller_secret
        if not isinstance(host, Secret):
            return None
        return ChapSetup(
            parties=parties, hashes=self.dhchap_hashes, groups=self.dhchap_groups,
            secrets=HostSecret(host, controller if isinstance(controller, Secret) else None),
        )  # fmt: skip


class Host(Closing):
    """Connects to a controller and enables it. Thread-safe.

    Raises:
        AuthenticationFailed: it asks for a proof that we have not, or does not give its own.
        FabricError: it cannot be reached, refuses, or breaks the protocol.
    """

    def __init__(
        self,
        address: tuple[str, int],
        subnqn: str,
        identity: HostIdentity,
        options: HostOptions | None = None,
    ) -> None:
        self.subnqn = subnqn
        self.identity = identity
        self.options = options or HostOptions()
        self._address = address
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.failure: FabricError | None = None  # what ended the association, if it has ended
        self._chap = self.options.chap(Parties(identity.nqn, subnqn))
        self._tids = itertools.count(secrets.randbits(15))
        self._admin = Queue(address, offered=self.options.offered, timeout_s=self.options.timeout_s)
        try:
            connected = self._admin.connect(
                identity, subnqn, qid=0, entries=32, cntlid=_ANY_CONTROLLER,
                kato_ms=self.options.kato_ms,
            )  # fmt: skip
            self.cntlid = connected.result & 0xFFFF
            self._authenticate(self._admin, connected)
            self._enable()
            self.controller = nvme.ControllerIdentity.unpack(self._identify(1))
        except BaseException:
            self._admin.close()
            raise
        self._keeper = threading.Thread(target=self._keep_alive, name="headrace-nvme", daemon=True)
        self._keeper.start()

    @property
    def transfer_bytes_max(self) -> int:
        """Largest read of one command: the controller's MDTS."""
        return _MDTS_UNIT << self.controller.mdts if self.controller.mdts else 1 << 32

    def namespaces(self) -> dict[int, nvme.NamespaceIdentity]:
        """The active namespaces by NSID."""
        namespaces: dict[int, nvme.NamespaceIdentity] = {}
        last = 0
        while chunk := nvme.unpack_active_namespaces(self._identify(2, nsid=last)):
            for nsid in chunk:
                namespaces[nsid] = nvme.NamespaceIdentity.unpack(self._identify(0, nsid=nsid))
            if chunk[-1] <= last or len(chunk) < nvme.IDENTIFY_BYTES // 4:
                break
            last = chunk[-1]
        return namespaces

    def namespace(self, nsid: int) -> nvme.NamespaceIdentity:
        """One namespace; raises FabricError if it is not active."""
        identity = nvme.NamespaceIdentity.unpack(self._identify(0, nsid=nsid))
        if not identity.blocks or not identity.block_bytes:
            raise FabricError(f"{self._admin}: {self.subnqn} has no namespace {nsid}.")
        return identity

    def log_page(self, page: nvme.LogPage, nbytes: int) -> bytes:
        """`nbytes` (a multiple of 4) of a log page."""
        dwords = nbytes // 4 - 1
        sqe = Sqe(
            Admin.GET_LOG_PAGE, nsid=0xFFFFFFFF if page is nvme.LogPage.SMART else 0,
            cdw10=page | (dwords & 0xFFFF) << 16, cdw11=dwords >> 16,
        )  # fmt: skip
        return self._command(sqe, expect=nbytes, what=f"Get Log Page {page.name}")[1]

    def open_queues(self, count: int) -> list[ConnectedQueue]:
        """Opens I/O queues 1 to `count`, or as many as the controller grants.

        Raises FabricError if none could be opened.
        """
        asked = count - 1
        feature = nvme.Feature.NUMBER_OF_QUEUES
        sqe = Sqe(Admin.SET_FEATURES, cdw10=feature, cdw11=asked | asked << 16)
        granted = self._command(sqe, what="Set Features, Number of Queues")[0].result
        count = min(count, (granted & 0xFFFF) + 1, (granted >> 16 & 0xFFFF) + 1)
        queues: list[ConnectedQueue] = []
        try:
            for qid in range(1, count + 1):
                queues.append(self._open_queue(qid))  # noqa: PERF401 - what was opened is closed on failure
        except BaseException:
            for queue in queues:
                queue.socket.close()
            raise
        return queues

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is the one that keeps the association alive."""
        return thread is self._keeper

    def close(self) -> None:
        """Shuts the controller down in order, if it still answers, and disconnects."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(FabricError), self._lock:
            if self.failure is None:
                self._set(nvme.Property.CC, self._cc | nvme.Cc.SHN_NORMAL)
        self._admin.close()
        if self._keeper is not threading.current_thread():
            self._keeper.join(self.options.timeout_s)

    # -- commands ---------------------------------------------------------------------------------

    def _authenticate(self, queue: Queue, connected: Completion) -> None:
        """Does what Connect's answer asks for, on each queue."""
        asked = connected.result & (nvme.AUTHREQ_ATR | nvme.AUTHREQ_ASCR)
        if asked & nvme.AUTHREQ_ASCR:
            raise AuthenticationFailed(
                f"{queue} asks for a secure channel (TLS), which is not spoken here.",
                next_step="Let the target ask for DH-HMAC-CHAP alone.",
            )
        if asked and self._chap is None:
            raise AuthenticationFailed(
                f"{queue} asks for DH-HMAC-CHAP, and this host has no secret.",
                next_step=f"Set HostOptions(dhchap_secret=...), {HOST_VARIABLE} or {HOST_VARIABLE}_FILE.",
            )
        if asked and self._chap is not None:
            queue.authenticate(Exchange(self._chap, next(self._tids) & 0xFFFF))
        elif self._chap is not None and self._chap.secrets.controller is not None:
            raise AuthenticationFailed(
                f"{queue} was to prove who it is, and does not authenticate at all.",
                next_step="Give the target this host's secret, or unset dhchap_controller_secret.",
            )

    def _enable(self) -> None:
        self.cap = self._get(nvme.Property.CAP, wide=True)
        self._cc = nvme.Cc.EN | nvme.Cc.IOSQES_64 | nvme.Cc.IOCQES_16
        self._set(nvme.Property.CC, self._cc)
        deadline_s = time.monotonic() + max(1.0, nvme.Cap.timeout_s(self.cap))
        while not (csts := self._get(nvme.Property.CSTS)) & nvme.Csts.RDY:
            if csts & nvme.Csts.CFS or time.monotonic() > deadline_s:
                what = f"the controller does not get ready: CSTS is {csts:#x}"
                raise FabricError(f"{self._admin}: {what}.")
            time.sleep(0.01)

    def _open_queue(self, qid: int) -> ConnectedQueue:
        taken = max(2, self.controller.maxcmd or 1 << 16)
        entries = min(self.options.entries, nvme.Cap.entries_max(self.cap), taken)
        queue = Queue(self._address, offered=self.options.offered, timeout_s=self.options.timeout_s)
        try:
            connected = queue.connect(
                self.identity, self.subnqn, qid=qid, entries=entries, cntlid=self.cntlid
            )
            self._authenticate(queue, connected)
            return queue.detach(qid=qid, entries=entries, connected=connected)
        except BaseException:
            queue.close()
            raise

    def _identify(self, cns: int, nsid: int = 0) -> bytes:
        sqe = Sqe(Admin.IDENTIFY, nsid=nsid, cdw10=cns)
        return self._command(sqe, expect=nvme.IDENTIFY_BYTES, what=f"Identify {cns:#04x}")[1]

    def _get(self, offset: nvme.Property, *, wide: bool = False) -> int:
        dwords = nvme.PROPERTY_DWORDS.pack(1 if wide else 0, offset, 0)
        sqe = nvme.fabrics_command(nvme.Fabrics.PROPERTY_GET, dwords)
        return int(self._admin.command(sqe, what=f"Property Get {offset.name}")[0].result)

    def _set(self, offset: nvme.Property, value: int) -> None:
        dwords = nvme.PROPERTY_DWORDS.pack(0, offset, value)
        sqe = nvme.fabrics_command(nvme.Fabrics.PROPERTY_SET, dwords)
        self._admin.command(sqe, what=f"Property Set {offset.name}")

    def _command(self, sqe: Sqe, *, expect: int = 0, what: str = "") -> tuple[Completion, bytes]:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._closing.is_set():
                raise FabricError(f"{self._admin}: this association is closed.")
            return self._admin.command(sqe, expect=expect, what=what)

    def _keep_alive(self) -> None:
        interval_s = self.options.kato_ms / 2000 if self.options.kato_ms else None
        while interval_s is not None and not self._closing.wait(interval_s):
            try:
                self._command(Sqe(Admin.KEEP_ALIVE), what="Keep Alive")
            except FabricError as e:
                self.failure = e
                return


def discover(
    address: tuple[str, int], identity: HostIdentity, options: HostOptions | None = None
) -> list[nvme.DiscoveryEntry]:
    """What a target's discovery subsystem names.

    Raises FabricError if it cannot be reached, or changes while it is read.
    """
    with Host(address, nvme.DISCOVERY_NQN, identity, options) as host:
        for _ in range(_DISCOVERY_TRIES):
            head = host.log_page(nvme.LogPage.DISCOVERY, 1024)
            generation, count, _ = nvme.unpack_discovery_log(head)
            whole = host.log_page(nvme.LogPage.DISCOVERY, 1024 * (1 + min(count, 4096)))
            again, _, entries = nvme.unpack_discovery_log(whole)
            if again == generation:
                return entries
    raise FabricError(f"the discovery log of {address[0]}:{address[1]} changes all the time.")
