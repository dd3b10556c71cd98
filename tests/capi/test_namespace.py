"""A store on an NVMe/TCP namespace from C: the same order and bytes; what a target does is answered."""

import contextlib
import socket
import threading

import pytest

import headrace as hr
from capi.library import Failed, mount_options
from capi.test_local import python_epoch
from headrace.base.checksum import crc32c
from headrace.fabric.identity import HostIdentity
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target

NQN = "nqn.2026-11.io.example:photos"


@contextlib.contextmanager
def exported(add, address=("127.0.0.1", 0)):
    """The URL of what `add` exports, and its target."""
    subsystem = Subsystem(NQN)
    add(subsystem)
    try:
        with Target([subsystem], address) as target:
            host, port = target.address
            yield f"nvme+tcp://{host}:{port}/{NQN}?ns=1", target
    finally:
        subsystem.close()


@pytest.fixture
def url(packed_photos):
    with exported(lambda s: s.add_store(packed_photos)) as (found, _):
        yield found


def lines_of(found):
    return [(index, label, len(data), crc32c(data)) for index, label, data in found]


def test_the_example_reads_what_python_reads(read_epoch, packed_photos, url):
    lines, _ = read_epoch(url, "-s", "5", "-b", "7")
    with hr.open(packed_photos) as store:
        assert [line[2:] for line in lines] == lines_of(python_epoch(store, 7, 5))


def test_an_image_of_a_store(read_epoch, packed_photos, tmp_path):
    from headrace.fabric.image import write_image

    image = tmp_path / "photos.img"
    write_image(packed_photos, image)
    with exported(lambda s: s.add(image)) as (url, _), hr.open(packed_photos) as store:
        lines, _ = read_epoch(url, "-b", "5")
        assert [line[2:] for line in lines] == lines_of(python_epoch(store, 5, 0))


@pytest.mark.parametrize("no_digests", [0, 1])
def test_single_samples_and_digests(library, packed_photos, url, no_digests):
    mount = library.mount(url, mount_options(no_digests=no_digests, queues=3))
    with hr.open(packed_photos) as store:
        for index in (0, len(store) - 1):
            sample = library.open(mount, store.names[index].encode())
            assert library.read(sample, 0, 1 << 20) == bytes(store.read(index))
            library.call("hr_close", sample)
    library.call("hr_unmount", mount)


def test_this_machine_is_the_same_host_in_c_and_in_python(library, packed_photos):
    subsystem = Subsystem(NQN, hosts=[HostIdentity.of_machine().nqn])
    subsystem.add_store(packed_photos)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        url = f"nvme+tcp://127.0.0.1:{target.address[1]}/{NQN}?ns=1"
        library.call("hr_unmount", library.mount(url))
        with pytest.raises(Failed, match=r"HR_ERR_FABRIC: .*connect invalid host") as refused:
            library.mount(url, mount_options(host_nqn=b"nqn.2026-11.io.example:stranger"))
        assert "stranger" in refused.value.message
    subsystem.close()


def test_a_target_that_comes_back_is_read_again(library, packed_photos):
    add = lambda s: s.add_store(packed_photos)  # noqa: E731
    with exported(add) as (url, target):
        mount = library.mount(url, mount_options(give_up_s=30.0))
        port = target.address[1]
    sequence = library.sequence(mount, 1)
    with exported(add, ("127.0.0.1", port)), hr.open(packed_photos) as store:
        found = [(i, label, data) for i, label, [data] in library.epoch(sequence, 6)]
        assert found == python_epoch(store, 6, 1)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_a_target_that_stays_away_is_an_error(library, packed_photos):
    with exported(lambda s: s.add_store(packed_photos)) as (url, _):
        mount = library.mount(url, mount_options(give_up_s=0.5, timeout_s=20.0))
    sequence = library.sequence(mount, 1)
    with pytest.raises(Failed, match=r"HR_ERR_(FABRIC|TIMEOUT)"):
        library.batch(sequence, 6)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


@pytest.mark.parametrize(
    ("url", "name", "words"),
    [
        ("nvme+tcp://127.0.0.1:1/" + NQN, "HR_ERR_FABRIC", "Is the target running"),
        ("nvme+tcp://127.0.0.1:4420/none", "HR_ERR_ARGUMENT", "is no namespace"),
        ("nvme+tcp://:4420/" + NQN, "HR_ERR_ARGUMENT", "is no namespace"),
        ("nvme+tcp://127.0.0.1:0/" + NQN, "HR_ERR_ARGUMENT", "is no namespace"),
        ("nvme+tcp://127.0.0.1:1/" + NQN + "?ns=0", "HR_ERR_ARGUMENT", "is no namespace"),
        ("nvme+tcp://127.0.0.1:1/" + NQN + "?ns=1#1", "HR_ERR_ARGUMENT", "is no namespace"),
        ("nvme+tcp://127.0.0.1:1/" + NQN + "?ns=1#1+2", "HR_ERR_ARGUMENT", "begins where"),
    ],
)
def test_urls_that_lead_nowhere(library, url, name, words):
    with pytest.raises(Failed, match=words) as refused:
        library.mount(url)
    assert refused.value.name == name


def test_what_is_no_store(library, tmp_path, url):
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 16))
    with exported(lambda s: s.add(path)) as (empty, _):
        with pytest.raises(Failed, match=r"HR_ERR_CORRUPT_STORE: .*no store lies here"):
            library.mount(empty)
        with pytest.raises(Failed, match=r"HR_ERR_FABRIC: .*no such namespace"):
            library.mount(empty.replace("ns=1", "ns=9"))
    with pytest.raises(Failed, match=r"HR_ERR_FABRIC: .*connect invalid parameters"):
        library.mount(url.replace("photos", "others"))


def serve(answer):
    """A peer that answers the first bytes with `answer` and closes, or is silent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                connection.recv(1024)

    thread = threading.Thread(target=run)
    thread.start()

    def stop():
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    return listener.getsockname()[1], stop


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "broke the protocol"),
        (bytes([1, 0, 128, 0, 128, 0, 0, 0, 7]) + bytes(119), "broke the protocol"),
        (bytes([3, 0, 24, 0, 24, 0, 0, 0, 2]) + bytes(15), "ended the connection"),
        (None, "was not answered in time"),
    ],
)
def test_peers_that_do_not_speak_the_protocol(library, answer, words):
    port, stop = serve(answer)
    timeout_s = 0.5 if answer is None else 30.0
    try:
        with pytest.raises(Failed, match=rf"HR_ERR_FABRIC: .*{words}"):
            library.mount(f"nvme+tcp://127.0.0.1:{port}/{NQN}", mount_options(timeout_s=timeout_s))
    finally:
        stop()
