"""Tokenizing: turns texts into a store whose samples are documents of tokens.

Texts come from any source that `pack` takes: lines of JSON, columns of tables, folders of files. They are read
ahead by threads and encoded in batches by the `tokenizers` library, on all processors. The store is an ordinary
one: a sample is a document under the name of its text, and the manifest says what its tokens are. What an
interrupted run has encoded is neither read nor encoded again, where the source's samples have places.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import shlex
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.base.extras import import_extra
from headrace.base.files import read_file
from headrace.base.progress import reporter
from headrace.errors import SourceError
from headrace.store.directory import split_names
from headrace.store.pack import pack
from headrace.store.packing import PackOptions
from headrace.store.sources.detect import open_source
from headrace.store.sources.extents import ScanReader, plan_batches, read_ahead
from headrace.store.sources.scan import (
    UNREAD_LABELS,
    Problem,
    Scan,
    Stream,
    StreamItem,
    refused,
    shard_labels,
    source_options,
    unreadable,
)
from headrace.store.sources.text import parse_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.base.progress import Progress
    from headrace.store.packing import WriteReport
    from headrace.store.sources.scan import SourceOptions

_TOKENIZER_BYTES_MAX: Final = 1 << 30

_LOST_SHOWN: Final = 8  # characters that a message names

_TEXTS_AT_ONCE: Final = 2048  # texts of a stream that are encoded together
_READ_BYTES: Final = 4 << 20  # bytes of a source that are read and encoded together


_FILES: Final = frozenset({"folder", "objects", "manifest", "tar", "compressed tar"})
"""Sources whose texts are whole files: an editor's mark at the beginning of one is no part of it."""


class _Text(NamedTuple):
    """A text of the source, as bytes."""

    name: bytes
    data: bytes | memoryview


