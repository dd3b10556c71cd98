"""`headrace info`, `ls`, `cat`, `read`, `cache`: what a store holds, and how fast it is read."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import re
import resource
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headrace.base.text import (
    binary_text,
    bytes_text,
    count_text,
    counted,
    duration_text,
    printable,
)
from headrace.cli.options import (
    CommandGroup,
    FullOutput,
    JsonOutput,
    StorageOptions,
    TrustOptions,
    Verbose,
)
from headrace.cli.printing import plain_table
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from headrace.control.explain import Explanation
    from headrace.order import Order
    from headrace.plane.disk_cache import CacheEntry
    from headrace.plane.stage import ConsumerStats
    from headrace.store import Store
    from headrace.store.summary import Summary, TokenCount

    Row = tuple[int, int, int | None, str]

_CLASSES_SHOWN = 12
_VOLUMES_SHOWN = 8
_BAR_CELLS = 32


def info(
    store: str = Argument(..., help="A store, or a source that can be opened directly."),
    *,
    storage: StorageOptions,
    trust: TrustOptions = None,
    output: FullOutput,
) -> None:
    """Show samples, sizes, classes, segments, volumes, checksums and page-cache residency."""
    from headrace.api import open as open_store
    from headrace.store.summary import summarise

    with open_store(store, storage_options=storage, trust=trust) as opened:
        summary = summarise(opened)
    if output.as_json:
        output.document(asdict(summary) | {"resident_share": summary.resident_share})
    else:
        _draw(output.console(), summary, verbose=output.verbose)


def _draw(console: Console, summary: Summary, *, verbose: bool) -> None:
    from rich.text import Text

    share = summary.resident_share
    shuffles = [s.source.get("shuffle") for s in summary.segments]
    seeds = [
        (f"segment {i} of {len(shuffles)} " if len(shuffles) > 1 else "")
        + f"by seed {each.get('seed')}"
        for i, each in enumerate(shuffles)
        if isinstance(each, dict)
    ]
    what = "documents" if summary.tokens else "samples"
    facts = {
        what: count_text(summary.samples),
        "tokens": _tokens_text(summary.tokens),
        "bytes": f"{count_text(summary.bytes)} ({bytes_text(summary.bytes)})",
        "size" if summary.tokens else "sample size": (
            f"{bytes_text(summary.size_min)} to {bytes_text(summary.size_max)}, "
            f"mean {bytes_text(summary.size_mean)}"
        ),
        "parts": ", ".join(summary.parts),
        "columns": ", ".join(f"{name} ({kind})" for name, kind in summary.columns.items()),
        "shuffled": ", ".join(seeds),
        "label mix": ""
        if summary.label_mix is None
        else f"{max(0.0, summary.label_mix):.2f} if read as it is stored (0: all classes in each batch "
        "of 256, 1: one class each); a shuffle mixes them",
        "checksums": "yes" if summary.checksums else "no: reads cannot be verified",
        "page cache": "unknown here" if share is None else f"{share:.0%} resident",
        "fingerprint": summary.fingerprint,
    }
    console.print(Text(printable(summary.path), style="bold"))
    for name, value in facts.items():
        if value:
            console.print(Text(f"  {name:<12} {printable(value)}"))
    for segment in summary.segments:
        for i, line in enumerate(segment.images.lines() if segment.images else ()):
            console.print(Text(f"  {'' if i else 'images':<12} {printable(line)}"))
    if summary.sizes:
        most = max(b.samples for b in summary.sizes)
        rows = [
            (binary_text(b.low_bytes), binary_text(b.high_bytes), count_text(b.samples),
             _bar(b.samples / most))
            for b in summary.sizes
        ]  # fmt: skip
        console.print()
        console.print(plain_table("from>", "below>", f"{what}>", "", title="sizes", rows=rows))
    if summary.classes:
        classes = summary.classes if verbose else summary.classes[:_CLASSES_SHOWN]
        labels = [
            (str(c.label), "none" if c.label < 0 else c.name or "", count_text(c.samples))
            for c in classes
        ]
        title = f"classes: {count_text(len(summary.classes))}"
        console.print()
        console.print(plain_table("label>", "class", "samples>", title=title, rows=labels))
        _more(console, len(summary.classes) - len(classes))
    _draw_segments(console, summary, verbose=verbose)


def _tokens_text(tokens: TokenCount | None) -> str:
    if tokens is None:
        return ""
    of = "" if tokens.vocabulary is None else f", vocabulary {count_text(tokens.vocabulary)}"
    return f"{count_text(tokens.tokens)} ({tokens.dtype}{of})"


def _bar(share: float) -> str:
    """What is not nothing shows."""
    return "█" * max(round(share * _BAR_CELLS), 1 if share else 0)


def _draw_segments(console: Console, summary: Summary, *, verbose: bool) -> None:
    rows: list[tuple[str, ...]] = []
    for segment in summary.segments:
        name, samples = segment.directory.removesuffix(".hrd"), count_text(segment.samples)
        for volume in segment.volumes if verbose else segment.volumes[:_VOLUMES_SHOWN]:
            known = volume.bytes and volume.resident_bytes is not None
            share = f"{(volume.resident_bytes or 0) / (volume.bytes or 1):.0%}" if known else "?"
            size = bytes_text(volume.bytes or 0)
            rows.append((name, samples, volume.kind, size, share, volume.path))
            name = samples = ""
    what = "documents" if summary.tokens else "samples"
    headings = ("segment", f"{what}>", "volume", "bytes>", "resident>", "path")
    table = plain_table(*headings, title="segments", rows=rows, overflow="fold", no_wrap=False)
    console.print()
    console.print(table)
    _more(console, sum(len(segment.volumes) for segment in summary.segments) - len(rows))


def _more(console: Console, hidden: int) -> None:
    if hidden > 0:
        console.print(f"and {count_text(hidden)} more; -v or --json shows all", style="dim")


_BATCH = 8192


def ls(
    store: str = Argument(..., help="A store, or a source that can be opened directly."),
    pattern: str | None = Argument(
        None, help="Only names that match ('*.png', 'cats/*'), or that begin so ('cats/')."
    ),
    *,
    limit: int | None = Option(None, "--limit", "-n", min=0, help="At most so many."),
    names_only: bool = Option(False, "--names", "-1", help="Names only."),
    storage: StorageOptions,
    trust: TrustOptions = None,
    output: JsonOutput,
) -> None:
    """List samples: index, bytes, class and name."""
    from headrace.api import open as open_store

    with open_store(store, storage_options=storage, trust=trust) as opened:
        classes = opened.classes or []
        rows = _select(opened, pattern or "")
        first = list(itertools.islice(rows, 1))
        if pattern and not first:
            output.remark(
                f"no sample of {opened.path} matches {pattern!r}. {_what_there_is(opened)}"
            )
        rows = itertools.islice(itertools.chain(first, rows), limit)
        if output.as_json:
            _print_samples(opened.path, rows, classes)
        elif names_only:
            sys.stdout.writelines(f"{printable(name)}\n" for _, _, _, name in rows)
        else:
            digits = len(str(max(len(opened) - 1, 0)))
            sys.stdout.writelines(
                f"{i:>{digits}} {size:>12} {_class(label, classes):<16} {printable(name)}\n"
                for i, size, label, name in rows
            )


def _select(store: Store, pattern: str) -> Iterator[Row]:
    """Index, size, label and name of the wanted samples, in the order of their indices."""
    from headrace.store.summary import sample_sizes

    # Without a wildcard it is how names begin.
    shape = pattern if set(pattern) & set("*?[") else f"{glob.escape(pattern)}*"
    matches, labels = re.compile(fnmatch.translate(shape)).match, store.labels
    for begin in range(0, len(store), _BATCH):
        end = min(begin + _BATCH, len(store))
        names = store.names[begin:end]
        if pattern and not any(map(matches, names)):
            continue
        sizes = [int(s) for _, part in sample_sizes(store, begin, end) for s in part]
        batch_labels = [None] * len(names) if labels is None else labels[begin:end].tolist()
        rows = zip(range(begin, end), sizes, batch_labels, names, strict=True)
        yield from (row for row in rows if not pattern or matches(row[3]))


def _what_there_is(store: Store) -> str:
    """For a reader whose pattern matched nothing."""

    def some(words: Sequence[str], most: int) -> str:
        return ", ".join([*words[:most], *["..."] * (len(words) > most)])

    classes = f"; classes: {some(store.classes, 10)}" if store.classes else ""
    return f"It has {counted(len(store), 'sample')}: {some(store.names[:4], 3)}{classes}"


def _class(label: int | None, classes: list[str]) -> str:
    if label is None or label < 0:
        return "-"
    return printable(classes[label]) if label < len(classes) else str(label)


def _print_samples(path: str, rows: Iterator[Row], classes: list[str]) -> None:
    """One document, written as it comes."""
    write = sys.stdout.write
    write(f'{{"path": {json.dumps(path)}, "classes": {json.dumps(classes)}, "samples": [')
    separator = "\n"
    for row in rows:
        named = zip(("index", "bytes", "label", "name"), row, strict=True)
        write(separator + json.dumps(dict(named)))
        separator = ",\n"
    write("\n]}\n")


def cat(
    store: str = Argument(..., help="A store, or a source that can be opened directly."),
    sample: str = Argument(..., help="Its index, or its name."),
    *,
    by_name: bool = Option(
        False, "--name", help="SAMPLE is a name, even if it looks like an index."
    ),
    start: int | None = Option(None, min=0, help="First byte."),
    size: int | None = Option(None, min=0, help="Number of bytes."),
    part: str | None = Option(None, help="Which part, where there are several.", metavar="NAME"),
    force: bool = Option(False, "--force", help="Binary to a terminal, too."),
    storage: StorageOptions,
    trust: TrustOptions = None,
    output: JsonOutput,
    verbose: Verbose = False,  # noqa: ARG001 - read where errors are printed
) -> None:
    """Write the bytes of a sample to stdout.

    With --json they come in base64, with what is known of the sample.
    """
    from headrace.api import open as open_store

    with open_store(store, storage_options=storage, trust=trust) as opened:
        is_index = not by_name and re.fullmatch(r"-?\d+", sample, re.ASCII)
        index = opened.index_of(int(sample) if is_index else sample)
        data = opened.read(index, start=start, size=size, part=part)
        if output.as_json:
            import base64

            output.document({
                "index": index, "name": opened.names[index], "parts": opened.parts_of(index),
                "part": part, "start": start or 0, "bytes": len(data),
                "base64": base64.b64encode(data).decode("ascii"),
            })  # fmt: skip
            return
        if sys.stdout.isatty() and not force and _is_binary(data):
            raise ValueError(
                f"sample {index} is binary and stdout is a terminal: redirect it, or give --force"
            )
        sys.stdout.buffer.write(data)


def _is_binary(data: memoryview) -> bool:
    """Whether a terminal would suffer: control characters, or no UTF-8."""
    head = bytes(data[: 64 << 10])
    if any(byte < 0x20 and byte not in b"\t\n\r" for byte in head):
        return True
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as e:
        # A character may be cut at the end of what we looked at.
        return e.start < len(head) - 3
    return False


def read(
    path: str | None = Argument(None, help="A store, or a source that can be opened directly."),
    *,
    mix: list[str] = Option(
        [], metavar="NAME=PATH:SHARE", help="In place of PATH, once for each data set of a mixture."
    ),
    batch_size: int = Option(256, "--batch-size", "-b", min=1, help="Samples of a batch."),
    order: str = Option(
        "shuffled",
        help="`shuffled`, `sequential`, `blocked`, `balanced` or `opportunistic`.",
        metavar="NAME",
    ),
    seed: int = Option(0, help="Of the order.", metavar="SEED"),
    seconds: float | None = Option(
        None, min=0.0, help="Stop after so long.", show_default="an epoch", metavar="SECONDS"
    ),
    step_ms: float = Option(
        0.0, min=0.0, help="Time that the training step would take.", metavar="MS"
    ),
    simulate: SimulateOption = None,
    tune: bool = Option(True, help="Let headrace turn the knobs."),
    trace: str | None = Option(
        None, metavar="DIR", help="Write what it did, for `headrace report`."
    ),
    output: FullOutput,
) -> None:
    """Read an epoch as training would: throughput, CPU, stall, tiers, and what was tuned and why."""
    from headrace import api
    from headrace.cli.progress import progress
    from headrace.control.explain import explain
    from headrace.store.summary import token_count

    options: dict[str, Any] = {"order": order, "tune": tune, "trace": trace}
    if simulate is not None:
        options["simulate"] = simulate
    complete = True
    with _to_read(path, mix, seed) as store:
        loader = api.loader(store, batch_size, seed=seed, **options)
        started, cpu_s = time.perf_counter(), _cpu_s()
        try:
            with progress(output, "reading") as tell:
                for _ in loader:
                    if step_ms:
                        time.sleep(step_ms / 1e3)
                    if tell is not None:
                        whole = loader.order.length
                        tell(loader.stats.samples, whole, loader.stats.bytes, None)
                    if seconds is not None and time.perf_counter() - started >= seconds:
                        complete = loader.stats.batches >= len(loader)
                        break
            elapsed_s, cpu_s = max(1e-9, time.perf_counter() - started), _cpu_s() - cpu_s
            stats, stages, consumer = loader.stats, loader.stats.stages, loader.stats.consumer()
            mixed = _randomness(store, loader.order, batch_size)
            what = "documents" if token_count(store, 0) else "samples"
        finally:
            loader.close()
    samples_per_s, bytes_per_s = stats.samples / elapsed_s, stats.bytes / elapsed_s
    cpu_s_per_gb = cpu_s / max(1e-9, stats.bytes / 1e9)
    explanation = explain()
    plane = _last_plane(explanation, consumer)
    if output.as_json:
        done = {
            "samples": stats.samples, "bytes": stats.bytes, "batches": stats.batches,
            "seconds": elapsed_s, "cpu_s": cpu_s, "complete": complete,
        }  # fmt: skip
        output.document({
            "read": done, "samples_per_s": samples_per_s, "bytes_per_s": bytes_per_s,
            "cpu_s_per_gb": cpu_s_per_gb, "stall_s": stats.stall_s, "stages": stages, "plane": plane,
            "order": mixed,
        })  # fmt: skip
        return
    output.line(
        f"read {count_text(stats.samples)} {what}, {bytes_text(stats.bytes)}, in "
        f"{duration_text(elapsed_s)}: {samples_per_s:,.0f} {what}/s, {bytes_text(bytes_per_s)}/s"
        + ("" if complete else " (part of an epoch)")
    )
    output.line(f"CPU {cpu_s:.2f} s, {cpu_s_per_gb:.3f} s/GB (the emulated step's not)")
    handed_s = max(0.0, stats.stall_s - consumer.waited_s)
    output.line(
        f"waited {duration_text(consumer.waited_s)} for data, {consumer.waited_s / elapsed_s:.1%} of the time; "
        f"taking over ready batches took {duration_text(handed_s)}"
    )
    label_mix = mixed["label_mix"]
    if label_mix is not None or mixed["entropy_share"] < 1:
        output.line(
            f"order {mixed['mode']}: {mixed['entropy_share']:.2f} of a full shuffle's entropy, level "
            f"{mixed['level']:.2f}"
            + (
                ""
                if label_mix is None
                else f"; label mix {max(0.0, label_mix):.2f} (0: as shuffled, 1: one class each)"
            )
        )
    if plane.get("verdict") == "idle":  # over before anybody looked
        output.line(str(explain(loader)))
    elif plane:
        output.line(str(explanation).split("\n\n")[-1])


def _last_plane(explanation: Explanation, consumer: ConsumerStats) -> dict[str, Any]:
    """The plane that was at work last, with all that its consumer did: the controller looked before the end."""
    planes: list[dict[str, Any]] = explanation.as_dict()["planes"]
    if not planes:
        return {}
    planes[-1]["consumer"] = asdict(consumer)
    return planes[-1]


def _to_read(path: str | None, mix: list[str], seed: int) -> Store:
    """The store, or the mixture of those that `--mix` names."""
    from headrace import api
    from headrace.store.mixture import mix as mixed

    if (path is None) == (not mix):
        raise typer.BadParameter("give PATH, or --mix for each data set of a mixture")
    if path is not None:
        return api.open(path)
    sources: dict[str, tuple[str, float]] = {}
    for each in mix:
        name, _, rest = each.partition("=")
        where, _, share = rest.rpartition(":")
        try:
            number = float(share)
        except ValueError:
            number = -1.0
        if not where or number < 0 or name in sources:
            raise typer.BadParameter(f"--mix is {each!r}, expected NAME=PATH:SHARE, each name once")
        sources[name] = where, number
    return mixed(sources, seed=seed)


def _randomness(store: Store, order: Order, batch_size: int) -> dict[str, Any]:
    """How random an order is, by which classes come together too."""
    randomness, labels = order.randomness(), store.labels
    return {
        "mode": order.describe().get("mode", type(order).__name__),
        "entropy_share": randomness.entropy_share,
        "level": randomness.level,
        "label_mix": None if labels is None else order.label_mix(labels, batch_size).distance,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


cache_app = CommandGroup("List and remove caches on the local disk (`cache_dir=`).")

_Folder = Annotated[str, Argument(metavar="DIR", help="The folder given as cache_dir.")]


@cache_app.command("ls")
def list_caches(directory: _Folder, *, output: JsonOutput) -> None:
    """List caches: data set, samples, bytes, how complete, and whether a job uses them."""
    from headrace.plane.disk_cache import CacheDirectory

    caches = CacheDirectory(directory).caches()
    if output.as_json:
        output.document({"path": directory, "caches": [_cache_document(info) for info in caches]})
        return
    for info in caches:
        ago = duration_text(max(0.0, time.time() - info.used_s))
        state = "in use" if info.in_use else f"used {ago} ago"
        # Rounded down: 100 % is said of a whole cache only.
        percent = f"{100 * info.samples // max(1, info.of_samples)}%"
        output.line(
            f"{info.fingerprint}  {percent:>4}  {count_text(info.samples)} samples  "
            f"{bytes_text(info.bytes)}  {state}  {printable(info.source)}"
        )
    if not caches:
        output.remark(f"There is no cache in {directory}.")


@cache_app.command("rm")
def remove_caches(
    directory: _Folder,
    fingerprint: str | None = Argument(None, help="The cache's fingerprint, or how it begins."),
    *,
    everything: bool = Option(False, "--all", help="All caches that no job uses."),
    output: JsonOutput,
) -> None:
    """Remove a cache, or all of them. What a job uses, or headrace did not make, stays."""
    from pathlib import Path

    from headrace.plane.disk_cache import CacheDirectory

    if (fingerprint is None) == (not everything):
        raise ValueError("name a cache (by its fingerprint) or give --all")
    caches_below = CacheDirectory(directory)
    chosen = caches_below.caches()
    if fingerprint is None:
        chosen = [info for info in chosen if not info.in_use]
    else:
        chosen = [info for info in chosen if Path(info.path).name.startswith(fingerprint)]
        if len(chosen) != 1:
            fits = f"{fingerprint!r} fits {len(chosen)} caches in {directory}"
            raise ValueError(f"{fits}, expected one")
    removed = [(info, caches_below.remove(info.path)) for info in chosen]
    freed = sum(size for _, size in removed)
    output.result(
        {"removed": [_cache_document(info) for info, _ in removed], "bytes": freed},
        f"removed {count_text(len(removed))} caches, {bytes_text(freed)}",
    )


def _cache_document(info: CacheEntry) -> dict[str, Any]:
    return {**asdict(info), "complete": info.complete}
