"""PDUs that are right in themselves and come at the wrong time, or twice."""

import contextlib
import socket
import threading

import pytest

from fabric.conftest import NQN, OTHER_HOST
from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, check_alive, command, heard
from fabric.faults.hostile_target import c2h, response
from fabric.faults.tally import count
from headrace.errors import ProtocolError
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.pdu import PduSplitter, Rules, Type, icreq, icresp, read_term_req
from headrace.fabric.queue import Queue


@pytest.mark.parametrize("place", PLACES)
def test_a_host_s_second_icreq(target, place):
    hostile_host.check_term(target, place, icreq(0), "SEQUENCE_ERROR (0x0)")


def test_a_host_s_command_before_icreq(target):
    with socket.create_connection(target.target.address, timeout=20) as sock:
        sock.sendall(command())
        received = b""
        while chunk := sock.recv(4096):
            received += chunk
    pdus = list(PduSplitter(Rules(to_host=True, established=False)).feed(received))
    assert read_term_req(pdus[-1].header) == "SEQUENCE_ERROR (0x0)"
    check_alive(target)
    count("mistakes of hosts")


def test_a_host_s_command_behind_connect_is_taken_over(target):
    """Not a mistake: commands that follow an I/O queue's Connect in one segment are answered."""
    with hostile_host.line(target, "io") as sock:
        sock.sendall(command() + command(hostile_host.READ._replace(cid=4)))
        sock.shutdown(socket.SHUT_WR)
        pdus = heard(sock)
    assert sum(pdu.type is Type.C2H_DATA for pdu in pdus) == 2


WRONG = {
    "ICResp again": (lambda *_: icresp(0, 4096), "SEQUENCE_ERROR (0x0)"),
    "response before the data": (response, "SEQUENCE_ERROR (0x16)"),
    "response in mid-data": (
        lambda sqe, form: c2h(sqe, form, nbytes=8, flags=0) + response(sqe, form),
        "SEQUENCE_ERROR (0x16)",
    ),
    "SUCCESS and a response": (
        lambda sqe, form: c2h(sqe, form, flags=12) + response(sqe, form),
        "INVALID_HEADER_FIELD (0x14)",
    ),
    "response twice": (
        lambda sqe, form: c2h(sqe, form) + 2 * response(sqe, form), "INVALID_HEADER_FIELD (0x14)",
    ),
    "data twice": (lambda sqe, form: 2 * c2h(sqe, form), "OUT_OF_RANGE"),
    "data after its response": (
        lambda sqe, form: c2h(sqe, form) + response(sqe, form) + c2h(sqe, form),
        "INVALID_HEADER_FIELD (0x8)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dgst", [0, 3])
@pytest.mark.parametrize("name", WRONG)
def test_of_a_target(name, dgst):
    mistake, said = WRONG[name]
    hostile_target.check_term("io", mistake, said, dgst)


@pytest.mark.parametrize(
    "name", ["ICResp again", "response before the data", "response in mid-data"]
)
def test_of_a_target_s_admin_queue(name):
    mistake, said = WRONG[name]
    hostile_target.check_term("admin", mistake, said)


GOOD = icresp(0, 4096)
FIRST = {
    "a response": (response(hostile_host.READ, hostile_target.Format()), "out of order"),
    "PFV": (GOOD[:8] + b"\1" + GOOD[9:], "PFV"),
    "CPDA": (GOOD[:10] + b"\x20" + GOOD[11:], "CPDA"),
    "DGST": (GOOD[:11] + b"\1" + GOOD[12:], "DGST"),
    "MAXH2CDATA": (icresp(0, 4095), "MAXH2CDATA"),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "unknown PDU type"),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_target_s_first_pdu(name):
    message, told = FIRST[name]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.sendall(message)
                while sock.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ProtocolError, match=told):
            Queue(server.getsockname(), offered=0, timeout_s=10)
        thread.join(10)
        assert not thread.is_alive()
        count("mistakes of targets")


def test_a_host_s_command_in_a_full_queue(target):
    """A queue of two entries holds one command; the host reads nothing, so that no answer goes."""
    many = hostile_host.READ._replace(sgl_length=128 << 10, cdw12=255)
    reads = b"".join(command(many._replace(cid=cid)) for cid in range(300))
    options = HostOptions(timeout_s=20, hdgst=False, ddgst=False, entries=2)
    with Host(target.target.address, NQN, OTHER_HOST, options) as host:
        queue = host.open_queues(1)[0]
        with queue.socket as sock:
            sock.settimeout(20)
            with contextlib.suppress(OSError):
                sock.sendall(reads)
            pdus = heard(sock)
    assert sum(pdu.type is Type.C2H_DATA for pdu in pdus) < 300
    if pdus and pdus[-1].type is Type.C2H_TERM_REQ:  # lost where the connection was reset
        assert read_term_req(pdus[-1].header) == "SEQUENCE_ERROR (0x0)"
    check_alive(target)
    count("mistakes of hosts")
