"""Tokenizing equals the library's own reader, document by document, and goes on where it was interrupted."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app
from headrace.errors import SourceError
from headrace.store.summary import TokenCount, summarise

tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokens` is not installed")

TEXTS = ["a little river", "", "the race at the head of the mill — größer, 中文 🌊", "x" * 5000] + [
    f"line {i} of {'water ' * (i % 40)}" for i in range(900)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE that was trained on the texts; returns its file and the tokenizer."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|bos|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(TEXTS, trainer)
    model.enable_truncation(8)  # what a model's input has is not for documents
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    model.no_truncation()
    return path, model


def write_jsonl(path):
    path.write_text(
        "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))
    )
    return path


def write_gzip(path):
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress(write_jsonl(path.with_suffix("")).read_bytes()))
    return path


def write_parquet(path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pq.write_table(table, path, compression="zstd", row_group_size=100)
    return path


def write_folder(path):
    path.mkdir()
    for i, text in enumerate(TEXTS):
        (path / f"{i:04}.txt").write_text(text)
    return path


SOURCES = {
    "JSON Lines": (write_jsonl, "texts.jsonl", {}),
    "compressed JSON Lines": (write_gzip, "texts.jsonl", {}),
    "a column of Parquet": (write_parquet, "texts.parquet", {"column": "text"}),
    "a folder of texts": (write_folder, "texts", {}),
}


def read(store):
    with headrace.open(store) as opened:
        return [np.frombuffer(opened.read(i), np.uint16).tolist() for i in range(len(opened))]


@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES)
def test_documents_are_what_the_library_makes_of_each_text(tmp_path, tokenizer, case):
    write, name, options = case
    path, model = tokenizer
    report = headrace.tokenize(
        write(tmp_path / name), tmp_path / "a.hr", tokenizer=path, bos="<|bos|>", eos=0, **options
    )
    expected = [[1, *model.encode(t, add_special_tokens=False).ids, 0] for t in TEXTS]
    assert read(tmp_path / "a.hr") == expected
    assert report.bytes == 2 * sum(map(len, expected))
    entry = json.loads((tmp_path / "a.hr" / "store.json").read_bytes())["segments"][0]["source"]
    assert entry["tokens"] | {"tokenizer": ""} == {
        "dtype": "uint16", "vocabulary": model.get_vocab_size(), "tokenizer": "", "bos": 1, "eos": 0,
    }  # fmt: skip
    with headrace.tokens(tmp_path / "a.hr", 64, 2) as batches:
        assert (
            sum(batch.inputs.size for batch in batches) // 64 == (sum(map(len, expected)) - 1) // 64
        )


def test_each_line_of_a_text_file_is_a_document_if_that_is_said(tmp_path, tokenizer):
    path, model = tokenizer
    (tmp_path / "a.txt").write_text("one river\n\nanother river\n", "utf-8-sig")
    with pytest.raises(SourceError) as error:
        headrace.tokenize(tmp_path / "a.txt", tmp_path / "a.hr", tokenizer=path)
    assert "--as lines" in error.value.next_step
    headrace.tokenize(tmp_path / "a.txt", tmp_path / "a.hr", tokenizer=path, format="lines")
    assert read(tmp_path / "a.hr") == [model.encode(t).ids for t in ("one river", "another river")]


def test_the_mark_before_a_file_is_no_part_of_its_text(tmp_path, tokenizer):
    path, model = tokenizer
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("one river", "utf-8-sig")
    headrace.tokenize(tmp_path / "a", tmp_path / "a.hr", tokenizer=path)
    (tmp_path / "b.jsonl").write_text('{"text": "one river"}\n', "utf-8-sig")
    headrace.tokenize(tmp_path / "b.jsonl", tmp_path / "b.hr", tokenizer=path)
    assert read(tmp_path / "a.hr") == read(tmp_path / "b.hr") == [model.encode("one river").ids]


def test_an_interrupted_run_goes_on_without_encoding_again(tmp_path, tokenizer, monkeypatch):
    from headrace.store import packing, tokenizing

    path, _ = tokenizer
    source = write_jsonl(tmp_path / "texts.jsonl")
    headrace.tokenize(source, tmp_path / "whole.hr", tokenizer=path)
    monkeypatch.setattr(tokenizing, "_READ_BYTES", 4096)
    monkeypatch.setattr(packing, "_SAMPLES_AT_ONCE", 50)
    calls = []
    encode = tokenizing._Encoder.__call__

    def counted(self, texts):
        calls.append(len(texts))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(tokenizing._Encoder, "__call__", counted)
    stop = 9
    with pytest.raises(KeyboardInterrupt) as interrupted:
        headrace.tokenize(source, tmp_path / "a.hr", tokenizer=path)
    assert "documents packed and kept" in interrupted.value.__notes__[0]
    encoded, stop = sum(calls[:-1]), -1
    calls.clear()
    report = headrace.tokenize(source, tmp_path / "a.hr", tokenizer=path)
    assert 0 < report.resumed_samples <= encoded
    assert sum(calls) == len(TEXTS) - report.resumed_samples
    assert read(tmp_path / "a.hr") == read(tmp_path / "whole.hr")
    with (
        headrace.open(tmp_path / "a.hr") as resumed,
        headrace.open(tmp_path / "whole.hr") as whole,
    ):
        assert list(resumed.names) == list(whole.names)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"txt": "a"}', r"no text in 'text': it has \['txt'\]"),
        (b'{"text": 7}', "no text in 'text': it is 7, expected a string"),
        (b'{"text": null}', "no text in 'text': it is null, expected a string"),
        (b'["text"]', r"no text in 'text': it is no object: \["),
        (b'{"text": "a"', "is no JSON"),
        (b'{"text": "\xff"}', "is no UTF-8"),
        (b'{"text": "a", "text": "b"}', "is no JSON: it has 'text' twice"),
        (rb'{"text": "half a pair: \ud800"}', "is no UTF-8"),
        (bytes(30), "is no JSON"),
    ],
)
def test_what_is_no_text_is_refused_or_left_out(tmp_path, tokenizer, line, message):
    path, model = tokenizer
    data = b'\r\n{"text": "river"}\n' + line + b'\n{"text": "mill"}\n'
    for end, write in (("", bytes), (".gz", gzip.compress)):
        folder = tmp_path / f"texts{end}"
        folder.mkdir()
        (folder / f"0.jsonl{end}").write_bytes(write(data.replace(line, b"")))  # it is whole
        source = folder / f"1.jsonl{end}"
        source.write_bytes(write(data))
        with pytest.raises(SourceError, match=message) as error:
            headrace.tokenize(folder, tmp_path / "a.hr", tokenizer=path, overwrite=True)
        assert error.value.path == str(source)
        assert str(error.value).startswith(f"{source}: line 3 ")  # its path is shown once
        report = headrace.tokenize(
            folder, tmp_path / "a.hr", tokenizer=path, on_error="skip", overwrite=True
        )
        assert len(report.skipped) == 1
        assert str(report.skipped[0]).startswith(f"{source}: line 3 ")
        assert read(tmp_path / "a.hr") == [model.encode(t).ids for t in ("river", "mill") * 2]


def test_numbers_and_binary_files_are_no_texts(tmp_path, tokenizer):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path, _ = tokenizer
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]] * 3}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"holds numbers \(input_ids: int64\), expected texts"):
        headrace.tokenize(tmp_path / "a.parquet", tmp_path / "a.hr", tokenizer=path)
    (tmp_path / "a.txt").write_bytes("river\nmill\n".encode("utf-16-le"))
    with pytest.raises(SourceError, match=r"a\.txt: line 1 is no text: it holds zero bytes"):
        headrace.tokenize(tmp_path / "a.txt", tmp_path / "a.hr", tokenizer=path, format="lines")


def test_texts_that_the_source_itself_leaves_out_are_reported(tmp_path, tokenizer):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path, _ = tokenizer
    pq.write_table(pa.table({"text": ["one", None, "three"]}), tmp_path / "texts.parquet")
    with pytest.raises(SourceError, match="is null"):
        headrace.tokenize(tmp_path / "texts.parquet", tmp_path / "a.hr", tokenizer=path)
    report = headrace.tokenize(
        tmp_path / "texts.parquet", tmp_path / "a.hr", tokenizer=path, on_error="skip"
    )
    assert report.samples == 2
    assert [problem.reason for problem in report.skipped] == ["row 1: 'text' is null"]


def test_a_tokenizer_that_is_none_and_a_token_that_it_lacks_are_refused(tmp_path, tokenizer):
    path, _ = tokenizer
    source = write_jsonl(tmp_path / "texts.jsonl")
    with pytest.raises(SourceError, match="is no tokenizer"):
        headrace.tokenize(source, tmp_path / "a.hr", tokenizer=source)
    for eos in ("<eos>", 400, -1):
        with pytest.raises(SourceError, match="eos is") as error:
            headrace.tokenize(source, tmp_path / "a.hr", tokenizer=path, eos=eos)
        assert "--eos '<|endoftext|>' or '<|bos|>'" in error.value.next_step


def test_a_text_that_would_lose_letters_is_refused_or_left_out(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=special, show_progress=False)
    model.train_from_iterator(["a river and a mill"], trainer)
    model.add_tokens(["\U0001f30a"])  # its number is after the model's own
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    kept = ["a river", "a \U0001f30a mill<|end|>", ""]
    lines = [json.dumps({"text": text}) for text in (*kept, "a sluice für mills")]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    with pytest.raises(SourceError, match=r"line 4 would lose 6 of its 18 characters") as error:
        headrace.tokenize(tmp_path / "texts.jsonl", tmp_path / "a.hr", tokenizer=path)
    assert "no token for 'c', 'f', 's', 'u', 'ü'," in error.value.message
    assert "initial_alphabet" in error.value.next_step
    report = headrace.tokenize(
        tmp_path / "texts.jsonl", tmp_path / "a.hr", tokenizer=path, on_error="skip", eos=0
    )
    assert [problem.reason[:17] for problem in report.skipped] == ["line 4 would lose"]
    assert read(tmp_path / "a.hr") == [[*model.encode(text).ids, 0] for text in kept]


def trained(kind, texts):
    """A tokenizer of this kind, and what of it stands for what it does not know."""
    models, trainers, split = (
        tokenizers.models,
        tokenizers.trainers,
        tokenizers.pre_tokenizers,
    )
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    if kind == "BERT":
        model = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        model.normalizer = tokenizers.normalizers.BertNormalizer()
        model.pre_tokenizer = split.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False)
    elif kind == "Unigram":
        model = tokenizers.Tokenizer(models.Unigram())
        model.pre_tokenizer = split.Metaspace()
        trainer = trainers.UnigramTrainer(
            special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    elif kind == "BPE with bytes":
        model = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
        model.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        trainer = trainers.BpeTrainer(special_tokens=bytes_of, show_progress=False)
    else:
        model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        model.pre_tokenizer = split.Split(" ", "removed")
        trainer = trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False)
    model.train_from_iterator(texts, trainer)
    return model


@pytest.mark.parametrize(
    ("kind", "unknown"),
    [("BERT", 2), ("Unigram", 2), ("BPE with bytes", 0), ("BPE with a token for it", 2)],
)
def test_what_a_vocabulary_lacks_and_says_so_is_counted(tmp_path, kind, unknown):
    model = trained(kind, ["a river and a mill", "the mill by the river"] * 9)
    model.save(str(tmp_path / "tokenizer.json"))
    texts = ["A Mill a r\u00edver", "a 中 and 文", " a\tmill\n"]
    if kind != "BERT":  # which knows no accents, and no white space
        texts = ["a mill", "a 中 and 文"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    report = headrace.tokenize(
        tmp_path / "texts.jsonl", tmp_path / "a.hr", tokenizer=tmp_path / "tokenizer.json"
    )
    expected = [model.encode(text, add_special_tokens=False).ids for text in texts]
    assert read(tmp_path / "a.hr") == expected
    told = [note for note in report.notes if "tokens are" in note]
    count = f"{unknown} of {sum(map(len, expected))} tokens are "
    assert [note.startswith(count) for note in told] == [True] * bool(unknown)


def test_a_vocabulary_of_words_alone_refuses_others_by_name(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "mill": 1}))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"text": "a mill"}\n{"text": "a river"}\n')
    with pytest.raises(SourceError, match=r"line 2 cannot be encoded: .*Missing \[UNK\]"):
        headrace.tokenize(
            tmp_path / "texts.jsonl", tmp_path / "a.hr", tokenizer=tmp_path / "tokenizer.json"
        )


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    words = {f"w{i}": i for i in range(1 << 16)} | {"last": 1 << 16}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"body": "w5 last", "label": 1}\n')
    report = headrace.tokenize(
        tmp_path / "texts.jsonl",
        tmp_path / "a.hr",
        tokenizer=tmp_path / "tokenizer.json",
        field="body",
    )
    assert report.notes == []  # documents have no labels
    with headrace.open(tmp_path / "a.hr") as store:
        assert np.frombuffer(store.read(0), np.uint32).tolist() == [5, 1 << 16]


def test_the_command_says_how_many_tokens_there_are(tmp_path, tokenizer):
    path, model = tokenizer
    source = write_jsonl(tmp_path / "texts.jsonl")
    words = (
        "tokenize",
        source,
        tmp_path / "a.hr",
        "--tokenizer",
        path,
        "--eos",
        "<|endoftext|>",
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document["tokens"] == sum(len(model.encode(text).ids) + 1 for text in TEXTS)
    assert document["dtype"] == "uint16"
    with headrace.open(tmp_path / "a.hr") as store:
        told = summarise(store).tokens
    assert told == TokenCount(document["tokens"], "uint16", model.get_vocab_size())
    checked = CliRunner().invoke(app, ["verify", str(tmp_path / "a.hr")]).stdout
    assert f"checked {len(TEXTS):,} of {len(TEXTS):,} documents" in checked
    assert checked.endswith("all good, byte for byte\n")
