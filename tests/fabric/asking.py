"""What tests ask a controller beyond what reading takes: its namespaces, its log pages, its discovery log."""

import os
import socket
import struct

from headrace.fabric import command as nvme
from headrace.fabric.host import Host
from headrace.fabric.pdu import Type, encode


def namespaces(host):
    """The active namespaces by NSID."""
    found, last = {}, 0
    while chunk := unpack_active_namespaces(host._identify(2, nsid=last)):
        for nsid in chunk:
            found[nsid] = nvme.NamespaceIdentity.unpack(host._identify(0, nsid=nsid))
        if chunk[-1] <= last or len(chunk) < nvme.IDENTIFY_BYTES // 4:
            break
        last = chunk[-1]
    return found


def unpack_active_namespaces(data):
    numbers = struct.unpack("<1024I", data)
    return list(numbers[: numbers.index(0)] if 0 in numbers else numbers)


def log_page(host, page, nbytes):
    """`nbytes` (a multiple of 4) of a log page."""
    dwords = nbytes // 4 - 1
    sqe = nvme.Sqe(
        nvme.Admin.GET_LOG_PAGE, nsid=0xFFFFFFFF if page is nvme.LogPage.SMART else 0,
        cdw10=page | (dwords & 0xFFFF) << 16, cdw11=dwords >> 16,
    )  # fmt: skip
    return host._command(sqe, expect=nbytes, what=f"Get Log Page {page.name}")[1]


def discover(address, identity, options=None):
    """What a target's discovery subsystem names."""
    with Host(address, nvme.DISCOVERY_NQN, identity, options) as host:
        _, count, _ = unpack_discovery_log(log_page(host, nvme.LogPage.DISCOVERY, 1024))
        whole = log_page(host, nvme.LogPage.DISCOVERY, 1024 * (1 + count))
        return unpack_discovery_log(whole)[2]


def unpack_discovery_log(data):
    """Generation, number of records that there are, and the entries that `data` holds whole."""
    generation, count, _ = struct.unpack_from("<QQH", data)
    entries = []
    for at in range(1024, min(len(data), 1024 * (1 + count)) - 1023, 1024):
        fields = struct.unpack_from("<BBBBHHHHI16x32s192x256s256s256x", data, at)
        trtype, adrfam, kind, *_, port, nqn, address = fields
        names = nvme.text(nqn), nvme.text(address), int(nvme.text(port))
        entries.append(nvme.DiscoveryEntry(*names, adrfam == 2, kind, trtype))
    return generation, count, entries


def icreq(dgst):
    """A host's ICReq: HPDA 0, one R2T."""
    return encode(Type.IC_REQ, struct.pack("<HBBI112x", 0, 0, dgst, 0))


def socket_of(queue):
    """A second descriptor of a control queue's connection; who asks closes it."""
    return socket.socket(fileno=os.dup(queue.native.fd))
