"""What happens on the way to a target: each read ends with the right bytes, or an error, in its time."""

import contextlib
import errno
import socket
import struct
import threading

import numpy as np
import pytest

from fabric.conftest import HOST, NQN
from fabric.faults.hostile_target import (
    CONTENT,
    HostileTarget,
    c2h,
    check_reads,
    data_of,
    engine,
    response,
    right,
)
from fabric.faults.tally import count
from fabric.test_reading import Flipper, Hole, check, ranges
from fabric.test_reading import engine as reading_engine
from headrace import _native
from headrace.errors import FabricError
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.pdu import DATA, LAST, Type, encode, icresp
from tests_shared import until

WHOLE = 24 + 512 + 24


def cutting(at, how):
    """Sends so much of an answer and ends the connection."""
    cut = []

    def send(sock, message):
        if cut:
            sock.sendall(message)
            return
        cut.append(at)
        sock.sendall(message[:at])
        if how == "RST":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.shutdown(socket.SHUT_RDWR)

    return send, cut


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("at", [0, 1, 8, 24, 25, 300, 536, 550, WHOLE - 1, WHOLE])
def test_a_target_that_dies_in_the_middle_of_a_batch(at, how):
    """What was not answered is read again from the next connection, each read once."""
    send, cut = cutting(at, how)
    with HostileTarget(send=send) as target, engine() as fabric:
        fabric.open(target.url)
        check_reads(fabric, target.url, 20)
        figures = fabric.figures()
        assert figures["lost_queues"] == figures["reconnects"] == 1
        assert figures["failed"] == 0
        assert figures["reads"] == 20
    assert cut == [at]
    count("deaths in mid-batch")


class Shuffler(HostileTarget):
    """Answers what came together in another order, data of all in turn."""

    shuffled = 0

    def answer(self, commands, form):
        if len(commands) > 1:
            self.shuffled += len(commands)
        random = np.random.default_rng(len(commands))

        def mixed():
            return [commands[number] for number in random.permutation(len(commands))]

        out = [c2h(sqe, form, nbytes=256, flags=0) for sqe in mixed()]
        out += [second_half(sqe, form) for sqe in mixed()]
        out += [response(sqe, form) for sqe in mixed()]
        return b"".join(out)


def second_half(sqe, form):
    data = data_of(sqe)[256:]
    return encode(Type.C2H_DATA, DATA.pack(sqe.cid, 0, 256, len(data)), data, LAST, form)


@pytest.mark.parametrize("dgst", [0, 3])
def test_completions_in_any_order(dgst):
    with Shuffler(dgst=dgst) as target, engine(dgst) as fabric:
        fabric.open(target.url)
        number = 200
        offsets = np.random.default_rng(1).permutation(number) * 512 + 5
        lengths = np.full(number, 300)
        dest = np.zeros((number, 300), np.uint8)
        for _ in range(5):
            dest[:] = 0
            found = fabric.read_many(target.url, offsets, lengths, dest.reshape(-1), 20.0)
            assert (found == 300).all()
            assert all(
                np.array_equal(row, CONTENT[at : at + 300])
                for row, at in zip(dest, offsets, strict=True)
            )
        figures = fabric.figures()
    assert figures["retried"] == figures["lost_queues"] == 0
    count("reordered completions", target.shuffled, target.shuffled)


# -- slow targets ---------------------------------------------------------------------------------


def test_a_target_that_drips_its_data():
    """The deadline is the command's, however many bytes still come."""
    stop = threading.Event()
    dripped = []

    def send(sock, message):
        for byte in message:
            if stop.wait(0.02):
                return
            sock.sendall(bytes((byte,)))
            dripped.append(byte)

    with (
        HostileTarget(send=send) as target,
        engine(command_timeout_s=1.0, give_up_s=2.0) as fabric,
    ):
        fabric.open(target.url)
        dest = np.zeros(512, np.uint8)
        found = fabric.read_many(target.url, np.array([0]), np.array([512]), dest, 5.0)
        assert found.tolist() in ([-errno.ETIMEDOUT], [-errno.EHOSTDOWN])
        assert fabric.figures()["timeouts"] > 0
        stop.set()
    assert len(dripped) > 3
    count("slow drips")


