"""The controller as a process: who may ask, what it does not swallow, and what survives it."""

import contextlib
import json
import os
import secrets
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control.service import ControllerProcess, fill_up, request, uid_of_another, until
from headrace.base.peers import Address
from headrace.control.client import Client, Endpoint, Refusal
from headrace.control.messages import API, BODY_BYTES_MAX
from headrace.control.service.app import ControlOptions
from headrace.control.service.http import REQUEST_S, listen_tcp
from headrace.errors import ControlError, HeadraceError


def report(sequence=1, flows=(), **more):
    return json.dumps({"sequence": sequence, "seconds": 1.0, "flows": list(flows)} | more).encode()


def flow(**more):
    return {
        "job": "a", "file_system": "fs", "used": [1, 1, 0], "waiting": [0, 0, 0],
        "held_s": [0, 0, 0], **more,
    }  # fmt: skip


# -- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"token": "x"}, 401),
        ({"token": ""}, 401),
        ({"token": "\xe9" * 16}, 401),
    ],
)
def test_a_wrong_token_opens_nothing(controller, header, status):
    for method, path in (("GET", "/v1/state"), ("PUT", "/v1/policy"), ("POST", "/v1/planes")):
        assert request(controller, method, path, b"{}", tcp=True, **header)[0] == status


def test_a_planes_token_is_good_for_planes_alone(controller):
    token = controller.plane_token
    hello = {"api": API, "name": "n", "user": "u", "pid": 1, "instance": secrets.token_hex(16)}
    status, lease = request(
        controller, "POST", "/v1/planes", json.dumps(hello).encode(), tcp=True, token=token
    )
    assert status == 200
    path = f"/v1/planes/{lease['plane']}"
    assert request(controller, "POST", f"{path}/report", report(), tcp=True, token=token)[0] == 200
    for method, path_ in (("GET", "/v1/state"), ("PUT", "/v1/policy"), ("GET", "/v1/policy")):
        assert request(controller, method, path_, b"{}", tcp=True, token=token)[0] == 403
    assert request(controller, "DELETE", path, tcp=True, token=token)[0] == 200


AS_ANOTHER = """
import http.client, json, os, socket, sys
os.setgid({uid}); os.setuid({uid})
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(sys.argv[1])
def ask(method, path, body):
    try:
        one = Unix("localhost")
        one.request(method, path, json.dumps(body))
        return one.getresponse().status
    except PermissionError:
        return "denied"
hello = {{"api": 1, "name": "n", "user": {uid!r}, "pid": 1, "instance": "ab" * 16}}
print(json.dumps([
    ask("GET", "/v1/state", None), ask("PUT", "/v1/policy", {{}}),
    ask("POST", "/v1/planes", hello | {{"user": "root"}}),
    ask("POST", "/v1/planes", hello | {{"user": str({uid})}}),
]))
"""


def test_another_user_may_be_a_plane_of_his_own_jobs_and_nothing_else(controller):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    program = AS_ANOTHER.format(uid=uid_of_another())

    def asked(path):
        ended = subprocess.run(
            [sys.executable, "-c", program, path], check=True, capture_output=True
        )
        return json.loads(ended.stdout)

    assert asked(controller.folder.socket) == ["denied"] * 4
    assert asked(controller.public) == [403, 403, 403, 200]
    assert [p["user"] for p in controller.state()["planes"]] == [str(uid_of_another())]


@pytest.mark.parametrize(
    ("listen", "problem"),
    [
        ("tcp:0.0.0.0:9470", "anybody could ask"),
        ("tcp:x", "expected HOST:PORT"),
        ("x", "expected unix"),
    ],
)
def test_tcp_without_a_token_or_certificates_is_refused(tmp_path, listen, problem):
    with pytest.raises(ValueError, match=problem):
        ControlOptions(database=tmp_path / "c.db", listen=(listen,))


def test_tokens_that_others_can_read_are_refused(tmp_path):
    from headrace.control.service.auth import TokenFile

    roles = ("operator", "plane")
    (tmp_path / "t").write_text("operator " + "x" * 16 + "\n")
    (tmp_path / "t").chmod(0o644)
    with pytest.raises(ControlError, match="others can read"):
        TokenFile(tmp_path / "t", roles)
    (tmp_path / "t").chmod(0o600)
    assert TokenFile(tmp_path / "t", roles).tokens()[0].role == "operator"
    for text in ("short", "king " + "x" * 16, "", "a b c"):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ControlError):
            TokenFile(tmp_path / "t", roles)


