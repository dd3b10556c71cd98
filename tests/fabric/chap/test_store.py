"""A store on a target that authenticates: opened with a secret from the environment or an option."""

import os
import pickle
import subprocess
import sys

import pytest

import headrace as hr
from fabric.chap import reference
from fabric.conftest import NQN
from headrace.cli.options import storage_options
from headrace.errors import AuthenticationFailed
from headrace.fabric.identity import HostIdentity, HostSecret
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target
from headrace.job.server import StageOptions
from headrace.posix.mount.process import MountOptions

A, B, C = (reference.secret_text(bytes(range(at, at + 48)), 2) for at in (3, 70, 130))
QUICK = {"timeout_s": 10, "deadline_s": 10}


@pytest.fixture
def url(packed_photos):
    subsystem = Subsystem(NQN, {HostIdentity.of_machine().nqn: HostSecret.read(A, B)})
    namespace = subsystem.add_store(packed_photos)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        yield f"nvme+tcp://127.0.0.1:{target.address[1]}/{NQN}?ns={namespace.nsid}"
    subsystem.close()


def test_a_secret_of_the_environment(url, packed_photos, monkeypatch, tmp_path):
    path = tmp_path / "controller"
    path.write_text(B)
    path.chmod(0o600)
    monkeypatch.setenv("HEADRACE_DHCHAP_SECRET", A)
    monkeypatch.setenv("HEADRACE_DHCHAP_CONTROLLER_SECRET_FILE", str(path))
    with hr.open(url, storage_options=QUICK) as store, hr.open(packed_photos) as local:
        assert len(store) == len(local)
        assert store.read(5) == local.read(5)


def test_a_pickled_store_finds_its_secret_in_the_environment_of_its_process(url):
    """What is pickled may lie on a disk: the secret's place is in it, not the secret."""
    with_secret = os.environ | {"MY_SECRET": A}
    program = (
        "import headrace as hr, pickle, sys\n"
        f"store = hr.open({url!r}, storage_options={{'dhchap_secret': 'env:MY_SECRET', **{QUICK}}})\n"
        "sys.stdout.buffer.write(pickle.dumps(store))\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], env=with_secret, check=False, capture_output=True
    )
    assert made.returncode == 0, made.stderr.decode()
    assert A[10:30].encode() not in made.stdout
    program = (
        "import pickle, sys\nstore = pickle.load(sys.stdin.buffer)\nprint(len(store.read(0)))\n"
    )
    for environment, code in ((with_secret, 0), (os.environ, 1)):
        opened = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            input=made.stdout,
            check=False,
            capture_output=True,
        )
        assert opened.returncode == code, opened.stderr.decode()
        assert A[10:30].encode() not in opened.stderr


@pytest.mark.parametrize(
    "given", [{}, {"dhchap_secret": C}, {"dhchap_secret": A, "dhchap_controller_secret": C}]
)
def test_who_is_refused(url, given):
    with pytest.raises(AuthenticationFailed) as refused:
        hr.open(url, storage_options=QUICK | given)
    assert C[10:30] not in str(refused.value)
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args


def test_a_secret_on_the_command_line_is_refused():
    with pytest.raises(ValueError, match="file:PATH") as refused:
        storage_options([f"dhchap_secret={A}"])
    assert A[10:30] not in str(refused.value)
    assert storage_options(["dhchap_secret=env:MINE"]) == {"dhchap_secret": "env:MINE"}


@pytest.mark.parametrize("options", [MountOptions, StageOptions])
def test_options_that_carry_options_do_not_show_them(options):
    assert "DHHC" not in repr(options(storage_options={"dhchap_secret": A}))
