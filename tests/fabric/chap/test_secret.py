"""Secrets: their form, where they come from, what is derived of them, and that they are never shown."""

import logging
import pickle
import shutil
import subprocess
import sys

import pytest

from fabric.chap.reference import HOSTNQN, secret_text, transformed
from headrace.fabric.host import HostOptions
from headrace.fabric.identity import (
    Hash,
    HostSecret,
    Secret,
    read_host_secrets,
    secret_of_environment,
)

VALUE = bytes(range(100, 132))
TEXT = secret_text(VALUE, 1)


@pytest.mark.parametrize("size", [32, 48, 64])
@pytest.mark.parametrize("transform", [0, 1, 2, 3])
def test_the_key_for_a_name(size, transform):
    value = bytes(range(size))
    key = Secret(secret_text(value, transform)).key(HOSTNQN)
    assert key == transformed(value, transform, HOSTNQN)
    assert (key == value) == (transform == 0)


def test_a_known_answer():
    """Of a secret that other tools take, too: nvme check-dhchap-key."""
    text = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
    assert Secret(text).key(HOSTNQN).hex() == (
        "89aeb31a874eaf84841b46736b0dfdf2ba58d30aa2a545a3e235a3521e07594c"
    )


def broken(text, at):
    return text[:at] + ("B" if text[at] == "A" else "A") + text[at + 1 :]


WRONG = {
    "empty": "",
    "version": TEXT.replace("DHHC-1", "DHHC-2"),
    "no end": TEXT[:-1],
    "a field more": TEXT + "x",
    "transform": TEXT.replace(":01:", ":04:"),
    "transform with a sign": TEXT.replace(":01:", ":+1:"),
    "no transform": TEXT.replace(":01:", "::"),
    "no base64": TEXT.replace(TEXT[20], "!"),
    "cut": TEXT[:-5] + ":",
    "31 bytes": secret_text(bytes(31), 0),
    "33 bytes": secret_text(bytes(33), 0),
    "no bytes": secret_text(b"", 0),
    "checksum": broken(TEXT, -4),
    **{f"mistyped at {at}": broken(TEXT, at) for at in range(10, 52)},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_secret_is_refused_without_a_word_of_it(name):
    with pytest.raises(ValueError) as refused:
        Secret(WRONG[name])
    shown = str(refused.value) + repr(refused.value.__cause__) + repr(refused.value.__context__)
    for at in range(0, len(WRONG[name]) - 12, 4):
        if at > 9:
            assert WRONG[name][at : at + 12] not in shown


def test_sources(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("MY_SECRET", TEXT)
    for source in (Secret(TEXT), TEXT, f"file:{path}", path, "env:MY_SECRET", f" {TEXT}\n"):
        assert Secret.read(source) == Secret(TEXT)
        assert HostOptions(dhchap_secret=source).dhchap_secret == Secret(TEXT)


def test_sources_that_have_none(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(TEXT[:-6] + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("MY_SECRET", TEXT[:-6])
    monkeypatch.delenv("NO_SECRET", raising=False)
    for source, told in (
        (path, str(path)), (tmp_path / "missing", "No such file"), ("env:MY_SECRET", "MY_SECRET"),
        ("env:NO_SECRET", "NO_SECRET"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told) as refused:
            Secret.read(source)
        assert TEXT[10:20] not in repr(refused.getrepr(showlocals=False))


def test_the_environment_is_the_default(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(0o600)
    other = secret_text(bytes(32), 2)
    monkeypatch.setenv("HEADRACE_DHCHAP_SECRET_FILE", str(path))
    monkeypatch.setenv("HEADRACE_DHCHAP_CONTROLLER_SECRET", other)
    options = HostOptions()
    assert options.dhchap_secret == Secret(TEXT)
    assert options.dhchap_controller_secret == Secret(other)
    monkeypatch.setenv("HEADRACE_DHCHAP_SECRET", secret_text(bytes(48), 0))
    assert HostOptions().dhchap_secret == Secret(secret_text(bytes(48), 0))
    assert HostOptions(dhchap_secret=None, dhchap_controller_secret=None).dhchap_secret is None
    assert secret_of_environment("HEADRACE_NOTHING") is None


def test_one_secret_for_both_directions_is_refused():
    with pytest.raises(ValueError, match="expected two"):
        HostSecret.read(TEXT, TEXT)
    with pytest.raises(ValueError, match="expected two"):
        HostOptions(dhchap_secret=TEXT, dhchap_controller_secret=TEXT)
    with pytest.raises(ValueError, match="dhchap_secret is not"):
        HostOptions(dhchap_secret=None, dhchap_controller_secret=TEXT)


def test_a_file_of_hosts(tmp_path, caplog):
    other = secret_text(bytes(48), 2)
    path = tmp_path / "hosts"
    path.write_text(f"# two\n{HOSTNQN} {TEXT} {other}\n\n{HOSTNQN}-b\t{other}\n{HOSTNQN}-c\n")
    path.chmod(0o600)
    hosts = read_host_secrets(path)
    assert hosts == {
        HOSTNQN: HostSecret.read(TEXT, other),
        f"{HOSTNQN}-b": HostSecret.read(other),
        f"{HOSTNQN}-c": None,
    }
    assert not caplog.records
    path.chmod(0o640)
    read_host_secrets(path)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    "line",
    [TEXT, f"{HOSTNQN} {TEXT[:-3]}", f"{HOSTNQN} {TEXT} {TEXT} {TEXT}", f"{HOSTNQN}\n{HOSTNQN}"],
    ids=["no name", "cut", "three", "twice"],
)
def test_a_wrong_line_is_named_by_its_number_alone(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"# hosts\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"line [23]") as refused:
        read_host_secrets(path)
    assert TEXT[10:20] not in repr(refused.value)


@pytest.mark.parametrize("transform", [None, *Hash])
def test_a_generated_secret_is_one_that_others_take(transform):
    secret, text = Secret.generate(transform)
    assert Secret(text) == secret
    assert Secret.generate(transform)[0] != secret
    tool = shutil.which("nvme") or shutil.which("/usr/sbin/nvme")
    if tool is not None:  # nvme-cli, where it is: an independent check of form and checksum
        subprocess.run([tool, "check-dhchap-key", "--key", text], check=True, capture_output=True)


def test_a_secret_has_no_face(caplog):
    secret, text = Secret.generate()
    known = HostSecret.read(text)
    options = HostOptions(dhchap_secret=text)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("headrace").debug("%s %r %s", secret, known, options)
    shown = (
        caplog.text
        + f"{secret} {secret!r} {known} {options!r} {vars(sys.modules['headrace.fabric.identity'])}"
    )
    assert "not shown" in shown
    assert text[10:30] not in shown
    assert repr(secret.key("")) not in shown
    assert not hasattr(secret, "__dict__")
    assert (
        pickle.loads(pickle.dumps(options)) == options
    )  # engines are made anew in other processes
