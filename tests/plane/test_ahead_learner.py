"""What is learned by watching opens, how it is kept, and how processes share it."""

import io
import os
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions, SharedLog
from headrace.plane.read_ahead.opens import OpensWatch
from headrace.plane.read_ahead.sample_files import LearnedFiles, guess_paths
from plane.ahead_files import Hidden, Listed, content, make_files, serve

COUNT = 100
PLAIN = ReadAheadOptions(bypass=False)


@pytest.fixture
def paths(tmp_path):
    return make_files(tmp_path / "files", COUNT)


def test_the_second_epoch_of_an_unknown_dataset_is_read_ahead_exactly(paths):
    dataset = Hidden(paths)
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        serve(ahead, dataset, range(COUNT))
        assert ahead.figures.planned == 0
        order = list(range(COUNT))[::-1]
        assert serve(ahead, dataset, order) == [content(i) for i in order]
        assert (ahead.figures.planned, ahead.figures.served) == (COUNT, COUNT)


def test_samples_of_several_files_are_learned_beside_a_guess_that_names_one(paths):
    class Pairs(Listed):
        def __getitem__(self, index):
            return super().__getitem__(index) + Path(self._where[(index - 1) % COUNT]).read_bytes()

    dataset = Pairs(paths)
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        serve(ahead, dataset, range(COUNT))
        assert ahead.figures.unplanned == COUNT
        before = ahead.figures.served
        serve(ahead, dataset, range(COUNT))
        assert ahead.figures.served - before == 2 * COUNT


def test_a_file_of_many_samples_is_not_read_ahead_as_a_whole(paths):
    class Shard(Hidden):
        def __getitem__(self, index):
            with open(self._where[0], "rb") as file:
                file.seek(index)
                return file.read(1) + super().__getitem__(index)

    dataset = Shard(paths)
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        for _ in range(2):
            serve(ahead, dataset, range(1, COUNT))
        assert ahead.figures.planned == ahead.figures.served == COUNT - 1


def test_a_sample_that_opens_other_files_each_time_is_left_alone(paths):
    class Random(Hidden):
        calls = 0

        def __getitem__(self, index):
            self.calls += 1
            return super().__getitem__((index + self.calls * 7) % COUNT)

    dataset = Random(paths)
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        for _ in range(6):
            serve(ahead, dataset, range(10))
        assert ahead.figures.skipped > 0
        planned = ahead.figures.planned
        serve(ahead, dataset, range(10))
        assert ahead.figures.planned == planned


def test_a_dataset_that_opens_nothing_is_soon_not_watched(paths):
    dataset = list(range(1000))
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        serve(ahead, dataset, range(300), ready=False)
        assert not ahead._files.watching
        assert "opened no files" in ahead.why_off
        assert not ahead._reader.working


def test_a_watch_sees_its_own_thread_and_reads_only(paths, tmp_path):
    import threading

    watch = OpensWatch()
    watch.begin()
    Path(paths[0]).read_bytes()
    Path(paths[0]).read_bytes()
    open(os.fsencode(paths[1])).close()
    (tmp_path / "written").write_bytes(b"x")
    os.close(os.open(paths[2], os.O_RDONLY))
    with pytest.raises(FileNotFoundError):
        open(tmp_path / "missing")
    other = threading.Thread(target=Path(paths[3]).read_bytes)
    other.start()
    other.join()
    assert watch.end() == [paths[0], paths[1], str(tmp_path / "missing")]
    Path(paths[4]).read_bytes()
    assert len(watch.paths) == 3


def test_open_is_its_own_again_when_the_last_watch_is_over(paths):
    outer, inner = OpensWatch(), OpensWatch()
    outer.begin()
    inner.begin()
    open(paths[0]).close()
    assert inner.end() == [paths[0]]
    assert open is not real_open
    open(paths[1]).close()
    assert outer.end() == [paths[1]]
    assert open is real_open
    assert io.open is real_open


names = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name),
    max_size=4,
    unique=True,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 30), names), max_size=30))
def test_knowledge_is_a_dict_that_survives_its_journey(learned):
    """Also with names that are no UTF-8; two changes are followed, then a sample is left alone."""
    knowledge, other = LearnedFiles(20), LearnedFiles(20)
    expected: dict[int, tuple[str, ...]] = {}
    changes: dict[int, int] = {}
    marks = []
    for index, raw in learned:
        paths = tuple(map(os.fsdecode, raw))
        knowledge.learn(index, paths)
        if not 0 <= index < 20:
            continue
        if expected.get(index, paths) != paths:
            changes[index] = changes.get(index, 0) + 1
        expected[index] = paths
        marks.append(knowledge.known)
    shared = knowledge._shared
    other.teach(knowledge.learned_since(0)[0])
    for index, paths in expected.items():
        if changes.get(index, 0) >= 3:
            assert knowledge.paths(index) == ()
            continue
        assert knowledge.paths(index) == tuple(p for p in paths if p not in shared)
        if not shared:
            assert other.paths(index) == paths
            assert other.knows(index)
    assert knowledge.learned_since(knowledge.known)[0] == b""


