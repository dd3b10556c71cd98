"""A target's control connection: any bytes of a host's, in pieces, before and after it authenticates.

The first byte says how the rest is cut. Nothing but a right proof may get past the gate, and what is
sent back stays in proportion to what came.
"""

from __future__ import annotations

from fabric.chap import reference
from fabric.chap.parties import gate
from headrace.fabric.chap import AUTH_DWORDS, MESSAGE_BYTES_MAX
from headrace.fabric.command import (
    CONNECT_DATA,
    Admin,
    Fabrics,
    Sqe,
    connect_command,
    fabrics_command,
)
from headrace.fabric.controller import (
    Admission,
    Association,
    ConnectRequest,
    Controller,
    HostConnection,
)
from headrace.fabric.pdu import Fatal, Format, PduFault, Type, encode, icreq, term_req

COMMAND_BYTES = 72


def command(sqe: Sqe, data: bytes = b"", form: Format | None = None) -> bytes:
    return encode(Type.CAPSULE_CMD, sqe.pack(), data, form=form)


def seeds() -> list[bytes]:
    names = CONNECT_DATA.pack(bytes(range(16)), 0xFFFF, b"nqn.s", b"nqn.h")
    connect = connect_command(0, 32, flow_control=False)
    message = reference.negotiate(1, b"\1", b"\0")
    send = fabrics_command(
        Fabrics.AUTH_SEND, AUTH_DWORDS.pack(1, 1, 0xE9, len(message)), len(message)
    )
    receive = fabrics_command(Fabrics.AUTH_RECEIVE, AUTH_DWORDS.pack(1, 1, 0xE9, 4096))
    receive = receive._replace(sgl_type=0x5A, sgl_length=4096)
    identify = Sqe(Admin.IDENTIFY, 5, 0, 0, 4096, 0x5A, 1)
    enable = Sqe(Admin.FABRICS, 4, 0, cdw11=0x14, cdw12=0x460001)
    rest = [command(send, message), command(receive), command(enable), command(identify)]
    plain = icreq(0) + command(connect, names)
    digests = Format(True, True)
    return [
        b"\0" + plain + b"".join(rest),
        b"\1" + plain + rest[2] + rest[3],
        b"\5" + icreq(3) + command(connect, names, digests) + command(identify, form=digests),
        b"\0" + plain + term_req(PduFault(Fatal.SEQUENCE_ERROR, 0, ""), b"", from_host=True),
        b"\1" + plain + rest[2] + command(Sqe(Admin.GET_LOG_PAGE, 1, 0, 0, 512, 0x5A, 0x007F0002)),
        b"\1" + plain + rest[2] + command(Sqe(Admin.SET_FEATURES, 1, cdw10=7, cdw11=0x10001)),
    ]


def one_input(data: bytes) -> str:
    guarded = not data[:1] or not data[0] & 1

    def admit(request: ConnectRequest) -> Admission:
        association = Association(
            hostnqn=request.hostnqn, hostid=request.hostid, subnqn=request.subnqn, serial="s",
            cntlid=1, kato_ms=request.kato_ms, namespaces=dict,
        )  # fmt: skip
        at_gate = gate() if guarded else None
        return Admission(result=1, controller=Controller(association, 0.0), gate=at_gate)

    connection = HostConnection(admit)
    size = (data[0] >> 1) + 1 if data and data[0] > 1 else 1 << 16
    rest = data[1:]
    for at in range(0, len(rest), size):
        connection.take(rest[at : at + size], 0.0)
        if connection.closing or connection.handed_over:
            break
    assert not (guarded and connection.admitted)
    assert not (guarded and connection.controller and connection.controller.ready)
    most = (len(rest) // COMMAND_BYTES + 2) * (MESSAGE_BYTES_MAX + 128)
    # A log page may be longer than a message: as long as the host has room for.
    assert len(connection.output) <= most or not guarded
    return "refused" if connection.closing or connection.request is None else "accepted"
