"""What is concluded: causes, a verdict, and advice with evidence, gain and a command. No machine is asked."""

import json
import shlex

import pytest

from headrace.base.causes import Cause
from headrace.base.text import rough_text
from headrace.insight.doctor import diagnose, lines_of
from headrace.insight.doctor.findings import AHEAD, LATER, NATIVE, TORCH, UNCACHED, Findings

from .findings_shared import findings, point

SLOW_OPENS = {"opens": {"one_per_s": 320.0, "many_per_s": 4000.0}}
HEAVY = {"sample_s": 20e-3}


def keys(diagnosis):
    return [advice.key for advice in diagnosis.advice]


def expected(diagnosis, loader, when=""):
    return next(e for e in diagnosis.expected if (e.loader, e.when) == (loader, when))


def test_latency_is_hidden_by_reading_ahead():
    told = diagnose(findings(), workers=8)
    assert told.cause == Cause.LATENCY
    torch, ahead = expected(told, TORCH), expected(told, AHEAD)
    assert 1000 < torch.per_s < 2500
    assert ahead.per_s > 2 * torch.per_s
    assert told.advice[0].key == "ahead"
    assert "headrace.torch import DataLoader" in told.advice[0].command
    assert "310/s" in told.advice[0].because


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (SLOW_OPENS, Cause.METADATA),
        ({"storage": {"opened": point(64, 200_000.0)}}, Cause.METADATA),
        ({"decode": HEAVY}, Cause.DECODE),
        (
            {
                "storage": {
                    "points": (point(1, 300.0), point(4, 310.0), point(16, 310.0)),
                    "opened": point(1, 310.0), "small": point(1, 5000.0),
                },
            },
            Cause.BANDWIDTH,
        ),
        ({"data": {"kind": "object"}}, Cause.NETWORK),
    ],
)  # fmt: skip
def test_the_cause_is_named(changes, cause):
    assert diagnose(findings(**changes), workers=8).cause == cause


def test_small_files_are_to_be_packed():
    points = (point(1, 310.0), point(4, 1000.0), point(16, 2000.0), point(64, 2100.0))
    told = diagnose(
        findings(storage={"points": points, "opened": point(64, 9000.0)}, **SLOW_OPENS), workers=8
    )
    pack = next(a for a in told.advice if a.key == "pack")
    assert pack.command == "headrace pack /scratch/train packed.hr"
    assert pack.factor > 2


def test_a_disk_that_seeks_is_read_in_blocks():
    points = tuple(point(d, 40.0, 20e3) for d in (1, 4, 16))
    told = diagnose(
        findings(
            data={"size_mean": 20e3}, decode=None,
            storage={"points": points, "opened": point(1, 75.0, 20e3), "small": point(1, 78.0, 4e3)},
        )
    )  # fmt: skip
    blocked = next(a for a in told.advice if a.key == "blocked")
    assert 5 < blocked.factor < 30
    compile(blocked.command, "blocked", "exec")
    assert "blocked" not in keys(diagnose(findings()))


def test_others_that_have_the_processors_are_named():
    told = diagnose(findings(cpu={"others": 60.0}, decode=HEAVY), workers=8)
    others = next(each for each in told.advice if each.key == "others")
    assert "want about 60 (a guess" in others.because
    assert others.factor > max(each.factor for each in told.advice if each is not others)
    assert told.advice[0] is not others  # so unsure a number does not come first


def test_what_is_enough_needs_nothing():
    told = diagnose(findings(), workers=8, batch=64, step_s=1.0)
    assert told.advice[0].key == "train"
    assert "keep up" in told.verdict
    assert expected(told, TORCH).stall == 0.0
    assert "ahead" not in keys(told)  # a gain beside "none" would contradict it


def test_no_worker_more_is_advised_where_others_have_the_processors():
    for others, advised in ((0.2, True), (1.6, False)):
        cpus = {"environment": {"cpus": 2.0, "cpus_machine": 2, "cpus_affinity": 2}}
        told = diagnose(findings(decode=HEAVY, cpu={"others": others}, **cpus), workers=1)
        assert ("workers" in keys(told)) is advised


def test_native_decoding_has_a_row_of_its_own():
    told = diagnose(findings(decode={**HEAVY, "native_s": 2e-3}), workers=4)
    native = expected(told, NATIVE)
    assert native.per_s > 3 * expected(told, AHEAD).per_s
    assert native.workers == 16
    assert f"-> {rough_text(native.per_s)} " in next(
        a.gain for a in told.advice if a.key == "images"
    )
    assert any(NATIVE in line for _, line in lines_of(told))
    assert NATIVE not in [each.loader for each in diagnose(findings()).expected]


