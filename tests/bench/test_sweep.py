"""Sweeps: the search alone, and over a simulated storage."""

import os

import pytest

from headrace.bench.compare import condition_of
from headrace.bench.run import SessionOptions
from headrace.bench.session import Probe, Sweep, most_before, run_session, sweep
from headrace.cli.bench import _print_sweep
from headrace.cli.printing import Output
from headrace.errors import BenchError, WorkloadError
from headrace.io.simulation import Simulation

CPUS = os.cpu_count()


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("greatest", [3, 7, 64])
def test_the_search_finds_the_last_that_is_fed(least, greatest):
    for fed in range(least - 1, greatest + 1):
        asked = []

        def over(at, fed=fed, asked=asked):
            asked.append(at)
            return at > fed

        assert most_before(over, least, greatest) == (fed if fed >= least else None)
        assert len(asked) == len(set(asked)) <= 12
        assert max(asked) <= max(least, 2 * fed)
        assert set(asked) <= set(range(least, greatest + 1))


WORDS = [
    "workload=unet3d_h100", "++workload.dataset.num_files_train=40",
    "++workload.dataset.record_length_bytes=4096", "++workload.dataset.record_length_bytes_stdev=0",
    "++workload.reader.batch_size=1", "++workload.reader.read_threads=2",
    "++workload.train.epochs=1", "++workload.train.computation_time=0.02",
    "++workload.workflow.checkpoint=False", "++workload.workflow.generate_data=True",
]  # fmt: skip


@pytest.fixture
def words(tmp_path):
    return [*WORDS, f"++workload.dataset.data_folder={tmp_path / 'data'}",
            f"++hydra.run.dir={tmp_path / 'out'}"]  # fmt: skip


def test_a_thin_storage_feeds_few(words, tmp_path):
    """One accelerator asks for about 205 kB/s; the link has 700 kB/s: 8 are too many, 1 is not."""
    thin = Simulation(name="thin", bandwidth_bytes_per_s=700e3)
    reported = []
    result = sweep(words, (1, 8), condition_of("au<0.7", changes=False),
                  SessionOptions(simulate=thin), reported.append)  # fmt: skip
    assert result.most is not None
    assert 1 <= result.most < 8
    assert sorted(p.accelerators for p in reported) == [p.accelerators for p in result.probes]
    assert [p.over for p in result.probes] == [p.accelerators > result.most for p in result.probes]
    assert all(
        (tmp_path / f"out/{p.accelerators:04d}-accelerators/summary.json").exists()
        for p in reported
    )


def test_of_repeats_a_sweep_names_the_bound_that_their_report_names_first(words, monkeypatch):
    """Not that of their mean, which may be the bound of none."""
    each = [{"bound": b, "bound_reason": f"{b} it was"} for b in ("harness", "storage", "storage")]

    def run_of_three(*given):
        report = run_session(*given)
        report.summary["headrace"] |= {"bound": "processors", "bound_of_repeats": each}
        return report

    monkeypatch.setattr("headrace.bench.session.run_session", run_of_three)
    result = sweep(words, (1, 1), condition_of("au>0", changes=False), SessionOptions())
    assert (result.limit, result.first_over.bound_reason) == ("storage", "storage it was")


def probe(accelerators, over, bound="storage", **more):
    return Probe(accelerators=accelerators, value=80.0 if over else 95.0, over=over, bound=bound,
                 bound_reason="so", folder="x", measures={}, **more)  # fmt: skip


@pytest.mark.parametrize(
    ("most", "probes", "message", "limit"),
    [
        (4, [probe(4, False)], "this storage feeds at least 4 accelerators", "none"),
        (4, [probe(4, False, page_cache_share=0.9)],
         "the page cache feeds at least 4 accelerators: this says nothing of the storage", "none"),
        (1, [probe(1, False), probe(2, True, "page cache", page_cache_share=0.9)],
         "the page cache feeds 1 accelerator: this says nothing of the storage", "page cache"),
        (1, [probe(1, False), probe(2, True)], "this storage feeds 1 accelerator", "storage"),
        (None, [probe(1, True)], "this storage feeds not even 1 accelerator", "storage"),
        (1, [probe(1, False), probe(2, True, "harness")],
         f"this storage feeds at least 1 accelerator; 2 could not be tried on this host: its {CPUS} ",
         "harness"),
        (None, [probe(1, True, "harness")],
         "nothing is known of this storage; 1 could not be tried on this host: its ", "harness"),
        (1, [probe(1, False), probe(2, True, "processors")],
         f"this storage feeds at least 1 accelerator; 2 could not be tried on this host: its {CPUS} ",
         "processors"),
        (1, [probe(1, False, page_cache_share=0.9), probe(2, True, "compute", page_cache_share=0.9)],
         ("the page cache feeds at least 1 accelerator: this says nothing of the storage; 2 could not be "
          "tried on this host: they did not wait for data"), "compute"),
    ],
)  # fmt: skip
def test_the_answer_says_what_was_the_limit(most, probes, message, limit):
    result = Sweep(most, tuple(probes), (1, 4))
    assert result.limit == limit
    assert result.answer.startswith(message)
    assert result.answer == message or limit in ("harness", "compute", "processors")


def test_where_this_host_is_the_limit_it_is_told_what_an_accelerator_reads(
    words, tmp_path, monkeypatch
):
    def busy(*given):
        report = run_session(*given)
        report.summary["headrace"] |= {"bound": "processors", "bound_reason": "busy"}
        return report

    monkeypatch.setattr("headrace.bench.session.run_session", busy)
    more = ["++workload.reader.batch_size=2", "++workload.train.computation_time=0.001"]
    result = sweep([*words, *more], (1, 1), condition_of("au>0", changes=False), SessionOptions())
    assert result.answer.startswith("nothing is known of ")
    measure = f"headrace bench storage {tmp_path / 'data'}"
    told = f". An accelerator that is fed reads 8.19 MB/s: {measure} says what the mount gives"
    assert result.answer.endswith(told)


@pytest.mark.parametrize(
    ("more", "numbers", "error", "message"),
    [([], (1, 100), WorkloadError, "are 0 steps of 100 accelerators"),
     ([], (1, 11), WorkloadError, "11 accelerators have 3 steps an epoch, of which 2 count"),
     (["++workload.workflow.train=False"], (1, 2), WorkloadError, "does not train"),
     ([], (1, 2), BenchError, "cannot be told: the run has no eval_au")],
)  # fmt: skip
def test_what_cannot_be_swept(words, more, numbers, error, message):
    with pytest.raises(error, match=message):
        sweep(
            [*words, *more], numbers, condition_of("eval_au<0.7", changes=False), SessionOptions()
        )


def test_ranks_do_not_sweep(words, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BenchError, match="outside of torchrun"):
        sweep(words, (1, 2), condition_of("au<0.7", changes=False), SessionOptions())


def test_a_second_epoch_from_the_page_cache_is_told(capsys):
    condition = condition_of("au<0.9", changes=False)
    result = Sweep(1, (probe(1, False, page_cache_share=0.49),), (1, 1))
    for cold in (True, False):
        _print_sweep(Output(), result, condition, SessionOptions(cold=cold))
        text = capsys.readouterr().out
        assert "49%" in text
        assert ("later ones find what that left" in text) is cold
