"""Lines and lists: JSON Lines, whose every line is a sample, tables whose rows name files, COCO's annotations.

A JSON Lines file is used in place: each sample is a line's bytes without its end. A manifest (CSV, TSV) has a
column of paths, relative to itself, and may have one of labels; the samples are the files. A COCO file lists
pictures and what is to be seen on each; a sample is a picture and its annotations.
"""

from __future__ import annotations

import csv
import json
import os
import re
from codecs import BOM_UTF8
from collections import Counter
from decimal import Decimal
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.store.directory import columns_of
from headrace.store.manifest import VolumeEntry
from headrace.store.sources.scan import (
    EXACT,
    LABEL_NAMES,
    UNREAD_LABELS,
    Problem,
    Rows,
    Scan,
    SourceOptions,
    Stream,
    StreamedRow,
    StreamItem,
    listed,
    no_samples,
    raise_problems,
    refused,
    scan_rows,
    source_entry,
    stream_rows,
    unreadable,
    unsound,
)
from headrace.store.sources.shards import Window, is_compressed, map_files, opened, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.errors import SourceError

# -- JSON Lines and lines of text ----------------------------------------------------------------------

_BLOCK: Final = 4 << 20
_LINE_BYTES_MAX: Final = 1 << 30
_HEAD_BYTES: Final = 1 << 20
_HEAD_LINES: Final = 16
_FEED, _RETURN, _BLANKS = ord("\n"), ord("\r"), b" \t\r"