def tokenize(
    source: Any,
    target: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    bos: str | int | None = None,
    eos: str | int | None = None,
    field: str = "text",
    column: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    on_error: str = "raise",
    extensions: tuple[str, ...] | None = None,
    prefix_names: bool = False,
    format: str | None = None,  # noqa: A002 - as for `pack`
    progress: Progress | bool | None = None,
) -> WriteReport:
    """Encodes texts into a new store at `target`, whose samples are documents of tokens.

    Args:
        source: texts in UTF-8: JSON Lines, text files, tables; as for `pack`.
        target: the store's folder.
        tokenizer: the `tokenizer.json` of the `tokenizers` library.
        bos: a token that begins each document, by its name or number.
        eos: a token that ends each document, likewise.
        field: JSON Lines: the field that holds the text.
        column: tables: the column that holds the text.
        workers: threads that read the source.
        overwrite: replace the store at `target`, atomically.
        resume: go on where an interrupted run stopped; else start over.
        on_error: `raise`, or `skip` texts that cannot be read or are none, and report them.
        extensions: folders: take only files that end so.
        prefix_names: several files: put the file's name before the names of texts.
        format: what the source is, as for `pack`; `lines`: each line of a text file is a document.
        progress: called with (tokens done, None, their bytes, None), or True, as for `pack`.

    Returns:
        What was written; `bytes` are those of the tokens.

    Raises:
        StoreExists: something stands at `target`.
        SourceError: a text is none, or would lose characters that the tokenizer has no token for, or the source
            or the tokenizer cannot be read.
    """
    options = PackOptions() if workers is None else PackOptions(workers=workers)
    chosen = source_options(
        column=column, workers=options.workers, on_error=on_error, extensions=extensions,
        prefix_names=prefix_names, format=format,
    )  # fmt: skip
    encoder = _Encoder(os.fspath(tokenizer), bos, eos)
    listed = open_source(source, chosen)
    texts = _Texts(listed, chosen, encoder, field)
    width = np.dtype(encoder.dtype).itemsize

    report_progress = reporter(progress, "tokenizing", "tokens")

    def tell(_documents: int, _of: int | None, nbytes: int, _all: int | None) -> None:
        if report_progress is not None:
            report_progress(nbytes // width, None, nbytes, None)

    return pack(
        texts.stream(), target, overwrite=overwrite, resume=resume, on_error=on_error,
        progress=tell, options=options,
    )  # fmt: skip


class _Encoder:
    """A tokenizer, and what it puts around documents."""

    def __init__(self, path: str, bos: str | int | None, eos: str | int | None) -> None:
        library = import_extra("tokenizers", f"reading {path}")
        try:
            text = read_file(path, _TOKENIZER_BYTES_MAX)
        except OSError as e:
            raise unreadable(path, e, "Check the path of the tokenizer.") from e
        try:
            self._tokenizer = library.Tokenizer.from_str(text.decode())
        except Exception as e:  # the library raises Exception itself
            raise refused(
                path, f"is no tokenizer: {str(e)[:200]}.", "Give the tokenizer.json of the tokenizers library."
            ) from e  # fmt: skip
        # What the file says of cutting and padding is for models' inputs: documents are kept whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._top = max(vocabulary.values(), default=0)
        self._before = self._edge(path, "bos", bos)
        self._after = self._edge(path, "eos", eos)
        self.dtype = "uint16" if self._top < 1 << 16 else "uint32"
        self._unknown, self._drops = self._tell_unknown(library, json.loads(text)["model"])
        self.tokens = self.unknown = 0  # how many were made, and of these, how many are `_unknown`
        digest = hashlib.sha256(text).hexdigest()
        self.identity: dict[str, Any] = {  # what makes its tokens what they are, for the manifest
            "dtype": self.dtype,
            "vocabulary": self._top + 1,
            "tokenizer": digest,
        }
        for name, edge in (("bos", self._before), ("eos", self._after)):
            if edge:
                self.identity[name] = edge[0]

    def _tell_unknown(self, library: Any, model: dict[str, Any]) -> tuple[int, bool]:
        """The token of what the vocabulary lacks, -1 for none; and whether it means that text is dropped.

        A BPE without such a token drops what it lacks and says nothing: it is given one beyond its vocabulary,
        which changes no other.
        """
        if (unknown := model.get("unk_id")) is not None:
            return int(unknown), False
        if (name := model.get("unk_token")) is not None:
            return model["vocab"].get(name, -1), False
        if not isinstance(self._tokenizer.model, library.models.BPE):
            return -1, False  # the library refuses then
        unknown = self._top + 1
        with_unknown = {
            "unk_token": "\0",
            "fuse_unk": False,
            "vocab": model["vocab"] | {"\0": unknown},
        }
        # A model alone: tokens that are added beside it keep their numbers.
        alone = {"version": "1.0", "added_tokens": [], "model": model | with_unknown}
        self._tokenizer.model = library.Tokenizer.from_str(json.dumps(alone)).model
        return unknown, True

    def _edge(self, path: str, which: str, token: str | int | None) -> list[int]:
        if token is None:
            return []
        if isinstance(token, str) and (number := self._tokenizer.token_to_id(token)) is not None:
            return [number]
        try:
            number = int(token) if isinstance(token, str) else operator.index(token)
        except ValueError:
            number = -1
        if not 0 <= number <= self._top:
            raise refused(
                path, f"{which} is {token!r}, which is no token of its vocabulary (0 to {self._top:,}).",
                f"Name one: --{which} {self._special()}.",
            )  # fmt: skip
        return [number]

    def _special(self) -> str:
        """Tokens that stand for no text, to choose from."""
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        names = [repr(token.content) for _, token in added if token.special]
        return " or ".join(names[:8]) or "a number, as no token of it is special"

    def __call__(self, texts: list[str]) -> list[bytes | None]:
        """The documents of some texts, `dtype`, little-endian; None of one that would lose text."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - the library raises Exception itself, and not for which text
            if len(texts) == 1:
                return [None]
            return [self([text])[0] for text in texts]
        return [self._document(e.ids) for e in encodings]

    def _document(self, ids: list[int]) -> bytes | None:
        tokens = np.array([*self._before, *ids, *self._after], np.int64)
        within = tokens[len(self._before) :][: len(ids)]
        unknown = int(np.count_nonzero(within == self._unknown))
        if unknown and self._drops:
            return None
        self.tokens, self.unknown = self.tokens + len(ids), self.unknown + unknown
        return tokens.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()

    def loss(self, text: str) -> str:
        """What a text would lose that has no document."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as e:  # noqa: BLE001 - likewise
            return f"cannot be encoded: {str(e)[:200]}"
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        spans = {span for number, span in pairs if number == self._unknown}
        lost = sorted({text[start:end] for start, end in spans})
        named = ", ".join(map(repr, lost[:_LOST_SHOWN])) + ", ..." * (len(lost) > _LOST_SHOWN)
        return (
            f"would lose {len(spans):,} of its {len(text):,} characters: the tokenizer has no token for "
            f"{named}, and none for what it does not know"
        )

    def note(self) -> str | None:
        """How much of what was encoded stands for no text in particular."""
        if not self.unknown:
            return None
        name = self._tokenizer.id_to_token(self._unknown)
        return f"{self.unknown:,} of {self.tokens:,} tokens are {name!r}: the vocabulary lacks what stood there"


class _Texts:
    """The texts of a source, encoded."""

    def __init__(
        self, listed: Scan | Stream, options: SourceOptions, encoder: _Encoder, field: str
    ) -> None:
        self._listed, self._options, self._encoder = listed, options, encoder
        paths = listed.source.get("paths") or []
        self._path = str(paths[0] if paths else listed.source.get("path", "the source"))
        self._paths = dict(zip(shard_labels(paths), paths, strict=True))
        kind = listed.source.get("kind")
        self._field = field if kind == "jsonl" else None
        self._by_line, self._files = kind in {"jsonl", "lines"}, kind in _FILES
        self._skipped: list[Problem] = []  # what the packer reports
        # Documents of tokens have no labels.
        self._notes = [note for note in listed.notes if not note.startswith(UNREAD_LABELS)]
        if numbers := listed.source.get("dtypes") or listed.source.get("tokens"):
            what = ", ".join(f"{name}: {dtype}" for name, dtype in numbers.items())
            raise refused(
                self._path, f"holds numbers ({what}), expected texts.",
                "Name the column of texts: --column text; or pack what is tokens already: headrace pack.",
            )  # fmt: skip
        if isinstance(listed, Scan) and listed.columns.extents != listed.columns.samples:
            names = listed.columns.part_names
            raise refused(
                self._path, f"its samples have several parts ({b', '.join(names).decode(errors='replace')}).",
                "Name the one of texts: --column text.",
            )  # fmt: skip

    def stream(self) -> Stream:
        """What is packed."""
        listed = self._listed
        source = {
            "kind": "tokenized", "of": listed.source, "tokens": self._encoder.identity, "field": self._field,
        }  # fmt: skip
        if isinstance(listed, Scan):
            source["listing"] = listed.listing_hash().hex()
        skipping = self._options.on_error == "skip"
        return Stream(
            self._items, source, reason="its tokens are made", notes=self._notes, skipped=self._skipped,
            # Which texts were left out before is not known: then all are looked at again.
            resumed=None if skipping or not isinstance(listed, Scan) else self._resumed,
        )  # fmt: skip

    def _items(self) -> Iterator[StreamItem]:
        self._skipped.clear()
        yield from self._encoded(self._batches(0))
        self._skipped.extend(self._listed.skipped)

    def _resumed(self, done: int) -> tuple[list[bytes], Iterator[StreamItem]]:
        """The names of the first `done` documents, and the others."""
        assert isinstance(self._listed, Scan)
        columns = self._listed.columns
        names = split_names(columns.names, columns.name_offsets)[:done]
        return names, self._encoded(self._batches(done))

    def _batches(self, first: int) -> Iterator[list[_Text]]:
        """The texts from the `first` on, some at a time."""
        if isinstance(self._listed, Stream):
            items = self._listed.items()
            while some := list(islice(items, _TEXTS_AT_ONCE)):
                yield [self._of_item(item) for item in some]
            return
        scan, reader = self._listed, ScanReader(self._listed, on_error=self._options.on_error)
        plans = plan_batches(scan, first, _READ_BYTES)
        for batch in read_ahead(plans, reader.read, self._options.workers):
            self._skipped += batch.problems
            names = (scan.columns.name(i) for i in range(batch.plan.begin, batch.plan.end))
            if batch.data is None:  # one large text
                extent = int(scan.columns.firsts[batch.plan.begin])
                whole = b"".join(bytes(piece) for piece in reader.pieces(extent))
                yield [_Text(next(names), whole)]
                continue
            ends = np.cumsum(batch.length.astype(np.int64)).tolist()
            kept = [name for name, count in zip(names, batch.counts.tolist(), strict=True) if count]
            starts = [0, *ends[:-1]]
            yield [
                _Text(name, batch.data[start:end])
                for name, start, end in zip(kept, starts, ends, strict=True)
            ]
            reader.recycle(batch)

    def _of_item(self, item: StreamItem) -> _Text:
        if len(item.parts) != 1:
            path, what = self._place(item.name)
            raise refused(
                path, f"{what} has {len(item.parts)} parts, expected one.",
                "Name the one of texts: --column text.",
            )  # fmt: skip
        return _Text(item.name, item.parts[0][1])

    def _encoded(self, batches: Iterator[list[_Text]]) -> Iterator[StreamItem]:
        self._encoder.tokens = self._encoder.unknown = 0
        for batch in batches:
            names, texts = [], []
            for text in batch:
                try:
                    texts.append(self._text(text))
                except SourceError as e:
                    self._leave_out(e)
                else:
                    names.append(text.name)
            for name, read, data in zip(names, texts, self._encoder(texts), strict=True):
                if data is None:
                    self._leave_out(self._lossy(name, read))
                else:
                    yield StreamItem(name, ((b"", data),))
        if note := self._encoder.note():
            self._notes.append(note)

    def _leave_out(self, error: SourceError) -> None:
        if self._options.on_error != "skip":
            raise error
        self._skipped.append(Problem.of(error))

    def _lossy(self, name: bytes, text: str) -> SourceError:
        path, at = self._place(name)
        return refused(
            path, f"{at} {self._encoder.loss(text)}.",
            "Train the tokenizer with the whole alphabet (initial_alphabet=ByteLevel.alphabet()) or with an "
            "unk_token; or leave such texts out: --skip-errors.",
        )  # fmt: skip

    def _place(self, name: bytes) -> tuple[str, str]:
        """The file that a text is of, and which of its texts, as messages show them."""
        label, _, row = name.rpartition(b":")
        if label not in self._paths or not row.isdigit():
            return self._path, f"sample {os.fsdecode(name)!r}"
        at = f"line {int(row) + 1:,}" if self._by_line else f"row {int(row):,}"
        return self._paths[label], at

    def _text(self, text: _Text) -> str:
        path, at = self._place(text.name)
        try:
            if self._field is None:
                decoded = _decoded(text.data)
                return decoded.removeprefix("\ufeff") if self._files else decoded
            value = parse_line(text.data, self._field)
            content = value.get(self._field) if isinstance(value, dict) else None
            if isinstance(content, str):
                content.encode()  # not all that JSON can escape is text
                return content
        except (ValueError, RecursionError) as e:
            what = "JSON" if self._field is not None else "text"
            what = "UTF-8" if isinstance(e, UnicodeError) else what
            raise refused(
                path, f"{at} is no {what}: {str(e)[:200]}.",
                "Mend it, or leave such texts out: --skip-errors.",
            ) from e  # fmt: skip
        if not isinstance(value, dict):
            has = f"it is no object: {str(text.data[:160], 'utf-8', 'replace')[:40]}"
        elif self._field in value:
            has = f"it is {json.dumps(content)[:40]}, expected a string"
        else:
            has = f"it has {sorted(value)[:10]}"
        texts = (
            {k: v for k, v in value.items() if isinstance(v, str)}
            if isinstance(value, dict)
            else {}
        )
        longest = shlex.quote(max(texts, key=lambda name: len(texts[name]), default=""))
        other = f"Name the field: --field {longest}; or l" if texts else "L"
        raise refused(
            path, f"{at} has no text in {self._field!r}: {has}.",
            f"{other}eave such texts out: --skip-errors.",
        )  # fmt: skip


def _decoded(data: bytes | memoryview) -> str:
    text = str(data, "utf-8")
    if "\0" in text:
        raise ValueError("it holds zero bytes, as UTF-16 and binary files do")
    return text
