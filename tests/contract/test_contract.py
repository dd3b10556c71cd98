"""The outer contract: each kept text is what it was, or its change stands in a diff and in the changelog."""

from __future__ import annotations

import difflib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headrace as hr
from contract import commands, documents, formats, public_names, services
from headrace.cli.app import app
from headrace.cluster.manifest import read_manifest
from headrace.fabric.image import PAGE_BYTES, parse_header, parse_table
from headrace.job.meeting import JobDocument, NodeDocument
from headrace.node.wire import Splitter, decode_request
from headrace.telemetry.history import open_history
from tests_shared import write_photos

EXPECTED = Path(__file__).with_name("expected")

TEXTS = {
    "c": lambda _: services.c_text(),
    "environment": lambda _: commands.environment_text(),
    "exit-codes": lambda _: commands.exit_codes_text(),
    "formats": formats.formats_text,
    "help": lambda _: commands.help_text(),
    "json": documents.documents_text,
    "messages": lambda _: services.messages_text(),
    "metrics": lambda _: services.metrics_text(),
    "names": lambda _: public_names.names_text(),
    "recipes": lambda _: commands.recipes_text(),
    "routes": services.routes_text,
}

ADVICE = (
    "The outer contract changed. If that is meant: `python -m pytest tests/contract --update-contract`,\n"
    "and a line in CHANGELOG.md for those who rely on it."
)


def compare(kept: Path, text: str, *, updating: bool) -> None:
    """Fail unless the whole text is the kept one; or keep it."""
    if updating:
        kept.write_text(text)
        return
    before = kept.read_text() if kept.exists() else ""
    changed = difflib.unified_diff(
        before.splitlines(), text.splitlines(), f"kept {kept.name}", "now", lineterm="", n=2
    )
    if text != before:
        pytest.fail("\n".join([ADVICE, "", *changed]), pytrace=False)


@pytest.mark.parametrize("name", TEXTS)
def test_the_contract_holds(name, apart, updating):
    compare(EXPECTED / f"{name}.txt", TEXTS[name](apart), updating=updating)


def test_every_kept_text_is_compared():
    assert {path.stem for path in EXPECTED.glob("*.txt")} == set(TEXTS)


@pytest.mark.parametrize(
    "change", [lambda t: t + "x\n", lambda t: t[:-1], lambda _: "", str.swapcase]
)
def test_a_change_of_any_part_of_a_text_fails(change, tmp_path):
    for kept in EXPECTED.glob("*.txt"):
        text = kept.read_text()
        compare(kept, text, updating=False)
        with pytest.raises(pytest.fail.Exception, match="outer contract changed"):
            compare(kept, change(text), updating=False)


# -- files of version 0.1 ----------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path):
    """A copy, as what is opened may be locked or mended."""
    return shutil.copytree(formats.GOLDEN, tmp_path / "golden")


def test_a_store_of_0_1_is_read(golden, tmp_path):
    photos = write_photos(tmp_path / "photos", per_class=2)
    with hr.open(golden / "store.hr") as store:
        names = list(store.names)
        assert names == sorted(str(p.relative_to(photos)) for p in photos.rglob("*.png"))
        assert [bytes(store.read(name)) for name in names] == [
            (photos / name).read_bytes() for name in names
        ]
        assert store.classes == ["cats", "dogs", "owls"]
    assert hr.verify(golden / "store.hr").bad_samples == []


def test_a_namespace_of_0_1_holds_the_store(golden):
    data = (golden / "store.img").read_bytes()
    header = parse_header(data[:PAGE_BYTES], "golden", namespace_bytes=len(data))
    table = data[PAGE_BYTES : PAGE_BYTES + header.table_bytes]
    entries = parse_table(header, table, "golden", namespace_bytes=len(data))
    held = {name: data[e.offset : e.offset + e.length] for name, e in entries.items()}
    assert held == {p.name: p.read_bytes() for p in (golden / "store.hr").iterdir()}


def test_a_loader_goes_on_from_a_state_of_0_1(golden):
    state = json.loads((golden / "loader.json").read_text())
    loader = hr.loader(golden / "store.hr", 2, seed=7)
    loader.load_state_dict(state)
    assert sum(len(batch) for batch in loader) == 4
    assert loader.last_order_hash is not None
    loader.close()


def test_a_checkpoint_of_0_1_is_loaded(golden):
    found = hr.checkpoint.load(golden / "checkpoints")
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert found.step == found.tree["step"] == 7
    assert found.tree["lr"] == 0.001
    assert np.array_equal(found.tree["weights"], weights)


def test_a_trace_of_0_1_is_refused_by_name(golden):
    ended = CliRunner().invoke(app, ["report", str(golden / "run")])
    assert ended.exit_code == 3
    assert "version 1 of the format, expected 2" in ended.output
    assert "headrace that wrote it" in ended.output


def test_a_history_of_0_1_is_read(golden):
    (record,) = open_history(golden / "history").records(0.0, 4e9)
    assert (record.job_id, record.name, record.user) == ("1", "resnet", "ann")
    waited = {label: s for (name, label, _), s in record.figures.items() if name == "stall_s"}
    assert waited == {"limit": 20.0, "storage": 10.0}


def test_documents_and_messages_of_0_1_are_read(golden):
    assert read_manifest(golden / "manifest.json")["order"] == {"seed": 7}
    node, job = golden / "node-0.json", golden / "job.json"
    assert NodeDocument.parse(node.read_bytes(), str(node)) == NodeDocument(**formats.NODE)
    assert JobDocument.parse(job.read_bytes(), str(job)) == JobDocument(**formats.JOB)
    frames = Splitter(1 << 20).feed((golden / "messages.bin").read_bytes())
    assert tuple(map(decode_request, frames)) == formats.MESSAGES