def open_jsonl(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """The lines of JSON Lines files that hold something; a stream where a file is compressed."""
    if options.column is not None:
        raise ValueError(
            f"column={options.column!r} is for tables; a sample of JSON Lines is its line"
        )
    notes = _unread_labels(paths[0]) if options.label is None else []
    return _open_lines("jsonl", paths, options, notes)


def open_lines(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """The lines of text files that hold something, each a sample; a stream where a file is compressed."""
    return _open_lines("lines", paths, options, [])


def _open_lines(
    kind: str, paths: list[str], options: SourceOptions, notes: list[str]
) -> Scan | Stream:
    source, as_json, label = source_entry(kind, paths, options), kind == "jsonl", options.label
    compressed = next((path for path in paths if is_compressed(read_head(path, 8))), None)
    if compressed is not None:
        return stream_rows(
            paths, lambda path: _stream(path, label, as_json=as_json), source, options,
            reason=f"{compressed}: it is compressed", notes=notes, label=label or None,
        )  # fmt: skip
    files = map_files(
        paths, lambda path: _list_lines(path, label, as_json=as_json), options.workers
    )
    return scan_rows(paths, files, source, options, notes=notes)


def _unread_labels(path: str) -> list[str]:
    """The note that lines have a label, which nobody asked for: each line would have to be parsed."""
    left = _HEAD_BYTES
    with opened(path) as f:
        for row in range(_HEAD_LINES):
            line = f.readline(left)
            left -= len(line)
            try:
                value = json.loads(line.removeprefix(BOM_UTF8)) if line.strip() else None
            except (ValueError, RecursionError):
                return []  # broken, or too long to be looked at; who lists the lines says which
            fields = value if isinstance(value, dict) else {}
            for name in LABEL_NAMES:
                if _whole(fields.get(name)) is not None:
                    how = f"--label {name} (in Python label={name!r}) takes it, --label '' ends this note"
                    return [f"{UNREAD_LABELS}line {row + 1} has {name!r}; {how}"]
    return []


def _list_lines(path: str, label: str | None, *, as_json: bool) -> Rows:
    with Window(path) as window:
        start, length, spaced = _find_lines(window)
        if as_json:
            for row in np.searchsorted(start, spaced).tolist():
                if not window.read(int(start[row]), int(length[row])).strip(_BLANKS):
                    length[row] = 0
        kept = np.flatnonzero(length > 0)
        if len(start) == 1:
            _check_feeds(path, window, int(start[0]), int(length[0]))
        for row in kept[: 1 if as_json else 0].tolist():
            _check(path, row, window.read(int(start[row]), int(length[row])))
        labels = None
        if label:
            numbers = (
                _label(path, row, window.read(int(start[row]), int(length[row])), label)
                for row in kept.tolist()
            )
            labels = np.fromiter(numbers, np.int64, len(kept))
        place = (start[kept].astype(np.uint64), length[kept].astype(np.uint64))
        everything = len(kept) == len(start)
        return Rows(
            window.volume(), len(start), {b"": place}, labels, kept=None if everything else kept
        )


def _find_lines(window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where lines begin, and their lengths without their ends, each (lines,); and which begin with a blank.

    Lines end as on Unix or Windows. An editor's mark at the beginning of the file is no part of the first one.
    """
    first = len(BOM_UTF8) if window.read(0, len(BOM_UTF8)) == BOM_UTF8 else 0
    ends, cut, spaced = [np.array([first - 1])], [np.zeros(0, bool)], [np.zeros(0, np.int64)]
    last = b"\n"
    for at in range(first, window.size, _BLOCK):
        # The byte before comes along: it says whether a line begins here.
        data = np.frombuffer(last + window.read(at, min(_BLOCK, window.size - at)), np.uint8)
        last = data[-1:].tobytes()
        feeds = np.flatnonzero(data == _FEED)
        begins = feeds[: len(feeds) - (last == b"\n")] + 1
        spaced.append(begins[np.isin(data[begins], list(_BLANKS))] + (at - 1))
        feeds = feeds[feeds > 0]
        ends.append(feeds + (at - 1))
        cut.append(data[feeds - 1] == _RETURN)
    if last != b"\n":
        ends.append(np.array([window.size]))
        cut.append(np.array([last == b"\r"]))
    end = np.concatenate(ends).astype(np.int64)
    return end[:-1] + 1, np.diff(end) - 1 - np.concatenate(cut), np.concatenate(spaced)


def _check_feeds(path: str, window: Window, start: int, length: int) -> None:
    """Looks whether the only line of a file is many, which end as on old Macs."""
    for at in range(start, start + length, _BLOCK):
        if b"\r" in window.read(at, min(_BLOCK, start + length - at)):
            raise _old_ends(path)


def _old_ends(path: str) -> SourceError:
    return refused(
        path, "its lines end with carriage returns alone, as on old Macs.",
        r"Convert it: tr '\r' '\n' < OLD > NEW.",
    )  # fmt: skip


def parse_line(line: bytes | memoryview, name: str | None = None) -> Any:
    """What a line of JSON says.

    Raises ValueError if it is no JSON in UTF-8, or has the field `name`, which is wanted, twice: of two that
    are called so, each reader takes another one.
    """
    text = str(line, "utf-8")
    value = json.loads(text)
    if name and isinstance(value, dict) and text.count(f'"{name}"') > 1:
        pairs = json.loads(text, object_pairs_hook=list)
        if sum(key == name for key, _ in pairs) > 1:
            raise ValueError(f"it has {name!r} twice")
    return value


def _check(path: str, row: int, line: bytes, name: str | None = None) -> dict[str, Any]:
    """What a line says; the first one of each file is looked at, and all that a label is taken from."""
    try:
        value = parse_line(line, name)
    except (ValueError, RecursionError) as e:
        raise refused(
            path, f"line {row + 1} is no JSON: {e}.",
            "Mend it (lines are JSON in UTF-8); or take the file as it is: --as files (format='files').",
        ) from e  # fmt: skip
    return value if isinstance(value, dict) else {}


def _label(path: str, row: int, line: bytes, name: str) -> int:
    """The label that a line says, -1 for none: nothing, null, or NaN, which libraries write for it."""
    value = _check(path, row, line, name).get(name)
    if value is None or (isinstance(value, float) and isnan(value)):
        return -1
    number = _whole(value)
    if number is None:
        raise refused(
            path,
            f"{name!r} of line {row + 1} is {repr(value)[:80]}, expected an integer (words and true or false "
            "are no labels of JSON Lines).",
            "Write the class's number; null, or no such field, is no label.",
        )
    if not -1 <= number < 1 << 63:
        raise refused(
            path,
            f"{name!r} of line {row + 1} is {number}, expected -1 to 2^63-1.",
            "Mend the line.",
        )
    return number


def _whole(value: object) -> int | None:
    """A whole number that JSON may write with a point, unless a float does not hold it exactly."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _stream(path: str, label: str | None, *, as_json: bool) -> Iterator[tuple[int, StreamedRow]]:
    row, checked = -1, not as_json
    with opened(path) as f:
        while line := f.readline(_LINE_BYTES_MAX):
            row += 1
            if len(line) == _LINE_BYTES_MAX and not line.endswith(b"\n"):
                raise refused(
                    path, f"line {row + 1} has {len(line):,} bytes or more, expected less.",
                    "Decompress the file: then lines of any length are read.",
                )  # fmt: skip
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            line = line if row else line.removeprefix(BOM_UTF8)
            if not row and b"\r" in line and not f.peek(1):
                raise _old_ends(path)
            if not (line.strip(_BLANKS) if as_json else line):
                continue
            if not checked:
                _check(path, row, line)
                checked = True
            number = _label(path, row, line, label) if label else -1
            # How many there are is known at the end only: names have room for a billion.
            yield 10**9, StreamedRow(row, ((b"", line),), number)


# -- manifests ---------------------------------------------------------------------------------------

_PATH_NAMES: Final = (
    "path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img_path",
    "audio",
)  # fmt: skip
_FIELD_BYTES_MAX: Final = 1 << 20


def open_manifest(paths: list[str], options: SourceOptions) -> Scan:
    """The files that the rows of a CSV or TSV file name, each a sample."""
    if len(paths) > 1:
        raise refused(
            paths[1], "is a second manifest, expected one.", "Join them, or append stores."
        )
    path = paths[0]
    names, lines, labels, left = _read_manifest(path, options)
    root = os.path.dirname(os.path.abspath(path))
    source = {"kind": "manifest", "path": os.path.abspath(path), **options.to_json()}
    files = [os.path.join(root, name) for name in names]
    scan = scan_listed(path, files, labels, source, options, lines=lines)
    if left:
        scan.notes.append(f"columns left out: {listed(left)}")
    return scan


def _read_manifest(
    path: str, options: SourceOptions
) -> tuple[
    list[str], list[int], tuple[NDArray[np.int64] | None, tuple[bytes, ...] | None], list[str]
]:
    """Paths and the lines that name them, labels and classes; and the names of the columns that are neither."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            first = f.readline(_FIELD_BYTES_MAX)
            rows = csv.reader(
                chain([first], f), delimiter="\t" if "\t" in first else ",", strict=True
            )
            header = next(rows, [])
            at, label = _choose_columns(path, header, options)
            table, lines, line = [], [], rows.line_num + 1
            for row in rows:
                if row:
                    table.append(row)
                    lines.append(line)  # a quoted cell may hold several
                line = rows.line_num + 1
    except OSError as e:
        raise unreadable(path, e, "Check the path.") from e
    except (csv.Error, UnicodeDecodeError) as e:
        raise unsound(path, "CSV", e) from e
    for line, row in zip(lines, table, strict=True):
        if len(row) != len(header):
            raise refused(
                path,
                f"line {line} has {len(row)} fields, the header {len(header)}.",
                "Mend the line.",
            )
    if not table:
        raise no_samples(path)
    names = [row[at] for row in table]
    left = [name for i, name in enumerate(header) if i not in (at, label)]
    if label is None:
        return names, lines, (None, None), left
    labels = _labels_of_words([row[label] for row in table], lines, path, header[label])
    return names, lines, labels, left


# What pandas reads as null unless told otherwise; no other case of letters: Na may be sodium.
_NULLS: Final = frozenset(
    ("", "nan", "NaN", "-nan", "-NaN", "NA", "N/A", "n/a", "<NA>", "#N/A", "#NA", "#N/A N/A", "NULL", "null",
     "None", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN")
)  # fmt: skip
_NUMBER: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def _labels_of_words(
    words: Sequence[str], lines: Sequence[int], path: str, name: str
) -> tuple[NDArray[np.int64], tuple[bytes, ...] | None]:
    """The labels that a table's cells say, (cells,), -1 for none: whole numbers, or else classes by name.

    For errors there are the line of each cell, the table's path and the column's name. Returns the labels,
    and the names of classes 0, 1, ..., sorted, if the cells are words. Raises SourceError if numbers and
    words are mixed, or a number is not whole or out of range.
    """

    def cell(word: str) -> str:
        return f"line {lines[words.index(word)]}: {name!r} is {repr(word)[:80]}"

    distinct = {word: word.strip() for word in dict.fromkeys(words)}
    given = [word for word, text in distinct.items() if text not in _NULLS]
    numbers = [word for word in given if _NUMBER.fullmatch(distinct[word])]
    how = f"or take none: --label '' (in Python label='') instead of {name!r}."
    classes = [] if numbers else sorted(given)
    values = {word: i for i, word in enumerate(classes)}
    if 0 < len(numbers) < len(given):
        wrong = next(word for word in given if not _NUMBER.fullmatch(distinct[word]))
        raise refused(
            path, f"{cell(wrong)}, expected a whole number as in {cell(numbers[0])}.",
            f"Mend the cell (an empty one is no label), write words alone to have classes by name, {how}",
        )  # fmt: skip
    for word in numbers:
        number = Decimal(distinct[word])  # exact, where a float is not
        if not -1 <= number < 1 << 63 or number != int(number):
            raise refused(
                path, f"{cell(word)}, expected a whole number, -1 (none) to 2^63-1.",
                f"Mend the cell, name another column of labels, {how}",
            )  # fmt: skip
        values[word] = int(number)
    labels = np.fromiter((values.get(word, -1) for word in words), np.int64, len(words))
    return labels, tuple(word.encode() for word in classes) or None


def _choose_columns(
    path: str, header: Sequence[str], options: SourceOptions
) -> tuple[int, int | None]:
    """Numbers of the column of paths and of that of labels."""
    lower = [name.strip().lower() for name in header]
    if options.column is not None and (len(options.column) > 1 or options.column[0] not in header):
        raise refused(
            path, f"its columns are {listed(header)}.", "Name the one of paths: column='path'."
        )
    if options.column is not None:
        at = list(header).index(options.column[0])
    else:
        known = [name for name in _PATH_NAMES if name in lower]
        if not known:
            raise refused(
                path, f"is a table without a column of paths (its columns are {listed(header)}).",
                "Name it: column='...'; or pack an iterable over the rows.",
            )  # fmt: skip
        at = lower.index(known[0])
    if options.label:
        if options.label not in header:
            raise refused(
                path, f"there is no column {options.label!r}: {listed(header)}.", "Name another."
            )
        return at, list(header).index(options.label)
    named = () if options.label == "" else (*LABEL_NAMES, "class", "target")
    return at, next((lower.index(name) for name in named if name in lower), None)


def scan_listed(
    where: str,
    paths: Sequence[str],
    labels: tuple[NDArray[np.int64] | None, tuple[bytes, ...] | None],
    source: dict[str, Any],
    options: SourceOptions,
    *,
    lines: Sequence[int] | None = None,
) -> Scan:
    """Files that somebody listed by absolute paths, each a sample, in this order.

    `labels` are (paths,) int64, -1 for none, or None; and the names of labels 0, 1, ..., or None. For errors
    there are `where` the list is, and `lines`, which name each file; None for rows that count from 0.
    """
    root = os.path.commonpath([os.path.dirname(os.path.normpath(path)) for path in paths])

    def row(i: int) -> str:
        return f"row {i}" if lines is None else f"line {lines[i]}"

    kept: dict[int, os.stat_result] = {}
    problems: list[Problem] = []
    for i, path in enumerate(paths):
        try:
            kept[i] = os.stat(path)
        except OSError as e:
            problems.append(Problem(path, f"{row(i)} cannot be read: {e.strerror}"))
        except ValueError as e:  # a NUL in its name
            problems.append(Problem(repr(path), f"{row(i)} names no file: {e}"))
    if options.on_error == "raise":
        raise_problems(where, problems)
    if not kept:
        raise no_samples(where)
    names = [os.fsencode(os.path.relpath(paths[i], root)) for i in kept]
    if len(set(names)) < len(names):
        raise refused(
            where,
            f"shows a file twice ({len(names) - len(set(names)):,} times in all), expected each once: a "
            "file's path is its sample's name.",
            "Give an order that repeats samples to the loader instead.",
        )
    zeros = np.zeros(len(names), np.uint64)
    columns = columns_of(
        names, zeros, zeros, np.array([s.st_size for s in kept.values()], np.uint64),
        mtime=np.array([s.st_mtime_ns for s in kept.values()], np.int64),
        labels=None if labels[0] is None else labels[0][list(kept)],
        class_names=labels[1],
    )  # fmt: skip
    modes = {(s.st_mode, s.st_gid) for s in kept.values()}
    return Scan(columns, (VolumeEntry("tree", root),), source, problems, modes=modes)


# -- COCO --------------------------------------------------------------------------------------------

_COCO_BYTES_MAX: Final = 4 << 30


def open_coco(paths: list[str], options: SourceOptions) -> Stream:
    """The pictures of a COCO file with their annotations, to be packed.

    Each sample is named as its picture and has two parts: `annotations`, the JSON list of what the file says of
    the picture, unchanged, and `image`. Its label is its category, numbered in the order of the categories'
    ids, where all its annotations have the same; else none.
    """
    if len(paths) > 1:
        raise refused(paths[1], "is a second COCO file, expected one.", "Append stores.")
    path = paths[0]
    images, annotations, categories = _read_coco(path)
    root = _folder_of_pictures(path, images[0]["file_name"])
    of_image: dict[int | str | None, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in annotations:
        image_id = _id(annotation, "image_id")
        if image_id not in of_image:
            raise refused(
                path, f"an annotation is of the image {image_id!r}, which is not listed.",
                "Fetch the data set again.",
            )  # fmt: skip
        of_image[image_id].append(annotation)
    ordered = sorted(categories)
    number: dict[Any, int] = {category: i for i, category in enumerate(ordered)}
    skipped: list[Problem] = []

    def items() -> Iterator[StreamItem]:
        skipped.clear()
        for image in images:
            file = os.path.join(root, image["file_name"])
            try:
                with open(file, "rb") as f:
                    data = f.read()
            except (OSError, ValueError) as e:
                problem = Problem(file, f"cannot be read: {e}")
                if options.on_error == "raise":
                    raise_problems(path, [problem])
                skipped.append(problem)
                continue
            listed_here = of_image[image["id"]]
            labels = {number.get(_id(a, "category_id"), -1) for a in listed_here}
            text = json.dumps(listed_here, ensure_ascii=False, separators=(",", ":")).encode()
            yield StreamItem(
                os.fsencode(image["file_name"]), ((b"annotations", text), (b"image", data)),
                labels.pop() if len(labels) == 1 else -1,
            )  # fmt: skip

    names = tuple(categories[category].encode() for category in ordered)
    source = {"kind": "coco", "path": os.path.abspath(path), "pictures": root}
    return Stream(
        items, source, reason="annotations are spread over a JSON file",
        class_names=lambda: names or None, count=len(images), skipped=skipped,
    )  # fmt: skip


def _read_coco(
    path: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, str]]:
    """Images, annotations, and the categories' names by their ids."""
    try:
        if (size := os.path.getsize(path)) > _COCO_BYTES_MAX:
            raise refused(
                path, f"has {size:,} bytes, expected at most {_COCO_BYTES_MAX:,} of JSON.", "Split it."
            )  # fmt: skip
        with open(path, "rb") as f:
            document = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise unsound(path, "JSON", e) from e
    lists: list[Any] = [
        document.get(key) if isinstance(document, dict) else None for key in _COCO_KEYS
    ]
    good = all(isinstance(x, list) and all(isinstance(y, dict) for y in x) for x in lists)
    images, annotations, categories = lists
    if not good or not all(
        isinstance(image.get("file_name"), str) and _id(image, "id") is not None for image in images
    ):
        raise refused(
            path, f"is JSON without COCO's {', '.join(_COCO_KEYS)}: lists of objects, images with an id and a "
            "file_name.", "Name the folder that it belongs to, or pack an iterable over it.",
        )  # fmt: skip
    if not images:
        raise no_samples(path)
    ids = Counter(image["id"] for image in images).most_common(1)
    if ids[0][1] > 1:
        raise refused(path, f"{ids[0][1]} images have the id {ids[0][0]!r}.", "Mend the file.")
    names = {_id(c, "id"): str(c.get("name", _id(c, "id"))) for c in categories}
    return (
        images,
        annotations,
        {number: name for number, name in names.items() if isinstance(number, int)},
    )


def _id(entry: dict[str, Any], key: str) -> int | str | None:
    value = entry.get(key)
    return value if isinstance(value, (int, str)) else None


_COCO_KEYS: Final = ("images", "annotations", "categories")


def _folder_of_pictures(path: str, first: str) -> str:
    """Where COCO's pictures lie: beside the file, or beside its folder, as `images` or by the split's name."""
    here = os.path.dirname(os.path.abspath(path))
    above = os.path.dirname(here)
    split = os.path.splitext(os.path.basename(path))[0].rpartition("_")[2]
    tried = [here, *(os.path.join(base, *rest) for base in (here, above)
                     for rest in ((split,), ("images", split), ("images",)))]  # fmt: skip
    for folder in tried:
        if os.path.isfile(os.path.join(folder, first)):
            return folder
    raise refused(
        path, f"its first picture, {first}, lies in none of {', '.join(tried)}.",
        "Put the pictures there, or a link to them.",
    )  # fmt: skip
