"""Who may look, who may change something: tokens, sessions, names, other sites. Each refusal says why."""

import os
import socket
import subprocess
import sys
import time

import pytest

from headrace.control.service.auth import PEERS_MAX, Refused, TokenFile, TokenThrottle
from headrace.errors import ControlError
from headrace.web.access import ROLES, Sessions, WebOptions
from headrace.web.source import ControllerPolicies
from web.serving import FakeController

LOOKS = ["/", "/starving", "/storage", "/runs", "/policies", "/stores", "/api/starving", "/api/storage",
         "/api/policy", "/api/stores"]  # fmt: skip
BOTH = "operator {operator}\nreader {reader}\n"
EDIT = {"text": "version: 1\njobs:\n  a: {weight: 2}\n"}


@pytest.fixture
def policies(serve):
    return serve(tokens=BOTH, policies=ControllerPolicies(FakeController()))


@pytest.mark.parametrize("path", LOOKS)
def test_public_pages_need_no_token(served, path):
    assert served.ask(path).status == 200


@pytest.mark.parametrize(
    ("path", "status", "leads_to"),
    [
        ("//starving/?user=a", 308, "/starving?user=a"),
        ("//", 308, "/"),
        ("/job", 303, "/runs"),
        ("//evil.example", 404, None),
        ("/nothing", 404, None),
    ],
)
def test_another_address_leads_to_the_pages(served, path, status, leads_to):
    answer = served.ask(path)
    assert (answer.status, answer.headers.get("location")) == (status, leads_to)
    assert (b'<a href="/starving">' in answer.body) is (status == 404)
    assert served.ask("/api/nothing").message == "there is no such address"


@pytest.mark.parametrize("path", LOOKS)
def test_otherwise_everything_needs_one(serve, path):
    web = serve(tokens=BOTH, public=False)
    answer = web.ask(path)
    if path.startswith("/api/"):
        assert (answer.status, "token" in answer.message) == (401, True)
    else:
        assert (answer.status, answer.headers["location"]) == (303, "/signin")
    for token in (web.reader, web.operator):
        assert web.ask(path, token=token).status == 200
    assert web.ask("/signin").status == 200
    assert web.ask("/static/web.css").status == 200


def test_a_stream_needs_a_token_where_looking_does(serve):
    web = serve(tokens=BOTH, public=False)
    assert web.ask("/api/live").status == 401
    stream = web.listen(Authorization=f"Bearer {web.reader}")
    assert stream.next()[0] == "look"
    stream.close()


@pytest.mark.parametrize("token", ["wrong", "", "operator", "é" * 20, "x" * 5000])
def test_a_wrong_token_is_refused_even_where_none_is_needed(served, token):
    answer = served.ask("/api/storage", token=token.encode("utf-8").decode("latin-1"))
    assert answer.status == 401


def test_another_scheme_is_refused(served):
    assert served.ask("/api/storage", Authorization=f"Basic {served.operator}").status == 401


def test_applying_takes_an_operator(policies):
    assert policies.ask("/api/policy/check", "POST", EDIT, X_Headrace="1").document["changes"]
    assert policies.ask("/api/policy/apply", "POST", EDIT, X_Headrace="1").status == 401
    assert policies.ask("/api/policy/apply", "POST", EDIT, token=policies.reader).status == 403
    assert policies.ask("/api/policy").document["version"] == 7
    applied = policies.ask("/api/policy/apply", "POST", EDIT, token=policies.operator)
    assert applied.document["applied"] is True
    assert policies.ask("/api/policy").document["version"] == 8