# -- bad input -----------------------------------------------------------------------------------

BAD_BODIES = [
    b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"{}", b"[" * 100_000,
    b'{"a":' * 50_000, b'{"sequence": 1e400}', report(sequence=-1), report(sequence="1"),
    report(more=1), report(flows=[{}]), report(flows=[flow(job="")]), report(flows=[flow(job="x" * 300)]),
    report(flows=[flow(used=[-1, 0, 0])]), report(flows=[flow(used=[1e300, 0, 0])]),
    report(flows=[flow(used=[1, 2])]), report(flows=[flow(extra=1)]),
    report(flows=[flow(used=[None, 0, 0])]), report(flows=[flow()] * 5000),
    report(state={"unknown": 1}), b'{"sequence": NaN, "seconds": 1, "flows": []}',
]  # fmt: skip


def test_bodies_that_are_wrong_are_refused_and_change_nothing(controller):
    lease = controller.plane()
    for body in BAD_BODIES:
        for path in (f"/v1/planes/{lease['plane']}/report", "/v1/planes"):
            status, answer = request(controller, "POST", path, body)
            assert status == 400, (path, body[:60])
            assert "the body is wrong" in answer["error"]["message"]
    (plane,) = [p for p in controller.state()["planes"] if p["number"] and p["name"] == "n"][-1:]
    assert plane["reports"] == 0
    status, _ = request(controller, "POST", f"/v1/planes/{lease['plane']}/report", report())
    assert status == 200
    request(controller, "DELETE", f"/v1/planes/{lease['plane']}")


def test_a_body_that_is_too_large_is_refused_before_it_is_whole(controller):
    for path, method in (("/v1/planes", "POST"), ("/v1/policy", "PUT")):
        status, answer = request(controller, method, path, b" " * (BODY_BYTES_MAX + 1))
        assert status == 413
        assert str(BODY_BYTES_MAX) in answer["error"]["message"]


def test_a_policy_that_is_wrong_is_refused_with_all_its_problems(controller):
    before = request(controller, "GET", "/v1/policy")
    status, answer = request(controller, "PUT", "/v1/policy", b"jbos: 1\nlease_s: x")
    assert status == 422
    assert len(answer["error"]["problems"]) == 2
    assert request(controller, "PUT", "/v1/policy", b"\xff\xfe")[0] in (400, 422)
    assert request(controller, "GET", "/v1/policy") == before


def test_a_report_twice_or_late_is_refused(controller):
    lease = controller.plane()
    path = f"/v1/planes/{lease['plane']}/report"
    assert request(controller, "POST", path, report(5))[0] == 200
    for sequence in (5, 4):
        assert request(controller, "POST", path, report(sequence))[0] == 409
    assert request(controller, "POST", path, report(6))[0] == 200
    request(controller, "DELETE", f"/v1/planes/{lease['plane']}")


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/planes/x/y", "/v2/state", "/v1/planes/%00/report"]
)
def test_unknown_places_are_errors(controller, path):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", controller.port, timeout=20)
    connection.request("GET", path, headers={"Authorization": f"Bearer {controller.token}"})
    assert connection.getresponse().status in (404, 405)
    connection.close()


def raw(controller, *chunks, pause_s=0.0):
    """Send bytes on a connection of their own, and return what comes until it is closed."""
    with socket.create_connection(("127.0.0.1", controller.port), timeout=6 * REQUEST_S) as sock:
        received = b""
        try:
            for chunk in chunks:
                sock.sendall(chunk)
                time.sleep(pause_s)
            while chunk := sock.recv(65536):
                received += chunk
        except ConnectionError:
            pass
        return received


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01" + b"x" * 50,
        b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"POST /v1/planes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/planes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_garbage_is_answered_by_400_or_nothing_and_the_line_is_cut(controller, garbage):
    answer = raw(controller, garbage)
    assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
    assert controller.state()["pid"] == controller.process.pid


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=1, max_size=400))
def test_any_bytes_do_the_controller_no_harm(controller, data):
    with socket.create_connection(("127.0.0.1", controller.port), timeout=30) as sock:
        sock.sendall(data)
    assert controller.state()["pid"] == controller.process.pid