def test_knowledge_takes_few_bytes_a_sample_and_keeps_its_budget():
    knowledge = LearnedFiles(20_000)
    empty = knowledge.nbytes
    for i in range(20_000):
        knowledge.learn(i, [f"/data/train/n{i % 1000:08d}/n{i % 1000:08d}_{i:05d}.JPEG"])
    assert (knowledge.nbytes - empty - len(knowledge._sketch)) / 20_000 < 70
    small = LearnedFiles(20_000, budget_bytes=5 << 20)
    for i in range(20_000):
        small.learn(i, [f"/data/{i}" * 20])
    assert 0 < small.known < 20_000
    assert small.nbytes < 6 << 20


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-3], lambda d: b"x" + d, lambda d: d[:9] + b"~" + d[10:]]
)
def test_a_damaged_delta_is_refused(damage):
    knowledge = LearnedFiles(10)
    knowledge.learn(3, ["/some/where"])
    with pytest.raises(ValueError, match=r"damaged|cut short"):
        LearnedFiles(10).teach(damage(knowledge.learned_since(0)[0]))


def work(worker: int, paths: list[str], log: SharedLog, status) -> None:
    """One epoch of one worker: it serves its share of samples."""
    dataset = Hidden(paths)
    ahead = ReadAhead.for_dataset(dataset, PLAIN, log=log)
    serve(ahead, dataset, range(worker, COUNT, 4), ready=False)
    ahead.close()
    status.put(worker)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_the_second_epoch_know_what_all_workers_of_the_first_learned(paths, method):
    context = get_context(method)
    log = SharedLog()
    status = context.Queue()
    workers = [
        context.Process(target=work, args=(worker, paths, log, status))
        for worker in range(4 if method == "fork" else 1)
    ]
    for worker in workers:
        worker.start()
    done = {status.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    dataset = Hidden(paths)
    with ReadAhead.for_dataset(dataset, PLAIN, log=log) as ahead:
        ahead.sync()
        known = [i for i in range(COUNT) if i % 4 in done]
        serve(ahead, dataset, known)
        assert ahead.figures.served == len(known)


def test_a_record_cut_short_by_a_kill_hides_no_other():
    log = SharedLog()
    knowledge = LearnedFiles(10)
    knowledge.learn(1, ["/one"])
    delta = knowledge.learned_since(0)[0]
    child = os.fork()
    if child == 0:
        log.append(delta)
        record = os.pread(log._fd, 1000, 0)
        os.write(log._fd, record[:-5])  # as if killed in the middle
        log.append(delta)
        os._exit(0)
    os.waitpid(child, 0)
    deltas, mark = log.read_since(0)
    assert deltas == [delta, delta]
    assert log.read_since(mark) == ([], mark)
    assert SharedLog(limit_bytes=10).append(delta) is False


class Wrapper:
    def __init__(self, dataset, indices=None):
        self.dataset = dataset
        if indices is not None:
            self.indices = indices

    def __len__(self):
        return len(self.indices) if hasattr(self, "indices") else len(self.dataset)


def test_paths_are_found_in_lists_subsets_concatenations_and_wrappers(paths, tmp_path):
    listed = Listed(paths)
    assert guess_paths(listed)(5) == (paths[5],)
    assert guess_paths(Wrapper(Wrapper(listed)))(5) == (paths[5],)
    assert guess_paths(Wrapper(listed, [9, 4]))(1) == (paths[4],)

    class Concatenation:
        datasets = (listed, Hidden(paths), Wrapper(listed, [1]))
        cumulative_sizes = (COUNT, 2 * COUNT, 2 * COUNT + 1)

        def __len__(self):
            return 2 * COUNT + 1

    both = guess_paths(Concatenation())
    assert [both(i) for i in (3, COUNT + 3, 2 * COUNT, -1)] == [
        (paths[3],), (), (paths[1],), (paths[1],),
    ]  # fmt: skip

    class Rooted:
        root = tmp_path / "files"
        filenames = tuple(os.path.basename(path) for path in paths)

        def __len__(self):
            return COUNT

    assert guess_paths(Rooted())(7) == (paths[7],)


class ByFunction:
    """Its paths lie in what its functions hold, or in a list of any name."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def __len__(self):
        return COUNT


def test_paths_are_found_in_lists_of_any_name_and_in_closures(paths):
    class Local(ByFunction):
        def __getitem__(self, index):
            return paths[index]

    class Early(ByFunction):
        def __getitem__(self, index):
            return later[index]

    assert guess_paths(Early()) is None  # there is nothing in the cell yet
    later = [(path, 3) for path in paths]
    for dataset in (Local(), Early(), ByFunction(a=later), ByFunction(a=lambda i: later[i]),
                    ByFunction(bound=Local().__getitem__)):  # fmt: skip
        assert guess_paths(dataset)(7) == (paths[7],)


def test_lists_that_are_no_paths_are_no_guess(paths):
    class Odd:
        samples = tuple((i, 0) for i in range(3))
        files = ("nothing", "of", "this")
        paths = property(lambda _self: 1 / 0)

        def __len__(self):
            return 3

    cycle = Wrapper([])
    cycle.dataset = cycle
    cycle.indices = [0]
    assert guess_paths(Odd()) is None
    assert guess_paths(cycle) is None
    assert guess_paths(object()) is None
