"""The page "What the papers claim, and what we see", and its pictures: all of it out of one JSON document.

`page.txt` has the words and the places of numbers; here are the numbers, and verdicts that follow from them. A
test holds page, pictures and document together.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paper_parts import ROOT, cases
from benchmarks.paper_parts.prisma import Way
from headrace.pages import charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESULTS = ROOT / "benchmarks/results"
PAGE, IMAGES = "docs/papers.md", "docs/images"
TEMPLATE = Path(__file__).with_name("page.txt")
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
RUN = ("run", "run-order")
OURS = (*RUN, "dropin", "store")
COLOURS = {"prisma": "c3", "run": "c5", "run-order": "c5", "dropin": "c1", "store": "c1"}
COLUMNS = {
    "PRISMA": "prisma",
    "`run`": "run",
    "`run --order`": "run-order",
    "drop-in": "dropin",
    "store": "store",
}

Document = dict[str, Any]


def newest(name: str) -> Document:
    """The newest results of a benchmark, with the name of their file."""
    path = max(RESULTS.glob(f"{name}-2*.json"))
    document: Document = json.loads(path.read_text())
    return document | {"file": path.name}


def cited() -> Document:
    """What other benchmarks measured."""
    accuracy, fabric = newest("accuracy"), newest("fabric")
    staged, relative = fabric["job"]["staged"], accuracy["summary"]["relative"]
    return {
        "accuracy_file": accuracy["file"], "fabric_file": fabric["file"],
        "sorted": 100 * relative["blocked 32 x 4"], "mixed": 100 * relative["blocked 32 x 4, shuffled pack"],
        "source": staged["source_bytes"] / staged["data_bytes"],
    }  # fmt: skip


def verdict(ours: float, claimed: float) -> str:
    """More is better: by a tenth more is `better`, down to a tenth less `reproduced`."""
    return (
        "better" if ours > 1.1 * claimed else "reproduced" if ours >= 0.9 * claimed else "**not**"
    )


def bars(name: str, parts: Sequence[charts.Part]) -> tuple[str, str]:
    """A panel of a picture, its name a little above it."""
    inside = charts.bars(name, parts).partition(">")[2].removesuffix("</svg>")
    lower = f'<g transform="translate(0 8)">{inside}</g>'
    return name, charts.svg(16 + 24 * len(parts), name, lower)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# -- PRISMA ----------------------------------------------------------------------------------------


class Trainings:
    """The runs of one framework."""

    def __init__(self, part: Document, framework: str) -> None:
        self.framework = framework
        self.cases: dict[str, list[Document]] = {}
        for row in part["rows"]:
            self.cases.setdefault(row["case"], []).append(row)
        self.slow = [rows for rows in self.cases.values() if rows[0]["storage"] != "cold"]

    def reduction(self, *ways: str) -> float:
        """The largest of all cases, in percent of the plain framework's time."""
        return 100.0 * max(
            1.0 - _ratio(best(rows, *ways), _with(rows, self.framework, min))
            for rows in self.cases.values()
        )

    def speed(self, *ways: str) -> float:
        """In the middle case, over the framework's best setting."""
        return statistics.median(
            _ratio(best(rows, self.framework), best(rows, *ways)) for rows in self.cases.values()
        )

    def speed_by_workers(self, way: str, which: Any) -> float:
        """With the fewest or the most workers over the framework's with as many; on slow storage."""
        return statistics.median(
            _ratio(_with(rows, self.framework, which), _with(rows, way, which))
            for rows in self.slow
        )

    def quickest(self, *ways: str) -> Document:
        """The quickest run of the first case on slow storage."""
        return best(self.slow[0], *ways)

    def table(self) -> str:
        """Each case, each way at its best setting."""
        there = {row["way"] for rows in self.cases.values() for row in rows}
        ways = {name: way for name, way in COLUMNS.items() if way in there}
        lines = [
            [case, *map(_cell, (_with(rows, self.framework, min), best(rows, self.framework))),
             *(_cell(best(rows, way)) for way in ways.values())]
            for case, rows in self.cases.items()
        ]  # fmt: skip
        return table((FRAMEWORKS[self.framework], "plain", "its best", *ways), lines)