def test_a_hungry_model_is_told_how_long_it_would_wait():
    told = diagnose(findings(), workers=8, batch=256, step_s=0.04)
    assert told.wanted_per_s == pytest.approx(6400.0)
    assert 0.6 < expected(told, TORCH).stall < 0.9
    assert "would wait" in told.verdict
    assert "6,400" in told.verdict


def test_without_workers_loading_and_training_take_turns():
    told = diagnose(findings(), workers=0, batch=256, step_s=0.1)
    torch = expected(told, TORCH)
    assert torch.stall == pytest.approx(2560.0 / (2560.0 + torch.per_s))
    assert "workers" in keys(told)


@pytest.mark.parametrize(
    ("environment", "key", "word", "blocking"),
    [
        ({"shm_free_bytes": 64 << 20}, "shm", "bus error", True),
        ({"nofile_soft": 256, "nofile_hard": 4096}, "nofile", "256 open files", True),
        ({"nofile_soft": 1024}, "nofile", "1,024", False),
        ({"engine": "threads", "engine_why": "io_uring is forbidden"}, "io_uring", "forbidden", False),
    ],
)  # fmt: skip
def test_what_the_machine_forbids_is_told(environment, key, word, blocking):
    told = diagnose(findings(environment=environment), workers=8)
    advice = next(a for a in told.advice if a.key == key)
    assert word in advice.because
    assert advice.blocking is blocking
    assert (told.advice[0].key == key) is blocking


def test_few_of_many_cpus():
    environment = {"cpus": 2.0, "cpus_affinity": 2, "cpus_machine": 64}
    told = diagnose(findings(environment=environment, decode=HEAVY))
    assert told.workers == 2
    assert told.advice[0].key == "cpus"
    assert "2 of the machine's 64" in told.advice[0].because


def test_native_threads_that_decode():
    heavy = {**HEAVY, "decoder": "Pillow 13", "native_s": 4e-3}
    told = diagnose(findings(decode=heavy), batch=48, workers=8)
    advice = told.advice[0]
    assert advice.key == "images"
    assert ", batch_size=48, shuffle=True," in advice.command
    assert 9 < advice.factor < 12  # five times as fast, on 16 CPUs in the place of 8
    assert "20 ms of a core an image by Pillow 13, 4 ms by headrace.Images" in advice.because
    compile(advice.command, "images", "exec")
    assert "images" not in keys(diagnose(findings(decode={**HEAVY, "native_s": 19e-3}), workers=16))
    some = {
        **HEAVY,
        "native_s": 5e-3,
        "native_samples": 500,
        "refused": 3,
        "first_refused": "it is an animation",
    }
    because = diagnose(findings(decode=some), workers=8).advice[0].because
    assert because.endswith("; 3 of 500 are left to Pillow (it is an animation)")


def test_images_that_are_too_large():
    told = diagnose(findings(decode={**HEAVY, "pixels": 12e6}), workers=16)
    assert told.advice[0].key == "smaller"
    assert "12.0 million pixels" in told.advice[0].because
    assert told.advice[0].command.endswith("--images short=256,quality=92")
    png = diagnose(findings(decode={**HEAVY, "pixels": 12e6, "format": "png"}), workers=16).advice[
        0
    ]
    assert png.command.endswith("--images decoded,short=256")  # no other way rewrites a PNG
    assert png.gain.endswith("; transparent pictures stay as they are")


def test_data_that_fit_in_memory_are_fast_later():
    told = diagnose(findings(data={"nbytes": 1e9}), workers=8)
    assert expected(told, TORCH, LATER).per_s > expected(told, TORCH).per_s


def test_data_in_memory_are_slower_from_the_disk():
    told = diagnose(findings(data={"nbytes": 1e9}, resident=1.0), workers=8)
    assert expected(told, TORCH, UNCACHED).per_s < expected(told, TORCH).per_s
    assert LATER not in {e.when for e in told.expected}


def test_few_reads_are_told_as_less_sure():
    few = tuple(point(d, r) for d, r in ((1, 10.0), (4, 40.0)))
    sure = expected(diagnose(findings()), TORCH)
    vague = expected(
        diagnose(findings(storage={"points": tuple(_with_reads(p, 3) for p in few)})), TORCH
    )
    assert vague.high_per_s / vague.per_s > sure.high_per_s / sure.per_s


def test_how_far_off_most_figures_are_is_what_was_measured():
    """38 predictions beside loaders on a quiet machine: 1.58 at the 90th percentile (benchmarks/)."""
    told = diagnose(findings(), workers=8)
    one = expected(told, TORCH)
    assert one.high_per_s / one.per_s == one.per_s / one.low_per_s == pytest.approx(1.6)
    text = " ".join(line.strip() for _, line in lines_of(told))
    assert "most are within a factor of 1.6 of what loaders really do" in text


def _with_reads(given, reads):
    from dataclasses import replace

    return replace(given, reads=reads)


