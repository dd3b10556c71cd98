"""Tokens: reads windows of tokens out of the documents of a store, several batches at once.

A batch of windows is small (64 kB for 8 x 2,048 tokens) and made of many pieces. So a few batches are planned
and read together, a group: one call plans it (`order.token_windows`), one submits its pieces to the native
reader, one copies them into rows of int32 or int64. Batches are views into these rows.

A short document is read whole, and so compared with its checksum; of a longer one only the piece that a window
needs is read, unchecked: a window of 4 kB must not cost a document of megabytes. Caches and limits know whole
samples only: under them all documents are read whole, and long ones are refused.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import numpy as np

from headrace import _native
from headrace.base.lifetime import Closing, lazy
from headrace.errors import HeadraceError, StoreError
from headrace.order.token_windows import JoinedPlan, Pieces, plan_windows
from headrace.plane.batch import mixture_of
from headrace.plane.follow import FollowingLoader
from headrace.plane.loader import Loader
from headrace.store.sources.contents import family_of, format_of
from headrace.store.sources.scan import TOKEN_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.order import Order
    from headrace.order.token_windows import Packing
    from headrace.plane.loader import Span
    from headrace.plane.stage import BatchReads, PendingReads
    from headrace.store import Store

TokenDtype = Literal["int32", "int64"]

STORED: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
"""What tokens may be in a store, little-endian."""

_GROUP_TOKENS: Final = 1 << 17
"""Tokens that are read together: rows of half a megabyte stay in a processor's cache."""

_CHECKED_BYTES_MAX: Final = 16 << 10
"""Documents up to this size are read whole and checked."""

_LOOKED_AT: Final = 1 << 20
"""Documents whose sizes are looked at together."""

_WHOLE_BYTES_MAX: Final = 1 << 20
"""Documents that caches and limits may be over: a group reads one for each of its windows, at worst."""

_ROWS_KEPT: Final = 8


