"""`headrace pack`, `index`, `append`, `verify`, `repair`: stores are made, grow, are checked and mended."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from headrace.base.text import bytes_text, count_text, duration_text
from headrace.cli import exit_codes
from headrace.cli.options import FullOutput, Group, StorageOptions, TrustOptions, endings_of
from headrace.cli.printing import Output, plain_table
from headrace.cli.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.base.progress import Progress
    from headrace.store.packing import WriteReport
    from headrace.store.repair import RepairReport
    from headrace.store.store import Store
    from headrace.store.verify import BadSample, VerifyReport

_ROWS_SHOWN = 20
_DECODED_AT_ONCE = 64

Sources = Annotated[
    list[str],
    Argument(
        help="A folder of files or shards; or tar, TFRecord, npy, HDF5, Parquet, Arrow, JSONL, CSV files.",
        metavar="SOURCE...",
    ),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the store at TARGET, atomically.")]
Workers = Annotated[int | None, Option(min=1, help="Threads that read.")]

_READING: dict[str, Any] = {
    "restart": Annotated[
        bool, Option("--restart", help="Drop what an interrupted run left, do not resume.")
    ],
    "extensions": Annotated[
        str | None,
        Option("--ext", help="Folders: only files that end so, as 'jpg,png'.", metavar="ENDINGS"),
    ],
    "skip_errors": Annotated[
        bool, Option("--skip-errors", help="Leave out what cannot be read, list it, exit with 1.")
    ],
    "prefix_names": Annotated[
        bool,
        Option("--prefix-names", help="Several files: put the file's name before its samples'."),
    ],
    "column": Annotated[
        list[str] | None,
        Option(
            "--column",
            help="HDF5, Parquet, Arrow, MDS: what holds the samples' bytes; several: its parts.",
            metavar="NAME",
        ),
    ],
    "label": Annotated[
        str | None,
        Option(
            "--label",
            help="The same: what holds integer labels; '' for none, of any source.",
            metavar="NAME",
        ),
    ],
    "format": Annotated[
        str | None,
        Option(
            "--as",
            help="What a folder holds: files, image, audio, video, or shards: tar, jsonl, parquet, ...; "
            "what the tokens of bare files are: uint16, ...",
            metavar="KIND",
        ),
    ],
    "volume_bytes": Annotated[
        int | None,
        Option(min=8192, help="Begin a new file before one grows beyond this.", metavar="BYTES"),
    ],
    "workers": Annotated[int | None, Option(min=1, help="Threads that read the source.")],
}
"""How a source is read, in the order of the help."""


def _reading(*, extensions: str | None, column: list[str] | None, **options: Any) -> dict[str, Any]:
    """What stood on the command line, as the library takes it."""
    options["extensions"] = None if extensions is None else endings_of(extensions)
    options["column"] = tuple(column) if column else None
    if "restart" in options:
        options["resume"] = not options.pop("restart")
    if "skip_errors" in options:
        options["on_error"] = "skip" if options.pop("skip_errors") else "raise"
    if options.get("volume_bytes", 0) is None:  # its default is the library's
        del options["volume_bytes"]
    return options


def _reading_without(*names: str) -> Group:
    return Group(_reading, **{n: each for n, each in _READING.items() if n not in names})


PackReading = Annotated[dict[str, Any], _reading_without()]
IndexReading = Annotated[dict[str, Any], _reading_without("restart", "volume_bytes")]
TextReading = Annotated[dict[str, Any], _reading_without("label", "volume_bytes")]
StageReading = Annotated[dict[str, Any], _reading_without("restart", "skip_errors", "volume_bytes")]


Images = Annotated[
    str | None,
    Option(
        help="Rewrite JPEGs for quicker decoding: 'lossless', or smaller and lossy: 'short=512,quality=92'; "
        "or store pixels: 'decoded,short=256'.",
        metavar="HOW",
    ),
]


Shuffle = Annotated[
    int | None,
    Option(
        min=0,
        metavar="SEED",
        help="Pack in a random order, this seed's: a blocked order then mixes classes like a full shuffle.",
    ),
]


def source_of(sources: list[str]) -> str | list[str]:
    """One path as it is (it may be a folder or a pattern), several as a list of files."""
    return sources[0] if len(sources) == 1 else sources


def pack(
    source: Sources,
    target: str = Argument(..., help="The store's folder or URL; appears when all is done."),
    *,
    overwrite: Overwrite = False,
    images: Images = None,
    shuffle: Shuffle = None,
    reading: PackReading,
    storage: StorageOptions,
    output: FullOutput,
) -> int:
    """Copy a folder, tar, TFRecord, npy, HDF5, Parquet, Arrow, MDS or ArrayRecord into a new store.

    When it is interrupted, the same command goes on where it stopped.
    """
    from headrace.store.pack import pack as pack_store

    with progress(output, "packing", bytes_are="read") as tell:
        report = pack_store(
            source_of(source), target, overwrite=overwrite, images=images, shuffle=shuffle, progress=tell,
            storage_options=storage, **reading,
        )  # fmt: skip
    return _print_written(output, report, "packed")


def tokenize(
    source: Sources,
    target: str = Argument(..., help="The store's folder; appears when all is done."),
    *,
    tokenizer: str = Option(
        ..., metavar="FILE", help="The tokenizer.json of the tokenizers library."
    ),
    bos: str | None = Option(
        None, metavar="TOKEN", help="Begins each document: a name or a number."
    ),
    eos: str | None = Option(None, metavar="TOKEN", help="Ends each document, likewise."),
    field: str = Option("text", help="JSON Lines: the field that holds the text.", metavar="NAME"),
    overwrite: Overwrite = False,
    reading: TextReading,
    output: FullOutput,
) -> int:
    """Encode texts into a store whose samples are documents of tokens.

    Texts are JSON Lines, text files (--as lines: each line is a document), or a column of a table. When it is
    interrupted, the same command goes on where it stopped.
    """
    from headrace.store.manifest import load_manifest
    from headrace.store.tokenizing import tokenize as tokenize_texts

    column = reading.pop("column")
    if column is not None and len(column) > 1:
        raise ValueError(f"--column is given {len(column)} times, expected the one of texts")
    with progress(output, "tokenizing", "tokens") as tell:
        report = tokenize_texts(
            source_of(source), target, tokenizer=tokenizer, bos=bos, eos=eos, field=field,
            column=column[0] if column else None, overwrite=overwrite, progress=tell, **reading,
        )  # fmt: skip
    stated = load_manifest(report.path).segments[0].source["tokens"]
    tokens = report.bytes // (2 if stated["dtype"] == "uint16" else 4)
    if output.as_json:
        output.document(
            {"action": "tokenized", "tokens": tokens, "dtype": stated["dtype"], "report": report}
        )
        return exit_codes.FINDING if report.skipped else exit_codes.OK
    rate = tokens / max(report.seconds, 1e-9)
    kind = f"{stated['dtype']}, vocabulary {stated['vocabulary']:,}"
    output.line(f"{tokens:,} tokens ({kind}), {rate:,.0f} tokens/s")
    return _print_written(output, report, "tokenized")


def append(
    source: Sources,
    store: str = Argument(..., help="The store's folder."),
    *,
    images: Images = None,
    shuffle: Shuffle = None,
    reading: PackReading,
    output: FullOutput,
) -> int:
    """Add the samples of a source to a store, as a new segment.

    Whoever has the store open keeps what they opened; who opens it later sees the new samples too.
    """
    from headrace.store.pack import append as append_to_store

    with progress(output, "appending", bytes_are="read") as tell:
        report = append_to_store(
            source_of(source), store, images=images, shuffle=shuffle, progress=tell, **reading
        )
    return _print_written(output, report, "appended")


def index(
    source: Sources,
    target: str = Argument(..., help="The store's folder or URL; holds the directory only."),
    *,
    overwrite: Overwrite = False,
    checksum: bool = Option(
        True, help="Read every sample once and keep its checksum, to check later reads."
    ),
    reading: IndexReading,
    storage: StorageOptions,
    output: FullOutput,
) -> int:
    """Index a folder, uncompressed tar, TFRecord, npy, HDF5, Parquet, Arrow or MDS in place: no copy.

    The data must stay where it is and as it is; headrace notices when it does not.
    """
    from headrace.store.pack import index as index_source

    with progress(output, "indexing") as tell:
        report = index_source(
            source_of(source), target, overwrite=overwrite, checksum=checksum, progress=tell,
            storage_options=storage, **reading,
        )  # fmt: skip
    return _print_written(output, report, "indexed")


def _print_written(output: Output, report: WriteReport, done: str) -> int:
    """Print what was written and return the exit code; `done` is the verb: "packed"."""
    if output.as_json:
        output.document({"action": done, "report": report})
    else:
        rate = report.bytes / max(report.seconds, 1e-9)
        written = "" if done == "indexed" else " written"
        what = "documents" if done == "tokenized" else f"samples ({report.kind})"
        output.line(
            f"{done} {count_text(report.samples)} {what}, {bytes_text(report.bytes)}, "
            f"in {duration_text(report.seconds)} ({bytes_text(rate)}/s{written}): {report.path}"
        )
        if report.resumed_samples:
            output.remark(f"{count_text(report.resumed_samples)} of them by an interrupted run")
        for line in report.images.lines() if report.images else ():
            output.line(line)
        for note in report.notes:
            output.remark(note)
        for problem in report.skipped[:_ROWS_SHOWN]:
            output.remark(f"left out: {problem}")
        _remark_hidden(output, len(report.skipped) - _ROWS_SHOWN)
    return exit_codes.FINDING if report.skipped else exit_codes.OK


def verify(
    store: str = Argument(..., help="The store's folder or URL."),
    *,
    decode: bool = Option(
        False, "--decode", help="Decode every picture too: checksums are of bytes, not of pictures."
    ),
    part: str | None = Option(
        None, metavar="NAME", help="With --decode: the samples' part that is the picture."
    ),
    workers: Workers = None,
    storage: StorageOptions,
    trust: TrustOptions = None,
    output: FullOutput,
) -> int:
    """Read and check everything; exit with 1 if anything is bad.

    Lists the first bad samples, with -v all of them, with --json all of them with all details.
    """
    from headrace.store.verify import verify as verify_store

    with progress(output, "verifying") as tell:
        report = verify_store(
            store, workers=workers, progress=tell, storage_options=storage, trust=trust
        )
    decoded, mendable = None, not report.ok
    if decode and not (report.problems or report.bad_blocks or report.volume_problems):
        import headrace

        with (
            headrace.open(store, storage_options=storage, trust=trust) as opened,
            progress(output, "decoding") as tell,
        ):
            decoded = _decode_all(opened, report, part, workers, tell)
    if output.as_json:
        output.document({"ok": report.ok, "decoded_samples": decoded, "report": report})
        return exit_codes.OK if report.ok else exit_codes.FINDING
    _print_verified(output, report)
    if decode:
        what = "no picture was decoded: the store itself is damaged"
        output.line(what if decoded is None else f"decoded {count_text(decoded)} pictures")
        if decoded == 0 and report.bad_samples:
            output.line("none of the samples is a picture; --part names the part that is")
    if report.ok:
        pictures = " (--decode looks at pictures, too)" if report.unit == "samples" else ""
        output.line("all good" if decode else f"all good, byte for byte{pictures}")
        return exit_codes.OK
    bad = f"{count_text(len(report.bad_samples))} bad {report.unit}"
    others = len(report.volume_problems) + len(report.bad_blocks) + len(report.problems)
    output.line(f"{bad}, {count_text(others)} other problems")
    if mendable:
        output.remark(f"  next: headrace repair {report.path}")
    else:
        output.remark("  next: mend these pictures in the source or take them out, and pack again")
    return exit_codes.FINDING


def _decode_all(
    store: Store, report: VerifyReport, part: str | None, threads: int | None, tell: Progress | None
) -> int:
    """Decode the picture of every sample; those that cannot be decoded go to the report.

    Returns:
        How many pictures were decoded.
    """
    import headrace
    from headrace.store.verify import BadSample

    known = {bad.index for bad in report.bad_samples}
    images = headrace.Images(size=8, crop="stretch", part=part)
    done, picture = 0, store.parts[images.part_of(store.parts)]
    loader = headrace.loader(
        store, _DECODED_AT_ONCE, order="sequential", rank=0, world_size=1, decode=images,
        decode_threads=threads, on_error="skip",
    )  # fmt: skip
    warns = logging.getLogger("headrace")
    level = warns.level
    with contextlib.ExitStack() as stack:
        stack.callback(loader.close)
        # Of what is left out: here all of it is reported.
        stack.callback(warns.setLevel, level)
        warns.setLevel(logging.ERROR)
        for batch in loader:
            done += len(batch)
            if tell is not None:
                tell(done + len(loader.skipped), len(store), 0, None)
    for each in loader.skipped:
        if each.index in known:
            continue
        segment = store.segment_of(each.index)
        names, extents = segment.directory.part_names, segment.extents(each.index)
        extent = next((e for e in extents if os.fsdecode(names[e.part]) == picture), extents[0])
        where = segment.volumes.paths[extent.volume]
        if segment.entry.volumes[extent.volume].kind == "tree":
            where = f"{where}/{each.name}"
        report.bad_samples.append(
            BadSample(
                each.index, each.name, extent.part, where, extent.offset, extent.length, "picture",
                each.reason.removeprefix(f"sample {each.index} ({each.name!r}) "), "a picture",
            )
        )  # fmt: skip
    report.bad_samples.sort(key=lambda bad: (bad.index, bad.part))
    return done


def _print_verified(output: Output, report: VerifyReport) -> None:
    for problem in report.problems:
        output.line(f"bad: {problem}")
    for volume in report.volume_problems:
        output.line(f"bad volume: {volume.message}")
    for path, offset in report.bad_blocks[:_ROWS_SHOWN]:
        output.line(f"bad directory block: {path}, offset {offset:,}")
    _remark_hidden(output, len(report.bad_blocks) - _ROWS_SHOWN)
    _print_bad_samples(output, report.bad_samples)
    text = f"checked {count_text(report.checked_samples)} of {count_text(report.samples)} {report.unit}"
    text += f", {bytes_text(report.checked_bytes)}, in {duration_text(report.seconds)}"
    rate = report.checked_bytes / max(report.seconds, 1e-9)
    output.line(f"{text} ({bytes_text(rate)}/s): {report.path}")
    if report.unchecked_samples:
        output.remark(
            f"{count_text(report.unchecked_samples)} {report.unit} have no usable checksum"
        )


def _print_bad_samples(output: Output, bad: Sequence[BadSample]) -> None:
    """A table of bad samples, the first ones unless verbose."""
    if not bad:
        return
    shown = bad if output.verbose else bad[:_ROWS_SHOWN]
    rows = [
        (str(b.index), b.name, b.kind, b.found, b.expected, f"{b.offset_bytes:,}", f"{b.length:,}", b.path)
        for b in shown
    ]  # fmt: skip
    headings = ("sample>", "name", "what", "found", "expected", "offset>", "bytes>", "file")
    output.console().print(plain_table(*headings, rows=rows, overflow="fold", no_wrap=False))
    _remark_hidden(output, len(bad) - len(shown))


def _remark_hidden(output: Output, hidden: int) -> None:
    if hidden > 0:
        output.remark(f"and {count_text(hidden)} more; --json lists all")


def repair(
    store: str = Argument(..., help="The store's folder."),
    *,
    workers: Workers = None,
    trust: TrustOptions = None,
    output: FullOutput,
) -> int:
    """Verify, then mend what the source still has; exit with 1 if something is left.

    Foreign data is never written.
    """
    from headrace.store.repair import repair as repair_store

    report = repair_store(store, workers=workers, trust=trust)
    if output.as_json:
        output.document({"ok": report.ok, "report": report})
    else:
        _print_repaired(output, report)
    return exit_codes.OK if report.ok else exit_codes.FINDING


def _print_repaired(output: Output, report: RepairReport) -> None:
    for path in report.rewritten:
        output.line(f"written anew: {path}")
    shown = report.unrepairable if output.verbose else report.unrepairable[:_ROWS_SHOWN]
    for sample, reason in shown:
        output.line(f"left as it is: {sample}: {reason}" if sample else f"left as it is: {reason}")
    _remark_hidden(output, len(report.unrepairable) - len(shown))
    if report.before.ok:
        output.line(f"nothing to repair: {report.path}")
        return
    output.line(
        f"repaired {count_text(len(report.repaired))} samples, "
        f"{count_text(len(report.unrepairable))} problems left: {report.path}"
    )
    if report.unrepairable:
        output.remark("  next: restore the files above, or pack the source again")
