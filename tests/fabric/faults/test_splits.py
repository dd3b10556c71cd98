"""Every PDU split at every byte, as TCP may split it, in both directions."""

import socket
import time

import numpy as np
import pytest

from fabric.conftest import HOST, NQN
from fabric.faults import hostile_host
from fabric.faults.hostile_host import command, heard, line
from fabric.faults.hostile_target import CONTENT, HostileTarget, engine
from fabric.faults.tally import count
from headrace.fabric.command import CONNECT_DATA, Admin, Sqe, connect_command
from headrace.fabric.controller import Admission, Association, Controller, HostConnection
from headrace.fabric.pdu import Format, Type, encode, icreq

PAUSE_S = 0.0005
"""Long enough for the other side to see the first part alone, most of the times."""


@pytest.mark.parametrize("dgst", [0, 3])
def test_a_host_s_admin_queue(dgst):
    """ICReq, Connect, Property Set and Identify: the same answers however they are cut."""
    form = Format(bool(dgst & 1), bool(dgst & 2))
    data = CONNECT_DATA.pack(HOST.id, 0xFFFF, NQN.encode(), HOST.nqn.encode())
    enable = Sqe(0x7F, 1, 0, cdw11=0x14, cdw12=0x460001)
    identify = Sqe(Admin.IDENTIFY, 2, 0, 0, 4096, 0x5A, 1)
    stream = icreq(dgst) + encode(
        Type.CAPSULE_CMD, connect_command(0, 32, flow_control=False).pack(), data, form=form
    )
    stream += command(enable, form) + command(identify, form)

    def answers(*parts):
        controller = Controller(
            Association(hostnqn=HOST.nqn, hostid=HOST.id, subnqn=NQN, serial="s", cntlid=1,
                        kato_ms=0, namespaces=dict), 0.0)  # fmt: skip
        connection = HostConnection(lambda _: Admission(result=1, controller=controller))
        for part in parts:
            connection.take(part, 0.0)
        assert not connection.closing
        return bytes(connection.output)

    whole = answers(stream)
    assert len(whole) > 4096
    for at in range(1, len(stream)):
        assert answers(stream[:at], stream[at:]) == whole
    count("splits", len(stream) - 1, len(stream) - 1)


@pytest.mark.parametrize("dgst", [0, 3])
def test_a_host_s_io_queue(target, dgst):
    form = Format(bool(dgst & 1), bool(dgst & 2))
    length = len(command(form=form))
    with line(target, "io", dgst) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(1, length):
            message = command(hostile_host.READ._replace(cid=at, cdw10=at), form)
            sock.sendall(message[:at])
            time.sleep(PAUSE_S)
            sock.sendall(message[at:])
        sock.shutdown(socket.SHUT_WR)
        pdus = [pdu for pdu in heard(sock, dgst) if pdu.type is Type.C2H_DATA]
    assert len(pdus) == length - 1
    for pdu in pdus:
        at = int.from_bytes(pdu.header[8:10], "little")
        assert pdu.data == target.data[at * 512 : at * 512 + 512].tobytes()
    count("splits", length - 1, len(pdus))


@pytest.mark.parametrize("dgst", [0, 3])
def test_a_target_s_io_queue(dgst):
    """Each answer of 612 bytes and less is cut at the next byte."""
    cuts = iter(range(1, 1 << 20))
    lengths = set()

    def send(sock, message):
        at = next(cuts) % (len(message) - 1) + 1
        lengths.add(len(message))
        sock.sendall(message[:at])
        time.sleep(PAUSE_S)
        sock.sendall(message[at:])

    with HostileTarget(dgst=dgst, send=send) as target, engine(dgst) as fabric:
        fabric.open(target.url)
        number = 560 + 10 * dgst
        offsets = np.arange(number) * 512 % len(CONTENT)
        dest = np.zeros((number, 512), np.uint8)
        lens = np.full(number, 512)
        found = np.concatenate([
            fabric.read_many(target.url, offsets[at : at + 1], lens[:1], dest[at], 20.0)
            for at in range(number)
        ])  # fmt: skip
        assert (found == 512).all()
        assert np.array_equal(dest, CONTENT.reshape(-1, 512)[offsets // 512])
        figures = fabric.figures()
    assert lengths == {24 + 512 + 24 + (12 if dgst else 0)}
    assert next(cuts) >= lengths.pop()
    assert figures["retried"] == figures["lost_queues"] == 0
    count("splits", number, number)
