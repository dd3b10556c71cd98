"""DLFS's weaknesses turned round: each test bears the number of the requirement it holds (D1 to D11).

D7 and D9 (unmodified programs, jobs that share a cache) belong to the node plane, D8 to the fabric.
"""

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.order import Shuffled
from tests_shared import opened_to_others

SAMPLES = 2000


def content(index: int) -> bytes:
    return index.to_bytes(8, "little") * (1 + index % 300)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("dlfs") / "store.hr"
    hr.pack(((f"{i:06d}", content(i), i % 10) for i in range(SAMPLES)), path)
    return path


def read_all(path: Path, seed: int) -> int:
    count = 0
    with hr.open(path) as store:
        for batch in hr.loader(store, 100, seed=seed):
            for i, index in enumerate(batch.indices):
                assert bytes(batch[i]) == content(int(index))
                count += 1
    return count


def run(code: str, *arguments: object, **options) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_d1_the_fast_path_runs_without_privileges(store_path, tmp_path):
    """As nobody, without capabilities, with little locked memory: io_uring and direct reads work."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody; the other tests run without privileges already")
    copy = Path(shutil.copytree(store_path, tmp_path / "store.hr"))
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)

    def read_as_nobody() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgid(65534)
        os.setuid(65534)
        capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
        assert int(capabilities, 16) == 0
        loader = hr.loader(store, 100, direct="always")
        assert sum(len(batch) for batch in loader) == SAMPLES
        assert loader.stats.direct_reads > 0

    # The interpreter may lie where nobody may look: everything is imported before.
    read_all(copy, 0)
    store = hr.open(copy)
    with opened_to_others(copy):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                read_as_nobody()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_d2_an_idle_plane_hardly_wakes(store_path):
    """Counted, not timed: a second of idling, of all threads of a process."""
    out = run(
        """
        import sys, time
        from pathlib import Path
        import headrace as hr

        def wakes():
            counts = {}
            for each in Path("/proc/self/task").glob("*/status"):
                lines = each.read_text().splitlines()
                (counts[each],) = (int(line.split()[1]) for line in lines if line.startswith("voluntary"))
            return counts

        with hr.open(sys.argv[1]) as store:
            iterator = iter(hr.loader(store, 100))
            next(iterator)
            time.sleep(0.5)  # what is read ahead settles
            before = wakes()
            time.sleep(1.0)
            after = wakes()
            print(max(after[each] - before.get(each, 0) for each in after), len(before))
            next(iterator)
        """,
        store_path,
    )
    wakes, threads = map(int, out.split())
    assert threads > 1  # somebody could poll
    assert wakes < 200  # who polls each millisecond wakes a thousand times


def test_d3_reopening_reads_the_same_few_pages_whatever_the_size(tmp_path):
    """Counted, not timed: page faults on opening a directory 50 times as long are as many."""
    faults = {}
    for samples in (2_000, 100_000):
        path = tmp_path / f"{samples}.hr"
        hr.pack(((f"{i:08d}", b"x", 0) for i in range(samples)), path)
        out = run(
            """
            import resource, sys
            import headrace as hr
            with hr.open(sys.argv[1]): pass
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                with hr.open(sys.argv[1]): pass
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            """,
            path,
        )
        faults[samples] = int(out)
    assert faults[100_000] < 2 * faults[2_000] + 100


def test_d4_processes_share_one_copy_of_the_directory(store_path):
    """The mapped directory has no private pages, so any number of processes hold it once."""
    with hr.open(store_path) as store:
        store.find_many(list(store.names))
        assert store.labels is not None
        blocks = Path("/proc/self/smaps").read_text().split("\n")
        private = found = 0
        inside = False
        for line in blocks:
            if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
                inside = line.endswith(".hrd")
                found += inside
            elif inside and line.startswith("Private_Dirty:"):
                private += int(line.split()[1])
        assert found >= 1
        assert private == 0


def test_d5_two_names_never_share_an_entry(tmp_path):
    """Names are compared whole: near-twins, prefixes of each other and binary ones are all found."""
    names = [b"a" * i for i in range(1, 60)]
    names += [b"twin-%d" % i for i in range(3000)] + [b"\xff\xfe%d" % i for i in range(50)]
    hr.pack(((name, name, 0) for name in names), tmp_path / "s.hr")
    with hr.open(tmp_path / "s.hr") as store:
        for name, index in zip(names, store.find_many(names), strict=True):
            assert bytes(store.read(int(index))) == name
        assert (store.find_many([n + b"?" for n in names]) == -1).all()


def test_d6_a_sample_of_many_gigabytes_is_legal_and_read_in_ranges(tmp_path):
    (tmp_path / "data").mkdir()
    size = 6 << 30
    with (tmp_path / "data" / "huge.bin").open("wb") as file:  # sparse: no disk is used
        file.truncate(size)
        file.seek(size - 1000)
        file.write(b"the end".ljust(1000, b"."))
    hr.index(tmp_path / "data", tmp_path / "huge.hr", checksum=False)
    with hr.open(tmp_path / "huge.hr") as store:
        assert store.nbytes == size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert bytes(store.read(0, start=size - 1000, size=7)) == b"the end"
        assert bytes(store.read("huge.bin", start=size - 3)) == b"..."
        assert bytes(store.read(0, start=size + 5, size=7)) == b""
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kb < 64 << 10


def test_d10_the_default_order_is_an_exact_permutation_and_a_pure_function(store_path):
    with hr.open(store_path) as store:
        loader = hr.loader(store, 64, seed=11)
        assert isinstance(loader.order, Shuffled)
        seen = np.concatenate([batch.indices for batch in loader])
    assert sorted(seen.tolist()) == list(range(SAMPLES))
    assert (Shuffled(SAMPLES, seed=11).indices(0, 0, SAMPLES) == seen).all()
    with hr.open(store_path) as store:
        relaxed = hr.loader(store, 64, order="blocked").order
        assert 0 < relaxed.randomness().entropy_share <= 1


def test_d11_any_number_of_processes_read_at_once(store_path):
    with multiprocessing.get_context("spawn").Pool(6) as pool:
        counts = pool.starmap(read_all, [(store_path, seed) for seed in range(12)])
    assert counts == [SAMPLES] * 12