def test_a_form_signs_in_with_a_cookie_that_scripts_and_other_sites_do_not_get(policies):
    answer, cookie = policies.sign_in(policies.operator)
    assert answer.status == 303
    attributes = answer.headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes
    assert policies.operator not in attributes
    assert b"operator" in policies.ask("/", cookie=cookie).body
    assert policies.ask("/api/policy/apply", "POST", EDIT, cookie=cookie, X_Headrace="1").document[
        "applied"
    ]
    out = policies.ask("/signout", "POST", cookie=cookie, Sec_Fetch_Site="same-origin")
    assert out.status == 303
    again = policies.ask("/api/policy/apply", "POST", EDIT, cookie=cookie, X_Headrace="1")
    assert again.status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "cross-site"}, 403), ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "none"}, 403), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403), ({}, 403), ({"X_Headrace": "1"}, 200),
        ({"X_Headrace": "1", "Origin": "http://evil.example"}, 403),
    ],
)  # fmt: skip
def test_another_site_cannot_use_a_session(policies, headers, status):
    """Without our header a request with a cookie is refused, whatever else it has."""
    _, cookie = policies.sign_in(policies.operator)
    answer = policies.ask("/api/policy/apply", "POST", EDIT, cookie=cookie, **headers)
    assert answer.status == status
    assert policies.ask("/api/policy").document["version"] == (8 if status == 200 else 7)


def test_another_site_cannot_sign_somebody_in(policies):
    form = f"token={policies.operator}".encode()
    answer = policies.ask("/signin", "POST", form, Content_Type="application/x-www-form-urlencoded",
                      Origin="http://evil.example")  # fmt: skip
    assert answer.status == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/json", ""])
def test_only_a_form_signs_in(policies, kind):
    assert policies.ask("/signin", "POST", b"token=x", Content_Type=kind).status == 415


@pytest.mark.parametrize("name", ["token", "TOKEN", "access_token", "auth", "key", "password"])
@pytest.mark.parametrize("path", ["/", "/api/storage", "/api/live", "/signin", "/static/web.css"])
def test_a_token_in_an_address_is_refused_and_said_so(served, path, name):
    answer = served.ask(f"{path}?{name}=x")
    assert answer.status == 400
    assert b"does not belong into an address" in answer.body


def test_a_token_in_any_field_of_an_address_is_refused(served):
    answer = served.ask(f"/api/job?id={served.operator}")
    assert answer.status == 400
    assert served.operator.encode() not in answer.body


def test_tokens_and_sessions_end(serve):
    now = [1_800_000_000.0]
    web = serve(
        tokens="operator {operator} until 2027-01-15T09:00:00\n", public=False, clock=lambda: now[0]
    )
    _, cookie = web.sign_in(web.operator)
    assert web.ask("/api/storage", cookie=cookie).status == 200
    now[0] += 3600.0  # it is 9 o'clock
    assert web.ask("/api/storage", cookie=cookie).status == 401
    answer = web.ask("/api/storage", token=web.operator)
    assert (answer.status, "expired" in answer.message) == (401, True)
    answer, cookie = web.sign_in(web.operator)
    assert (answer.status, cookie) == (401, "")
    assert b"expired" in answer.body


def test_whose_token_is_taken_out_of_the_file_is_signed_out(serve):
    web = serve(tokens=BOTH, public=False)
    _, cookie = web.sign_in(web.reader)
    assert web.ask("/api/storage", cookie=cookie).status == 200
    web.token_file.write_text(f"operator {web.operator}\n")
    assert web.ask("/api/storage", cookie=cookie).status == 401
    assert web.ask("/api/storage", token=web.operator).status == 200
    web.token_file.unlink()
    assert web.ask("/api/storage", token=web.operator).status == 401


def test_who_is_signed_out_is_told_nothing_more(serve):
    web = serve(tokens=BOTH, public=False)
    stream = web.listen(Authorization=f"Bearer {web.reader}")
    stream.next()
    web.token_file.write_text(f"operator {web.operator}\n")
    with pytest.raises(EOFError):
        for _ in range(4):
            stream.next()
    stream.close()


def test_a_cookie_over_tls_is_for_tls_only(serve):
    web = serve(tokens=BOTH, names=("portal.example",))
    form = f"token={web.reader}".encode()
    cookies = {
        scheme: web.ask("/signin", "POST", form, Content_Type="application/x-www-form-urlencoded",
                        Origin=f"{scheme}://portal.example", Host="portal.example").headers["set-cookie"]
        for scheme in ("http", "https")
    }  # fmt: skip
    assert "Secure" not in cookies["http"]
    assert "Secure" in cookies["https"]