@pytest.mark.parametrize(
    "missing", ["opens", "plain", "decode", "cpu", "place", "resident", "environment"]
)
def test_what_was_not_measured_is_done_without(missing):
    told = diagnose(findings(**{missing: None}))
    assert told.verdict
    assert lines_of(told)


def test_nothing_is_concluded_from_nothing():
    told = diagnose(Findings(interrupted=True))
    assert "Too little" in told.verdict
    assert told.advice == ()
    assert lines_of(told)


def test_an_examination_that_was_cut_short_says_what_is_known():
    told = diagnose(findings(storage=None, interrupted=True))
    text = "\n".join(line for _, line in lines_of(told))
    assert "interrupted after 14 s" in text
    assert "1,281,167 jpeg files" in text
    assert "Too little" in text


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"step_s": 0.0}, {"step_s": float("nan")}, {"workers": -1}, {"workers": 5000}],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        diagnose(findings(), **wrong)


EVERYTHING = findings(
    environment={
        "shm_free_bytes": 1 << 20, "nofile_soft": 128, "nofile_hard": 128, "engine": "threads",
        "engine_why": "io_uring_setup: Operation not permitted", "cpus": 3.5, "cpu_quota": 3.5,
        "cpus_machine": 128, "memory_limit_bytes": 16 << 30, "memory_bytes": 1 << 40,
        "pressure": {"cpu": 0.7, "io": 0.1}, "gpus": ("NVIDIA H100 80GB HBM3",) * 8,
        "swap_used_bytes": 1 << 30,
    },
    place={"options": ("rw", "strictatime", "rsize=4096"), "file_system": "nfs4"},
    decode={**HEAVY, "failed": 3, "first_failed": "OSError: broken\x1b[2J"},
    notes=["3 folders cannot be listed, the first: \x1b[31mred\n"],
    **SLOW_OPENS,
)  # fmt: skip


@pytest.mark.parametrize("step_s", [None, 0.04])
@pytest.mark.parametrize("found", [findings(), EVERYTHING], ids=["usual", "everything"])
def test_the_text_fits_a_terminal(found, step_s):
    lines = lines_of(diagnose(found, step_s=step_s, target="/scratch/train"))
    for kind, line in lines:
        assert kind == "command" or len(line) <= 80, line
        assert line.isprintable(), line
    text = "\n".join(line for _, line in lines)
    for word in ("data", "place", "storage", "cpu", "machine", "expected", "verdict", "do first"):
        assert f"\n{word} " in text, word
    assert text.count("do first") == 1


def test_advice_does_not_repeat_the_password_of_a_url():
    told = diagnose(findings(), step_s=0.04, target="s3://me:secret@bucket/photos")
    commands = " ".join(advice.command for advice in told.advice)
    assert "s3://bucket/photos" in commands
    assert "secret" not in commands


def test_every_advice_is_whole():
    for target in ("/scratch/train", "my photos; rm -rf $HOME"):
        told = diagnose(EVERYTHING, step_s=0.04, target=target)
        assert len(told.advice) > 5
        for advice in told.advice:
            assert advice.do.endswith("."), advice
            assert advice.because, advice
            assert advice.gain, advice
            assert advice.command, advice
            if advice.python:
                compile(advice.command, advice.key, "exec")
            elif target in advice.command or "rm -rf" in advice.command:
                assert target in shlex.split(advice.command, comments=True)
        assert len({advice.key for advice in told.advice}) == len(told.advice)


def test_a_diagnosis_is_plain_values():
    import dataclasses

    json.dumps(dataclasses.asdict(diagnose(EVERYTHING)))


@pytest.mark.parametrize(
    ("changes", "key", "command"),
    [
        ({"data": {"kind": "store", "format": "tokens"}, "decode": {"decoder": "", "side": 0}},
         "windows", "TokenDataLoader('/scratch/train', length=1024"),
        ({"data": {"format": "jsonl"}, "decode": {"format": "text", "decoder": "", "side": 0}},
         "tokenize", "headrace tokenize /scratch/train tokens.hr --tokenizer"),
    ],
)  # fmt: skip
def test_texts_are_to_be_tokens_and_tokens_windows(changes, key, command):
    told = diagnose(findings(**changes), workers=8)
    assert keys(told)[0] == key
    assert command in told.advice[0].command
    text = "\n".join(line for _, line in lines_of(told))
    assert ("documents/s" in text and "tokens need no decoding" in text) is (key == "windows")


def test_a_gain_is_told_in_what_the_data_are_counted_in():
    told = diagnose(findings(), workers=8)
    assert "images/s" in told.advice[0].gain
    blocks = diagnose(findings(data={"in_place": False}, decode=None), workers=8)
    assert "blocks/s" in blocks.advice[0].gain