def best(rows: list[Document], *ways: str) -> Document:
    """The quickest of some ways."""
    return min((row for row in rows if row["way"] in ways), key=lambda row: row["seconds"])


def _ratio(one: Document, other: Document) -> float:
    """Of their seconds."""
    return float(one["seconds"]) / float(other["seconds"])


def _with(rows: list[Document], way: str, which: Any) -> Document:
    """With the fewest or the most workers; AUTOTUNE, which is -1, is neither."""
    chosen: Document = which(
        (r for r in rows if r["way"] == way and r["workers"] >= 0), key=lambda r: r["workers"]
    )
    return chosen


def _cell(row: Document) -> str:
    return f"{row['seconds']:.2f} s; {row['cpu_s']:.1f}; {row['memory_mb']:.0f}; {threads(row)}"


def threads(row: Document, share: float = 0.9) -> int:
    """So many threads or fewer were reading in this share of the looks."""
    total, seen = sum(row["reading"].values()), 0
    for number, looks in row["reading"].items():
        seen += looks
        if seen >= share * total:
            return int(number)
    return 0


def prisma(trainings: dict[str, Trainings]) -> Document:
    """The numbers of PRISMA's claims."""
    values: Document = {
        "runs": sum(len(rows) for t in trainings.values() for rows in t.cases.values())
    }
    for key, framework, claimed in (("tf", "tensorflow", 54), ("torch", "torch", 63)):
        for name, ways in (("prisma", ("prisma",)), ("run", RUN), ("ours", OURS)):
            values[f"{key}_{name}"] = trainings[framework].reduction(*ways)
        values[f"{key}_verdict"] = verdict(values[f"{key}_ours"], claimed)
        values[f"{key}_prisma_verdict"] = verdict(values[f"{key}_prisma"], claimed)
        values[f"{framework}_table"] = trainings[framework].table()
    torch, tensorflow = trainings["torch"], trainings["tensorflow"]
    opt, opt_prisma = tensorflow.speed(*OURS), tensorflow.speed("prisma")
    used = {w: threads(tensorflow.quickest(*ways)) for w, ways in
            (("prisma", ("prisma",)), ("run", RUN), ("tf", ("tensorflow",)))}  # fmt: skip
    few, many = (torch.speed_by_workers("prisma", which) for which in (min, max))
    valid, valid_prisma = (
        statistics.median(statistics.median(best(rows, *ways)["valid_s"]) for rows in torch.slow)
        for ways in (OURS, ("prisma",))
    )
    return values | {
        "opt_ours": opt, "opt_prisma": opt_prisma, "opt_verdict": verdict(opt, 1),
        "opt_prisma_verdict": verdict(opt_prisma, 1), **{f"threads_{who}": n for who, n in used.items()},
        "threads_verdict": "reproduced" if max(used["prisma"], used["run"]) < used["tf"] else "**not**",
        "few": few, "many": many, "workers": max(r["workers"] for rows in torch.slow for r in rows),
        "locks_verdict": "reproduced" if few > max(1, many) else "**not**",
        "drop_few": torch.speed_by_workers("dropin", min), "drop_many": torch.speed_by_workers("dropin", max),
        "valid_ours": valid, "valid_prisma": valid_prisma, "valid_verdict": verdict(valid_prisma, valid),
    }  # fmt: skip


def threads_picture(trainings: dict[str, Trainings]) -> str:
    """The share of time in which at most so many threads were reading."""
    panels = []
    for framework, name in FRAMEWORKS.items():
        chosen = [trainings[framework].quickest(*ways) for ways in (RUN, ("prisma",), (framework,))]
        most = max(int(number) for row in chosen for number in row["reading"]) + 1
        lines = []
        for colour, row in zip(("l1", "l2", "l3"), chosen, strict=True):
            total, share, points = sum(row["reading"].values()), 0.0, [(0.0, 0.0)]
            for number, looks in row["reading"].items():
                share += looks / total
                points.append((int(number) / most, share))
            lines.append(charts.StepLine(row["way"], points, colour))
        axes = charts.count_axis(most, "threads reading"), charts.share_axis("share of the time")
        panels.append((f"{name}; {chosen[0]['case']}", charts.lines(name, lines, (), *axes)))
    named = [("l1", "headrace run"), ("l2", "PRISMA"), ("l3", "the framework")]
    return charts.image(
        "The share of the time in which at most so many threads read", panels, named
    )