HEAD = b"POST /v1/planes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize(
    "chunks",
    [
        [b""], [b"P"], [HEAD], [HEAD + b"Authorization: Bearer TOKEN\r\n\r\n", b"{"],
        [bytes([c]) for c in HEAD[:14]],
    ],
    ids=["nothing", "a byte", "half a head", "half a body", "a byte at a time"],
)  # fmt: skip
def test_whoever_drips_is_hung_up_on(controller, chunks):
    token = controller.token.encode()
    chunks = [chunk.replace(b"TOKEN", token) for chunk in chunks]
    answer = raw(
        controller, *chunks, pause_s=1.0 if len(chunks) > 2 else 0.0
    )  # returns: it was cut
    assert b" 200 " not in answer
    assert controller.state()["pid"] == controller.process.pid


def test_a_second_request_that_drips_is_hung_up_on_too(controller):
    good = (
        b"GET /v1/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        + controller.token.encode()
        + b"\r\n\r\n"
    )
    answer = raw(controller, good, good[:20])
    assert answer.count(b" 200 ") == 1


# -- killed, stopped, doubled ----------------------------------------------------------------------


def leases_written(path):
    """What a controller's database says now of the leases that it gave, which it writes once a second."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        row = database.execute("SELECT planes FROM leases").fetchone()
    return row[0] if row else ""


def test_a_controller_that_was_killed_comes_back_with_its_policy_and_leases(own):
    one = own()
    one.apply("jobs: {a: {cap: {bytes_per_s: 7M}}}\nlease_s: 60")
    plane = one.plane()
    path = f"/v1/planes/{plane['plane']}/report"
    request(one, "POST", path, report(flows=[flow(file_system="other")]))
    until(lambda: "7000000" in leases_written(one.parent / "control.db"))
    one.kill()
    assert one.folder.socket.exists()  # what a kill leaves
    one.start()
    state = one.state()
    assert state["epoch"] == 2
    assert state["policy_version"] == 1
    (held,) = state["planes"]
    assert held["flows"][0]["granted"]["bytes_per_s"] == 7e6
    # The old key is not known any more: the plane has to register, and gets a larger epoch.
    assert request(one, "POST", path, report(2))[0] == 404
    assert one.plane()["epoch"] == 2


def test_of_two_controllers_on_one_folder_or_one_database_the_second_is_refused(own):
    one = own()
    for options in ({}, {"name": "other-control"}):
        other = ControllerProcess(own.parent, wait=False, **options) if options else None
        if other is None:
            process = subprocess.run(
                [sys.executable, "-c", one.program], capture_output=True, check=False
            )
            log, code = process.stderr.decode(), process.returncode
        else:
            log, code = other.end(0) if other.process.wait(30) else "", other.process.returncode
        assert code != 0
        assert f"process {one.process.pid}" in log
    assert one.state()["epoch"] == 1


def test_a_controller_that_was_taken_over_ends_by_itself(own):
    """As where locks do not hold: somebody counts the epoch up below it."""
    from headrace.control.service.database import Database

    one = own()
    other = Database(one.parent / "control.db", lock=False)
    assert one.process.wait(20) == 0
    assert "another controller rules by now, its epoch is 2" in one.process.stderr.read().decode()
    other.close()


def test_a_controller_that_is_told_to_end_ends_with_clients_on_the_line(own):
    one = own()
    with socket.create_connection(("127.0.0.1", one.port)):
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(20) == 0
    assert not one.folder.socket.exists()
    assert not one.public.exists()


def test_a_full_disk_refuses_policies_and_the_controller_rules_on(own, monkeypatch):
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", own.parent], check=False
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        one = own()
        one.apply("lease_s: 7")
        fill_up(own.parent / "filler")
        big = "jobs: {" + ", ".join(f"j{i}: {{weight: 2}}" for i in range(3000)) + "}"
        status, answer = request(one, "PUT", "/v1/policy", big.encode())
        assert status == 507
        assert "cannot be written" in answer["error"]["message"]
        assert one.plane()["lease_s"] == 7.0
        (own.parent / "filler").unlink()
        assert one.apply("lease_s: 8")["version"] == 2
        one.end()
    finally:
        subprocess.run(["umount", "-l", own.parent], check=False)


# -- the client --------------------------------------------------------------------------------------


def test_the_client_keeps_its_connection_and_finds_a_new_controller(own):
    one = own()
    client = Client(Endpoint(url=one.url))
    assert client.document("GET", "/v1/state")["epoch"] == 1
    one.kill()
    with pytest.raises((ControlError, FileNotFoundError)):
        client.document("GET", "/v1/state")
    one.start()
    assert client.document("GET", "/v1/state")["epoch"] == 2
    client.close()


def test_the_client_says_what_was_refused(controller, tmp_path):
    client = Client(Endpoint(url=controller.url))
    with pytest.raises(Refusal, match="did you mean 'jobs'") as caught:
        client.ask("PUT", "/v1/policy", b"jbos: 1")
    assert caught.value.status == 422
    assert len(caught.value.problems) == 1
    client.close()
    (tmp_path / "token").write_text("y" * 20)
    over_tcp = Endpoint(url=f"http://127.0.0.1:{controller.port}", token_file=tmp_path / "token")
    client = Client(over_tcp)
    with pytest.raises(Refusal, match="a good token"):
        client.ask("GET", "/v1/state")
    (tmp_path / "token").write_text(controller.token)
    assert client.document("GET", "/v1/state")["pid"] == controller.process.pid
    client.close()


@pytest.mark.parametrize(
    "url", ["", "unix:x", "http://h", "ftp://h:1", "http://h:1/x", "http://h:x"]
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(ValueError, match="expected own, unix:/PATH"):
        Endpoint(url=url)


def test_the_client_waits_no_longer_than_its_deadline_for_one_that_drips():
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def drip():
            one, _ = server.accept()
            with one:
                one.recv(65536)
                for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 1000:
                    if done.wait(0.02):
                        return
                    try:
                        one.sendall(bytes([byte]))
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        client = Client(Endpoint(url=f"http://127.0.0.1:{server.getsockname()[1]}"), deadline_s=0.5)
        with pytest.raises(ControlError, match="does not answer"):
            client.ask("GET", "/v1/state")
        done.set()
        thread.join(10)
        assert not thread.is_alive()
        client.close()


# -- mutual TLS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Certificates of one authority, and one of another, made by openssl."""
    place = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        ended = subprocess.run(["openssl", *arguments], cwd=place, capture_output=True, check=False)
        if ended.returncode:
            pytest.skip(f"openssl: {ended.stderr.decode()}")

    for ca in ("ca", "foreign-ca"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}", "-days", "2")  # fmt: skip
    (place / "ext").write_text("subjectAltName=IP:127.0.0.1")
    for name, ca in (("server", "ca"), ("node", "ca"), ("foreign", "foreign-ca")):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "ext")  # fmt: skip
    return place