def test_a_target_that_drips_its_icresp():
    stop = threading.Event()
    dripped = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                for byte in icresp(0, 4096):
                    sock.sendall(bytes((byte,)))
                    dripped.append(byte)
                    if stop.wait(0.05):
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(FabricError, match="did not answer within"):
            Host(server.getsockname(), NQN, HOST, HostOptions(timeout_s=1.5))
        stop.set()
        thread.join(10)
    assert 3 < len(dripped) < 128
    count("slow drips")


# -- flipped bits ---------------------------------------------------------------------------------


def test_flipped_bits_with_digests_are_all_found_and_read_again(exported):
    with Flipper(exported.target.address) as flipper, reading_engine(give_up_s=60) as fabric:
        url = f"nvme+tcp://127.0.0.1:{flipper.port}/{NQN}?ns=1"
        fabric.open(url)
        flipper.every = 150_000
        for seed in range(4):
            check(fabric, url, exported.data, *ranges(exported.data, 100, seed))
        flipper.every = 0
        figures = fabric.figures()
    found = figures["digest_errors"] + figures["lost_queues"]
    assert flipper.flipped > 10
    assert found > 0
    assert figures["failed"] == 0
    # Bits of answers that a lost connection threw away are found by nobody, and reach nobody.
    count("flipped bits, digests on", flipper.flipped, found)


def test_flipped_bits_without_digests_are_found_by_the_sample_s_checksum():
    """Nothing on the way finds them: what a block's crc32c is for."""
    flipped = []

    def mistake(sqe, form):
        whole = bytearray(right(sqe, form))
        bit = 24 * 8 + len(flipped) * 997 % 4096
        whole[bit // 8] ^= 1 << bit % 8
        flipped.append(bit)
        return bytes(whole)

    number = 64
    offsets = np.arange(number) * 512
    with (
        HostileTarget(io=mistake, times=20, fatal=False) as target,
        engine() as fabric,
    ):
        fabric.open(target.url)
        dest = np.zeros((number, 512), np.uint8)
        for at in range(number):  # one by one: no two in one command
            read = fabric.read_many(
                target.url, offsets[at : at + 1], np.array([512]), dest[at], 20.0
            )
            assert read.tolist() == [512]
        assert fabric.figures()["digest_errors"] == 0
    blocks = CONTENT.reshape(-1, 512)
    wrong = sum(_native.crc32c(dest[at]) != _native.crc32c(blocks[at]) for at in range(number))
    assert len(flipped) == wrong == 20
    count("flipped bits, digests off", len(flipped), wrong)


def test_a_black_hole(exported):
    """Nothing comes back, no connection ends: each read is an error by its deadline, then all is well."""
    with (
        Hole(exported.target.address) as hole,
        reading_engine(give_up_s=2.0, command_timeout_s=1.0) as fabric,
    ):
        url = f"nvme+tcp://127.0.0.1:{hole.port}/{NQN}?ns=1"
        fabric.open(url)
        hole.open = False
        dest = np.zeros(20 * 512, np.uint8)
        found = fabric.read_many(url, np.arange(20) * 5000, np.full(20, 512), dest, 20.0)
        assert set(found.tolist()) <= {-errno.ETIMEDOUT, -errno.EHOSTDOWN}
        timeouts = fabric.figures()["timeouts"]
        assert timeouts > 0
        assert hole.swallowed > 0
        hole.open = True
        until(lambda: fabric.figures()["reconnects"] > 0, 20)
        check(fabric, url, exported.data, *ranges(exported.data, 20))
    count("reads into a black hole", 20, int((found < 0).sum()))
