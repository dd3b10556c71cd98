"""A controller ends data with SUCCESS, and sends no response, where flow control is off: Linux does."""

import contextlib
import socket
import threading

import pytest

from fabric.conftest import HOST, NQN
from headrace.errors import AuthenticationFailed, ProtocolError
from headrace.fabric.command import Admin, Completion, Sqe
from headrace.fabric.pdu import DATA, LAST, SUCCESS, Type, encode, icresp
from headrace.fabric.queue import Queue

ICREQ_BYTES, CONNECT_BYTES, CAPSULE_BYTES = 128, 72 + 1024, 72
NO_FLOW_CONTROL = 0xFFFF


@contextlib.contextmanager
def controller(*, sqhd, data):
    """Takes a Connect and one command, answered by `data` with SUCCESS; yields a host's queue."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listener.accept()
        with sock, sock.makefile("rb") as stream:
            stream.read(ICREQ_BYTES)
            sock.sendall(icresp(0, 131_072))
            stream.read(CONNECT_BYTES)
            sock.sendall(encode(Type.CAPSULE_RESP, Completion(1, sqhd=sqhd).pack()))
            if data is not None:
                stream.read(CAPSULE_BYTES)
                header = DATA.pack(2, 0, 0, len(data))
                sock.sendall(encode(Type.C2H_DATA, header, data, LAST | SUCCESS))
            else:
                sock.shutdown(socket.SHUT_WR)
            stream.read()

    thread = threading.Thread(target=serve)
    thread.start()
    queue = Queue(listener.getsockname()[:2], offered=0, timeout_s=5)
    try:
        queue.connect(HOST, NQN, qid=1, entries=8, cntlid=1)
        yield queue
    finally:
        queue.close()
        thread.join()
        listener.close()


def test_data_with_success_completes_a_command():
    with controller(sqhd=NO_FLOW_CONTROL, data=b"abcd") as queue:
        completion, found = queue.command(Sqe(Admin.IDENTIFY), expect=4)
    assert (completion.status, found) == (0, b"abcd")


def test_success_while_flow_control_is_on_is_a_fault():
    wrong = pytest.raises(ProtocolError, match="SUCCESS while flow control is on")
    with controller(sqhd=0, data=b"abcd") as queue, wrong:
        queue.command(Sqe(Admin.IDENTIFY), expect=4)


class _Silent:
    """An exchange that has only begun."""

    done = False

    def start(self):
        return bytes(16)


def test_a_controller_that_hangs_up_does_not_believe_us():
    refused = pytest.raises(AuthenticationFailed, match="instead of believing this host")
    with controller(sqhd=0, data=None) as queue, refused:
        queue.authenticate(_Silent())