def test_over_mutual_tls_a_certificate_is_needed_and_a_token_too_where_there_are_some(
    own, authority, tmp_path
):
    tls = {
        "tls_cert": str(authority / "server.pem"), "tls_key": str(authority / "server.key"),
        "tls_ca": str(authority / "ca.pem"),
    }  # fmt: skip
    one = own(tls=tls)
    (tmp_path / "token").write_text(one.token)

    def asked(certificate, token="token"):
        files = {} if certificate is None else {
            "certificate": authority / f"{certificate}.pem", "key": authority / f"{certificate}.key"
        }  # fmt: skip
        client = Client(
            Endpoint(
                url=f"https://127.0.0.1:{one.port}", ca=authority / "ca.pem",
                token_file=tmp_path / token, **files,
            )
        )  # fmt: skip
        try:
            return client.document("GET", "/v1/state")["pid"]
        finally:
            client.close()

    assert asked("node") == one.process.pid
    for certificate in (None, "foreign"):
        with pytest.raises(HeadraceError, match="does not answer"):
            asked(certificate)
    (tmp_path / "wrong").write_text("z" * 20)
    with pytest.raises(Refusal, match="token"):
        asked("node", "wrong")
    plain = ssl.create_default_context(cafile=authority / "foreign-ca.pem")
    with socket.create_connection(("127.0.0.1", one.port)) as sock, pytest.raises(ssl.SSLError):
        plain.wrap_socket(sock, server_hostname="127.0.0.1")


def test_an_address_that_is_taken_is_named_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        with pytest.raises(ControlError) as refused:
            listen_tcp(address, "here")
    assert str(refused.value) == "here: cannot listen: Address already in use."
