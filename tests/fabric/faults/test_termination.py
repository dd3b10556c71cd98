"""After a fault or a TermReq nothing more is taken in, and a TermReq is not answered."""

import struct

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, check_alive, command, common, heard, line
from fabric.faults.hostile_target import HostileTarget, check_reads, engine, right
from fabric.faults.tally import count
from headrace.errors import ProtocolError
from headrace.fabric.host import Host
from headrace.fabric.pdu import Fatal, PduFault, Type, term_req

TERM = PduFault(Fatal.HEADER_DIGEST, 7, "")


@pytest.mark.parametrize("place", PLACES)
def test_commands_after_a_host_s_fault_are_not_answered(target, place):
    message = common(4, 0, 255, 0, 72) + command() * 3
    before = hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0x2)")
    assert before == []


@pytest.mark.parametrize("place", PLACES)
def test_a_host_s_term_req_is_not_answered(target, place):
    message = term_req(TERM, bytes(72), from_host=True)
    with line(target, place) as sock:
        sock.sendall(message + command())
        assert heard(sock) == []
    check_alive(target)
    count("terminations by hosts")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fes", [0, 1, 7, 0xFFFF])
def test_a_host_s_term_req_with_any_status(target, place, fes):
    message = bytearray(term_req(TERM, bytes(72), from_host=True))
    message[8:14] = struct.pack("<HI", fes, 2**32 - 1)
    with line(target, place) as sock:
        sock.sendall(message)
        assert heard(sock) == []
    check_alive(target)
    count("terminations by hosts")


def test_a_target_s_term_req_on_an_io_queue():
    """The host closes without a word, connects anew and reads again."""

    def mistake(sqe, form):
        return term_req(TERM, sqe.pack(), from_host=False) + right(sqe, form)

    with HostileTarget(io=mistake) as target, engine() as fabric:
        fabric.open(target.url)
        check_reads(fabric, target.url)
        assert fabric.figures()["lost_queues"] == fabric.figures()["reconnects"] == 1
    assert target.made == 1
    assert target.terms == []
    count("terminations by targets")


def test_a_target_s_term_req_on_the_admin_queue():
    def mistake(sqe, form):
        return term_req(TERM, sqe.pack(), from_host=False)

    with HostileTarget(admin=mistake) as target:
        with pytest.raises(ProtocolError, match=r"ended the connection: HEADER_DIGEST \(0x7\)"):
            Host(target.address, hostile_target.NQN, hostile_target.HOST, hostile_target.options())
        target._threads[1].join(10)
    assert target.terms == []
    count("terminations by targets")


def test_right_answers_after_a_target_s_fault_are_not_taken():
    """What came behind it in the same segment completes nothing: it is read again elsewhere."""

    def mistake(sqe, form):
        return common(Type.C2H_DATA, 4, 255, 24, 536) + right(sqe, form)

    hostile_target.check_term("io", mistake, "INVALID_HEADER_FIELD (0x2)")