def test_guessing_is_slowed_down_for_who_guesses():
    def attempt(peer, token="guess"):
        try:
            return sessions.by_header(f"Bearer {token}", peer)
        except Refused as e:
            return e.status

    clock = [0.0]
    sessions = Sessions(None, lambda: clock[0])
    assert [attempt("user 1") for _ in range(22)] == [401] * 20 + [429] * 2
    assert attempt("user 1", sessions.own.secret) == 429
    assert attempt("user 2", sessions.own.secret) == "operator"
    clock[0] += 61.0
    assert attempt("user 1", sessions.own.secret) == "operator"


def test_many_who_guess_do_not_fill_the_memory():
    throttle = TokenThrottle(lambda: 0.0)
    for peer in range(PEERS_MAX + 10):
        throttle.wrong(str(peer))
    assert len(throttle._wrong) == PEERS_MAX


def test_without_a_file_the_printed_link_signs_in_once(serve):
    web = serve(public=False)
    assert web.ask("/api/storage").status == 401
    link = f"/signin?once={web.sessions.once}"
    assert web.ask("/signin?once=guess").status == 401
    assert web.ask("/signin?once=%C3%A9").status == 401
    first, again = web.ask(link), web.ask(link)
    assert (first.status, again.status) == (303, 401)
    assert b"was used already" in again.body
    assert web.ask("/api/storage", cookie=first.headers["set-cookie"].split(";")[0]).status == 200
    assert web.ask("/api/storage", token=web.sessions.own.secret).status == 200


def test_a_file_of_tokens_that_became_readable_lets_nobody_in(serve):
    """The change of its mode leaves its time as it was."""
    web = serve(tokens=BOTH, public=False)
    assert web.ask("/api/storage", token=web.reader).status == 200
    web.token_file.chmod(0o644)
    assert web.ask("/api/storage", token=web.reader).status == 401
    web.token_file.chmod(0o600)
    assert web.ask("/api/storage", token=web.reader).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8470", "127.0.0.1.evil.example", "", "127.0.0.2", "localhost.", "[::1",
        "127.0.0.1:x", "127.0.0.1,evil.example",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/storage", "/api/live"])
def test_another_name_for_this_machine_is_refused(served, host, path):
    """DNS rebinding: a name of somebody else's that leads to 127.0.0.1."""
    answer = served.ask(path, Host=host)
    assert answer.status == 421
    assert b"go by the name" in answer.body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "LOCALHOST:1", "[::1]:80"])
def test_a_tunnel_may_have_another_port(served, host):
    assert served.ask("/api/storage", Host=host).status == 200


def test_behind_a_proxy_its_name_is_said(serve):
    web = serve(names=("portal.example",))
    assert web.ask("/", Host="portal.example").status == 200
    assert web.ask("/", Host="other.example").status == 421


@pytest.mark.parametrize("path", [*LOOKS, "/static/core.js", "/signin", "/nothing", "/?token=1"])
def test_every_answer_tells_browsers_to_load_nothing_from_elsewhere(served, path):
    headers = served.ask(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/nothing.js", "/static/"]
)
def test_only_known_files_are_served(served, path):
    assert served.ask(path).status == 404


@pytest.mark.parametrize(("method", "path"), [("POST", "/"), ("PUT", "/api/policy"), ("DELETE", "/api/stores"),
                                              ("GET", "/api/policy/apply"), ("GET", "/signout")])  # fmt: skip
def test_other_methods_are_refused(served, method, path):
    assert served.ask(path, method).status in (403, 405)


def test_a_body_is_bounded(policies):
    answer = policies.ask("/api/policy/check", "POST", b"x" * ((1 << 20) + 1), X_Headrace="1")
    assert answer.status == 413
    assert policies.ask("/api/policy/check", "POST", b"[" * 100_000, X_Headrace="1").status == 400
    for body in (b"", b"{}", b'{"text": 1}', b"\xff"):
        assert policies.ask("/api/policy/check", "POST", body, X_Headrace="1").status == 400
    assert policies.ask("/" + "?a=" + "x" * 5000).status == 414


# -- files of tokens and options -----------------------------------------------------------------------