# -- DLFS ------------------------------------------------------------------------------------------


class Sizes:
    """Medians of DLFS's table."""

    def __init__(self, part: Document) -> None:
        self._cells: dict[tuple[Any, ...], list[Document]] = {}
        for row in part["rows"]:
            self._cells.setdefault((row["who"], row["size"], row["cold"], row["cores"]), []).append(
                row
            )
        self.ways = list(dict.fromkeys(key[0] for key in self._cells))
        self.sizes = sorted({key[1] for key in self._cells})

    def rate(self, who: str, size: int, cold: bool = True, cores: int = 2) -> float:
        """Samples a second."""
        return statistics.median(
            float(r["samples"] / r["seconds"]) for r in self._cells[who, size, cold, cores]
        )

    def cpu(self, who: str, size: int, cold: bool = True, cores: int = 2) -> float:
        """CPU seconds for each GB, of both ends."""
        return statistics.median(
            r["cpu_s"] / (r["samples"] * size / 1e9) for r in self._cells[who, size, cold, cores]
        )

    def over_ext4(self, who: str, sizes: Sequence[int]) -> float:
        """The middle of some sizes, cold, over the best number of threads."""
        ext4 = [way for way in self.ways if way.startswith("ext4")]
        return statistics.median(
            self.rate(who, s) / max(self.rate(way, s) for way in ext4) for s in sizes
        )

    def table(self, *, cold: bool, cores: int = 2) -> str:
        """Rates, and CPU in brackets."""
        lines = [
            [f"{size:,}"]
            + [
                f"{self.rate(w, size, cold, cores):,.0f} ({self.cpu(w, size, cold, cores):.2g})"
                for w in self.ways
            ]
            for size in self.sizes
        ]
        return table(("bytes", *self.ways), lines)

    def picture(self) -> str:
        """Bars for each size, hot beside cold."""
        colours, panels = {"local": "c1", "fabric": "c5", "ext4": "c4"}, []
        for size in self.sizes:
            for cold in (False, True):
                rates = {who: self.rate(who, size, cold) for who in self.ways}
                shown = [charts.Part(who, rate, f"{rate:,.0f}", colours[who.partition(",")[0]])
                         for who, rate in rates.items()]  # fmt: skip
                panels.append(bars(f"{size:,} bytes, {'cold' if cold else 'hot'}", shown))
        return charts.image("Samples a second by their size, two cores", panels, [])


def dlfs(part: Document, cites: Document) -> Document:
    """The numbers of DLFS's claims."""
    seen, values = Sizes(part), dict[str, Any]()
    for name, sizes in (("tiny", seen.sizes[:2]), ("large", seen.sizes[2:])):
        both = {
            order: seen.over_ext4(f"fabric, {order}", sizes) for order in ("shuffled", "blocked")
        }
        values |= {f"{name}_{order}": ratio for order, ratio in both.items()}
        values[f"{name}_verdict"] = verdict(max(both.values()), 1.5)
    cpu = [seen.cpu("fabric, blocked", s) / seen.cpu("ext4, 1 thread", s) for s in (512, 128 << 10)]
    chunk = {
        w: seen.rate(f"{w}, blocked", 512) / seen.rate(f"{w}, shuffled", 512)
        for w in ("local", "fabric")
    }
    cores = [seen.rate("fabric, shuffled", 4096, cold=False, cores=c) for c in (1, 2)]
    last, kernel = part["directory"][-1], part["kernel_initiator"]
    reason = f"`{kernel['config'] or 'no /proc/config.gz'}`; modprobe: `{kernel['modprobe']}`"
    absent = "not found" in kernel["modprobe"]
    return values | {
        "cpu_small": cpu[0], "cpu_large": cpu[1], "cpu_verdict": verdict(1 / max(cpu), 1),
        "chunk_local": chunk["local"], "chunk_fabric": chunk["fabric"],
        "chunk_verdict": verdict(chunk["fabric"], 1.1),
        "core_one": cores[0], "core_two": cores[1],
        "accuracy_verdict": "reproduced" if cites["sorted"] > 97 else "**not**, unless packed so",
        "directory_bytes": last["bytes_a_sample"], "directory_ns": last["find_ns"],
        "directory_ms": last["open_ms"],
        "directory_samples": last["samples"], "directory_verdict": verdict(16, last["bytes_a_sample"]),
        "initiator": f"{'is not to be had here' if absent else 'was not measured'} ({reason})",
        "dlfs_cold": seen.table(cold=True), "dlfs_hot": seen.table(cold=False),
        "dlfs_one": seen.table(cold=False, cores=1),
    }  # fmt: skip