class TokenBatch:
    """Windows of tokens that are delivered together.

    Attributes:
        tokens: int32 or int64, shape (windows, length + 1): each row one token longer than its inputs.
        indices: int64, shape (windows,): the windows' numbers, counted through the sources of a mixture.
        epoch: the epoch the batch belongs to.
        position: the global position of its first window.
        nbytes: bytes of its tokens in the store.
    """

    part_names = ("",)

    def __init__(
        self,
        tokens: NDArray[Any],
        indices: NDArray[np.int64],
        pieces: Callable[[], Pieces],
        *,
        epoch: int,
        position: int,
        nbytes: int,
        sources_of: Callable[[NDArray[np.int64]], list[str]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.indices = indices
        self.epoch = epoch
        self.position = position
        self.nbytes = nbytes
        self._pieces_of = pieces
        self._sources_of = sources_of

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        windows, length = self.tokens.shape
        return (
            f"TokenBatch({windows} windows of {length - 1} {self.tokens.dtype}, epoch {self.epoch})"
        )

    @property
    def sources(self) -> list[str]:
        """The name of each window's source in the mixture.

        Raises:
            ValueError: the batch is of one store.
        """
        return mixture_of(self._sources_of)(self.indices)

    @property
    def inputs(self) -> NDArray[Any]:
        """What the model sees, of shape (windows, length). A view of `tokens`."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> NDArray[Any]:
        """The token that follows each input, of shape (windows, length). A view of `tokens`."""
        return self.tokens[:, 1:]

    @lazy
    def _pieces(self) -> Pieces:
        return self._pieces_of()

    @lazy
    def documents(self) -> NDArray[np.int64]:
        """The document of each input, -1 for padding, of shape (windows, length)."""
        return self._spread(self._pieces.document, -1)[:, :-1]

    @lazy
    def positions(self) -> NDArray[np.int32]:
        """Counted from 0 at the first token of a document in its window; int32 of shape (windows, length)."""
        begin = self._spread(self._pieces.place, -1).astype(np.int32)
        # Padding is counted from where it begins.
        padded = begin < 0
        begin[padded] = np.broadcast_to((~padded).sum(1, dtype=np.int32)[:, None], begin.shape)[
            padded
        ]
        return (np.arange(begin.shape[1], dtype=np.int32) - begin)[:, :-1]

    @lazy
    def loss_mask(self) -> NDArray[np.bool_]:
        """Whether the target is of its input's document, and no padding; bool of shape (windows, length)."""
        documents = self._spread(self._pieces.document, -1)
        return np.asarray(
            (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0), np.bool_
        )

    @lazy
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where sequences begin in the flattened inputs, and where they end; int32 of shape (sequences + 1,).

        For attention that stays inside a document (the varlen functions of FlashAttention). Each piece of a
        document is a sequence, and so is the padding of a window.
        """
        windows, length = self.tokens.shape[0], self.tokens.shape[1] - 1
        row, place, _, _, count = self._pieces
        begins = (row * length + place)[place < length]
        ends = np.zeros(windows, np.int64)
        np.maximum.at(ends, row, place + count)
        padding = np.flatnonzero(ends < length)
        begins = np.concatenate([begins, padding * length + ends[padding], [windows * length]])
        return np.sort(begins).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """The longest sequence of `cu_seqlens`."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    def _spread(self, values: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
        """One value a piece to each of its tokens; shaped like `tokens`."""
        row, place, _, _, count = self._pieces
        spread = np.full(self.tokens.shape, padding, np.int64)
        stops = np.cumsum(count)
        at = np.arange(int(stops[-1]) if len(stops) else 0)
        at += np.repeat(row * self.tokens.shape[1] + place - (stops - count), count)
        spread.reshape(-1)[at] = np.repeat(values, count)
        return spread


class TokenLoader(Loader, Closing):
    """An iterable over batches of windows of tokens; made by `headrace.tokens`. Else it is a `Loader`."""

    def __iter__(self) -> Iterator[TokenBatch]:  # type: ignore[override]  # its batches are of another kind
        return super().__iter__()  # type: ignore[return-value]


class FollowingTokenLoader(FollowingLoader, TokenLoader):
    """The same over a store that may have grown whenever an epoch begins: all its windows are planned anew."""


class Documents:
    """The documents of a store: which part holds tokens, of what type, and how many each has.

    Args:
        store: whose samples are documents; a mixture of such stores.
        part: the part that holds tokens; None: the only one, or the one that is called so.
        stored: what tokens are there (`uint16`, ...); None: what the store says.

    Attributes:
        sources: first document and number of documents of each source; of a store, its own.
        names: of the sources of a mixture.
        path: the store's.

    Raises:
        ValueError: the store has no such part, or does not say what its tokens are.
    """

    def __init__(self, store: Store, part: str | None = None, stored: str | None = None) -> None:
        names = store.parts
        if part is None and len(names) > 1:
            part = next((name for name in TOKEN_PARTS if name in names), None)
        if (part is None and len(names) != 1) or (part is not None and part not in names):
            raise ValueError(f"part is {part!r}, expected one of {names}")
        self.part = names[0] if part is None else part
        self.stored = _stored_as(store, self.part, stored)
        self.width = np.dtype(self.stored).itemsize
        self._store, self.path = store, store.path
        mixture = store.mixture
        counts = [len(source) for source in mixture.sources.values()] if mixture else [len(store)]
        self.sources = list(zip(accumulate(counts[:-1], initial=0), counts, strict=True))
        self.names = list(mixture.sources) if mixture else []
        self._bases = np.array([segment.base for segment in store.segments])
        self._parts = [
            [*map(_text, segment.directory.part_names)].index(self.part)
            if self.part in map(_text, segment.directory.part_names)
            else -1
            for segment in store.segments
        ]

    def __len__(self) -> int:
        return len(self._store)

    def nbytes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of each of these documents; int64, shape (documents,)."""
        segments = self._store.segments
        if len(segments) == 1:
            return segments[0].directory.lengths(documents, max(0, self._parts[0]))
        size = np.zeros(len(documents), np.int64)
        each = np.searchsorted(self._bases, documents, "right") - 1
        for number in np.unique(each).tolist():
            here = np.flatnonzero(each == number)
            local = documents[here] - segments[number].base
            if self._parts[number] >= 0:
                size[here] = segments[number].directory.lengths(local, self._parts[number])
        return size

    def sizes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of these documents; int64, shape (documents,).

        Raises:
            StoreError: a document is no whole number of tokens.
        """
        nbytes = self.nbytes(documents)
        if self.width == 1:
            return nbytes
        size, rest = np.divmod(nbytes, self.width)
        if rest.any():
            at = int(np.flatnonzero(rest)[0])
            raise StoreError(
                f"{self._store.path}: document {int(documents[at])} has {int(nbytes[at]):,} bytes, expected a "
                f"multiple of {self.width}, as tokens are {self.stored}.",
                path=self._store.path,
                next_step="Say what tokens are: stored='uint32', for example.",
            )
        return size

    def check_longest(self, most: int) -> None:
        """Looks whether documents are short enough to be read whole.

        Raises:
            StoreError: one has more bytes.
        """
        for first in range(0, len(self), _LOOKED_AT):
            nbytes = self.nbytes(np.arange(first, min(first + _LOOKED_AT, len(self))))
            if nbytes.max() > most:
                at = first + int(nbytes.argmax())
                raise StoreError(
                    f"{self._store.path}: document {at} has {int(nbytes.max()):,} bytes, expected at most "
                    f"{most:,}: caches and limits take whole documents.",
                    path=self._store.path,
                    next_step="Copy the store to a local disk and read it there without cache_dir, ram_bytes "
                    "and limits, or pack shorter documents.",
                )


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


_TOKENIZE: Final = (
    ". Text is tokenized first: headrace tokenize TEXTS OUT.hr --tokenizer tokenizer.json "
    '(the documentation\'s "Pretrain on tokens")'
)


def _no_tokens(store: Store, part: str) -> str:
    """What a store surely holds that is none, by its source and by the name of its first sample; or nothing."""
    sources = [segment.entry.source for segment in store.segments]
    kinds = {source.get("kind") for source in sources}
    if kinds <= {"jsonl", "lines"}:
        return f"JSON Lines{_lists_of(store)}" if "jsonl" in kinds else "lines of text"
    if columns := sources[0].get("columns"):
        other = next((name for name in TOKEN_PARTS if name in sources[0].get("left", [])), None)
        way = f"hr.open({store.path!r}, column={other!r}) takes that one"
        if store.appendable:
            way = f"left out: pack it again with --column {other} (column={other!r})"
        return f"the column {columns[0]!r}" + (f" (and not {other!r}; {way})" if other else "")
    name = family_of(format_of(f"{store.names[0]}.{part}" if part else store.names[0]))
    return {"image": "pictures", "text": "text", "audio": "audio", "video": "video"}.get(name, "")


def _lists_of(store: Store) -> str:
    """What to do with tokens that the lines of JSON have, if the first one does."""
    with contextlib.suppress(HeadraceError, ValueError, RecursionError):
        fields = json.loads(bytes(store.read(0)))
        lists = [n for n in TOKEN_PARTS if isinstance(fields, dict) and n in fields]
        if lists:
            how = "hr.pack([np.array(ids, np.uint16).tobytes(), ...])"
            return f" (with {lists[0]!r}: pack them as arrays, {how})"
    return ""


def _stored_as(store: Store, part: str, given: str | None) -> str:
    stated = set()
    for source in (segment.entry.source for segment in store.segments):
        dtypes = source.get("dtypes")
        dtype = dtypes.get(part) if dtypes else source.get("tokens", {}).get("dtype")
        stated |= {str(dtype)} - {"None"}
    if len(stated) > 1:
        raise ValueError(
            f"the tokens of {store.path} are {' and '.join(sorted(stated))}, expected one type: tokenize all "
            "with one tokenizer, or pack them as one type"
        )
    if given is None and not stated:
        if what := _no_tokens(store, part):
            raise ValueError(f"{store.path} holds {what}, expected tokens{_TOKENIZE}")
        raise ValueError(
            f"what are the tokens of {store.path}? The store does not say{_TOKENIZE}. If it holds tokens, pass "
            "stored='uint16', or pack it from a source of tokens"
        )
    if given is not None and stated - {given}:
        raise ValueError(f"stored is {given!r}, the store says that tokens are {min(stated)}")
    dtype = given or stated.pop()
    if dtype not in STORED:
        raise ValueError(f"stored is {dtype!r}, expected one of {', '.join(STORED)}")
    return dtype


def _sizes_from(documents: Documents, base: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return documents.sizes(numbers + base if base else numbers)


class ReadTokens(NamedTuple):
    """A batch of windows, and how it was read: its group's first batch accounts for all of them."""

    batch: TokenBatch
    native: _native.Batch | None
    ready: bool


class _Reads(NamedTuple):
    """A group of batches whose documents are being read."""

    group: list[Span]
    windows: NDArray[np.int64]
    pieces: Pieces
    slots: NDArray[np.int64] | slice
    """Which sample that is read each piece is of."""
    cuts: NDArray[np.int64]
    """Where it begins in what is read of that, in bytes."""
    reads: PendingReads


class WindowReader:
    """Reads batches of windows of one store.

    Args:
        documents: what is read.
        length: inputs of a window.
        pack: how documents become windows.
        dtype: what tokens are delivered as.
        pad: the token that fills a window.
        whole: read documents whole, through caches and limits.

    Raises:
        StoreError: a document is no whole number of tokens, or too long to be read whole, or all of them make
            no window.
        ValueError: an unknown packing or dtype.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        pack: Packing = "cut",
        dtype: TokenDtype = "int32",
        pad: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        if dtype not in get_args(TokenDtype):
            raise ValueError(f"dtype is {dtype!r}, expected 'int32' or 'int64'")
        self.documents = documents
        plans = [
            plan_windows(pack, count, partial(_sizes_from, documents, base), length)
            for base, count in documents.sources
        ]
        for name, plan in zip(documents.names or [documents.path], plans, strict=True):
            if not plan.windows:
                raise StoreError(
                    f"{name}: the documents have {plan.tokens:,} tokens, expected more than {length:,}: "
                    "they do not fill one window.",
                    next_step="Pass a smaller length, or more documents.",
                )
        self.plan = JoinedPlan(plans, [count for _, count in documents.sources])
        self.length = length
        self.whole = whole
        if whole:
            documents.check_longest(_WHOLE_BYTES_MAX)
        self._pad = pad
        self._full = pack == "cut"
        self._dtype = np.dtype(dtype)
        self._rows: list[NDArray[Any]] = []

    def batches(
        self,
        reader: BatchReads,
        groups_ahead: int,
        order: Order,
        epoch: int,
        spans: Iterable[Span],
        *,
        checked: Callable[[_native.Batch], None],
    ) -> Generator[ReadTokens, None, None]:
        """Yield the batch of each span, in order.

        Args:
            reader: of the documents' part; of the source where documents are read in pieces.
            groups_ahead: how many groups are read ahead.
            order: over the windows.
            epoch: to ask it for.
            spans: the batches' positions.
            checked: raises the error of a batch with failures.
        """
        pending: deque[_Reads] = deque()
        left = iter(spans)
        while True:
            while len(pending) <= groups_ahead and (spans_read := self._next_group(left)):
                pending.append(self._submit(reader, order, epoch, spans_read))
            if not pending:
                return
            group, windows, pieces, slots, cuts, reads = pending.popleft()
            ready = reads.done
            native = reads.take()
            checked(native)
            rows = self._placed(native, windows, pieces, native.offsets[slots] + cuts)
            borders = [*accumulate((b - a for a, b in group), initial=0)]
            bounds = np.searchsorted(pieces.row, borders)
            filled = np.diff(np.concatenate([[0], np.cumsum(pieces.size)])[bounds]).tolist()
            for k, (first, last) in enumerate(pairwise(borders)):
                batch = TokenBatch(
                    rows[first:last], windows[first:last], partial(pieces.of, bounds[k : k + 2], first),
                    epoch=epoch, position=group[k][0], nbytes=filled[k] * self.documents.width,
                    sources_of=self._names_of if self.documents.names else None,
                )  # fmt: skip
                yield ReadTokens(batch, None if k else native, bool(k) or ready)
            del rows, batch, native  # so that memory can be used again

    def _names_of(self, windows: NDArray[np.int64]) -> list[str]:
        return [self.documents.names[number] for number in self.plan.source_of(windows).tolist()]

    def _next_group(self, spans: Iterable[Span]) -> list[Span]:
        group = list(islice(spans, 1))
        if group:
            windows = max(1, group[0][1] - group[0][0])
            group += islice(spans, _GROUP_TOKENS // (windows * self.length))
        return group

    def _submit(self, reader: BatchReads, order: Order, epoch: int, group: list[Span]) -> _Reads:
        begin, end = group[0][0], group[-1][1]
        if end - begin == sum(b - a for a, b in group):  # one rank: one piece of the order
            windows = order.wrapped(epoch, begin, end)
        else:
            windows = np.concatenate([order.wrapped(epoch, *span) for span in group])
        pieces = self.plan.pieces(windows)
        start = pieces.start * self.documents.width
        if self.whole:
            documents, slots = np.unique(pieces.document, return_inverse=True)
            return _Reads(group, windows, pieces, slots, start, reader.submit(documents))
        nbytes = self.documents.nbytes(pieces.document)
        checked = nbytes <= _CHECKED_BYTES_MAX
        first: NDArray[np.int64] = np.where(checked, 0, start)
        size: NDArray[np.int64] = np.where(checked, nbytes, pieces.size * self.documents.width)
        ranges = first.view(np.uint64), size.view(np.uint64)
        reads = reader.submit(pieces.document, ranges)  # type: ignore[call-arg]  # the source's own
        return _Reads(group, windows, pieces, slice(None), start - first, reads)

    def _placed(
        self,
        native: _native.Batch,
        windows: NDArray[np.int64],
        pieces: Pieces,
        offsets: NDArray[np.int64],
    ) -> NDArray[Any]:
        rows = self._free_rows(len(windows))
        if not self._full:
            rows.fill(self._pad)
        dests = pieces.row * (self.length + 1) + pieces.place
        fits = _native.place_tokens(
            native.data, self.documents.stored, offsets, dests, pieces.size, rows.reshape(-1),
        )  # fmt: skip
        if not fits:
            raise StoreError(
                f"a token of windows {int(windows.min())} to {int(windows.max())} does not fit into "
                f"{self._dtype}: tokens are stored as {self.documents.stored}.",
                next_step="Pass dtype='int64', or say what tokens are: stored='uint16', for example.",
            )
        return rows

    def _free_rows(self, windows: int) -> NDArray[Any]:
        """Memory for rows that nobody looks at any more: what is touched first costs four times the copy."""
        for rows in self._rows:
            # Our list's, this loop's and the call's: no view is left.
            if len(rows) >= windows and sys.getrefcount(rows) == 3:
                return rows[:windows]
        rows = np.empty((windows, self.length + 1), self._dtype)
        self._rows = [rows, *self._rows[: _ROWS_KEPT - 1]]
        return rows[:windows]