def tokens_of(tmp_path, text, mode=0o600):
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return TokenFile(path, ROLES).tokens()


def test_a_file_of_tokens(tmp_path):
    tokens = tokens_of(
        tmp_path, "# us\n\nabcdefghijklmnop\nreader qrstuvwxyzabcdef until 2030-01-01\n"
    )
    assert [(t.role, t.secret, t.until_s) for t in tokens] == [
        ("operator", "abcdefghijklmnop", None), ("reader", "qrstuvwxyzabcdef", 1893456000.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no token"), ("short", "16 or more"), ("root abcdefghijklmnop", "reader TOKEN"),
        ("operator abcdefghijklmnop soon", "reader TOKEN"), ("abcdefghijklmnop until tomorrow", "no date"),
        ("operator abcdefghijklmn\u00e9p", "without spaces"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_tokens_is_refused(tmp_path, text, problem):
    with pytest.raises(ControlError, match=problem):
        tokens_of(tmp_path, text)


def test_a_file_of_tokens_that_others_can_read_is_refused(tmp_path):
    with pytest.raises(ControlError, match="chmod 600"):
        tokens_of(tmp_path, "abcdefghijklmnop", 0o640)


@pytest.mark.parametrize(
    "given",
    [
        {"listen": "8470"}, {"listen": "127.0.0.1:99999"}, {"listen": "0.0.0.0:8470"}, {"listen": "[::]:8470"},
        {"listen": "node7:8470"}, {"names": ("a:1",)}, {"names": ("",)},
        {"names": ("http://a",)},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(given):
    with pytest.raises(ValueError, match=r"listen|private|name"):
        WebOptions(**given)


def test_what_others_can_reach_needs_a_token(tmp_path):
    beyond = WebOptions(listen="0.0.0.0:8470", token_file=tmp_path / "t")
    assert (beyond.needs_token, beyond.hosts) == (True, None)
    with pytest.raises(ValueError, match="--public: everybody could look"):
        WebOptions(listen="0.0.0.0:8470", token_file=tmp_path / "t", public=True)
    here = WebOptions(listen="[::1]:8470")
    assert (here.needs_token, here.address.loopback) == (True, True)


def test_a_session_is_made_of_chance(serve):
    web = serve(tokens=BOTH)
    cookies = {web.sign_in(web.reader)[1] for _ in range(8)}
    assert len(cookies) == 8
    assert min(map(len, cookies)) > 40


def test_a_slow_form_is_given_up(serve):
    """A body that drips in is hung up on by the connection's own deadline."""
    web = serve(tokens=BOTH)
    sock = socket.create_connection(("127.0.0.1", web.port), 15)
    sock.sendall(f"POST /signin HTTP/1.1\r\nHost: 127.0.0.1:{web.port}\r\nContent-Length: 100\r\n"
                 "Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken=".encode())  # fmt: skip
    began = time.monotonic()
    assert sock.recv(10) is not None
    assert time.monotonic() - began < 14
    sock.close()


def test_a_body_that_nobody_wants_is_hung_up_on(served):
    """Some of it is read, so that the answer is seen; not all that somebody sends."""
    size = 64 << 20
    with socket.create_connection(("127.0.0.1", served.port), 15) as sock:
        sock.sendall(f"POST /api/policy/check HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
                     f"Content-Length: {size}\r\n\r\n".encode())  # fmt: skip
        sent = 0
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            while sent < size:
                sent += sock.send(bytes(1 << 16))
    assert sent < 16 << 20  # the kernel's buffers hold some, too


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_who_opens_many_connections_shuts_out_only_himself(served):
    """1,100 connections of another user that ask for nothing, over the 1,024 that there may be."""
    code = ("import resource, socket, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
            f"open_ones = [socket.create_connection(('127.0.0.1', {served.port})) for _ in range(1100)]\n"
            "print(len(open_ones), flush=True); sys.stdin.read()")  # fmt: skip
    other = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "1100\n"
        for _ in range(5):
            assert served.ask("/api/storage", token=served.operator).status == 200
    finally:
        other.communicate("", 30)