# -- DLIO, HAL, and all together -------------------------------------------------------------------


def case_studies(study: Document, ranks: Document, cites: Document) -> Document:
    """The numbers of DLIO's and HAL's claims."""
    rank = {(r["way"], r["ranks"]): r["samples_per_s"] / r["ranks"] for r in ranks["rows"]}
    factor = study["before"]["training_s"] / study["after"]["training_s"]
    two = 100 * rank["store", 4] / rank["store", 2]
    return {
        "dlio": factor, "dlio_verdict": verdict(factor, 6.7), "hal_two": two, "hal_verdict": verdict(two, 94.9),
        "hal_four": 100 * rank["store", 4] / rank["store", 1],
        "hal_torch": 100 * rank["torch", 4] / rank["torch", 1],
        "source_verdict": "better" if cites["source"] < 1.05 else "**not**",
        "before": study["before"], "after": study["after"],
        "before_wait": 100 * study["before"]["wait_share"], "study_files": study["files"],
        "step": cases.STEP_MS,
        "batch": cases.BATCH, "commands": "\n".join(f"$ {line}" for line in study["commands"]),
        "said": study["verdict"], "because": study["advice"]["because"], "read_threads": study["read_threads"],
    }  # fmt: skip


def _cases_picture(study: Document, ranks: Document) -> str:
    times = [
        charts.Part(name, seconds := study[when]["training_s"], f"{seconds:.2f} s", colour)
        for name, when, colour in (("as it was", "before", "c4"), ("as advised", "after", "c1"))
    ]
    rates = [
        charts.Part(f"{r['way']}, {r['ranks']} of them", r["samples_per_s"], f"{r['samples_per_s']:,.0f}",
                    COLOURS.get(r["way"], "c4")) for r in ranks["rows"]
    ]  # fmt: skip
    panels = [
        bars("DLIO: training time of the case study", times),
        bars("HAL: samples a second of all ranks", rates),
    ]
    return charts.image("Two case studies", panels, [])


def files(document: Document) -> dict[str, str]:
    """The page and its pictures, by their paths in the repository."""
    parts, cites, host = document["parts"], document["cited"], document["machine"]
    trainings = {name: Trainings(parts[f"prisma-{name}"], name) for name in FRAMEWORKS}
    load = next(iter(parts.values()))["load_before"]  # later ones' is that of the parts before
    text = TEMPLATE.read_text().format(
        file=document["file"], cores=host["cores"], cpu=host["cpu"], kernel=host["kernel"],
        file_system=host["file_system"].split()[0], kind=f"the {'quick' if document['quick'] else 'full'} run",
        load=f"{load:.1f}",
        busy=" **The machine was busy**: figures move by half and more." if load > 2 else "",
        **cites, **prisma(trainings), **dlfs(parts["dlfs"], cites),
        **case_studies(parts["dlio"], parts["hal"], cites),
    )  # fmt: skip
    panels = []
    for name, each in trainings.items():
        for case, rows in each.cases.items():
            shown = [
                charts.Part(
                    Way(r["way"], r["workers"]).title,
                    r["seconds"],
                    f"{r['seconds']:.2f} s",
                    COLOURS.get(r["way"], "c4"),
                )
                for r in rows
            ]
            panels.append(bars(f"{FRAMEWORKS[name]}; {case}", shown))
    return {
        PAGE: text,
        f"{IMAGES}/paper-prisma.svg": charts.image(
            "Seconds an epoch, validation included", panels, []
        ),
        f"{IMAGES}/paper-threads.svg": threads_picture(trainings),
        f"{IMAGES}/paper-dlfs.svg": Sizes(parts["dlfs"]).picture(),
        f"{IMAGES}/paper-cases.svg": _cases_picture(parts["dlio"], parts["hal"]),
    }
