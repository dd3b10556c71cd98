"""What headrace can read: data sets that their own libraries write, and read back for comparison.

Each `Source` writes a data set with a library's writer and says with that library's reader what is in it. The
page docs/howto/formats.md shows `table()`, and tests/store/test_matrix.py holds every line of it.
"""

from __future__ import annotations

import csv
import gc
import gzip
import io
import json
import tarfile
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 60

Sample = tuple[Any, int]
"""The bytes of a sample, or of each of its parts by name, and its label, -1 for none."""


@dataclass(frozen=True)
class Source:
    """One line of the matrix.

    Attributes:
        name: what it is.
        library: the package that writes and reads it.
        in_place: whether `index` takes it.
        write: writes it below a folder, and returns what is opened.
        read: what the library reads there.
        counted: whether the doctor counts it exactly, or estimates.
        options: how headrace is told what is not plain.
        columns: numbers that become columns of the store, as the library reads them.
    """

    name: str
    library: str
    in_place: bool
    write: Callable[[Path], Any]
    read: Callable[[Any], list[Sample]]
    counted: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    columns: Callable[[Any], dict[str, list[float]]] | None = None


SOURCES: list[Source] = []


def table() -> str:
    """The matrix in Markdown."""
    lines = ["| data set | written and read by | index | pack | doctor |", "|---|---|---|---|---|"]
    for each in SOURCES:
        index = "in place" if each.in_place else "refused: pack it"
        doctor = "counts" if each.counted else "estimates"
        lines.append(f"| {each.name} | {each.library} | {index} | yes | {doctor} |")
    return "\n".join(lines) + "\n"


def picture(i: int) -> bytes:
    """A small JPEG, another one for each number."""
    out = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


PICTURES = [picture(i) for i in range(COUNT)]
TEXTS = [json.dumps({"text": f"line {i} of them", "label": i % 3}) for i in range(COUNT)]
TOKENS = [np.random.default_rng(i).integers(0, 50_000, 5 + i) for i in range(COUNT)]
ROWS = np.arange(COUNT * 12, dtype="<f4").reshape(COUNT, 3, 4)


def shards(parts: int = 3) -> list[range]:
    """Which samples go into each of several files."""
    return [range(k * COUNT // parts, (k + 1) * COUNT // parts) for k in range(parts)]


def source(
    name: str,
    library: str,
    *,
    in_place: bool = True,
    read: Callable[[Any], list[Sample]],
    **more: Any,
) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """The decorated function writes it."""

    def note(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
        SOURCES.append(Source(name, library, in_place, write, read, **more))
        return write

    return note


# -- folders and tars ---------------------------------------------------------------------------------


def read_folder(root: Path) -> list[Sample]:
    paths = sorted(root.glob("*/*.jpg"))
    classes = sorted({path.parent.name for path in paths})
    return [(path.read_bytes(), classes.index(path.parent.name)) for path in paths]


@source("folder of pictures by class", "pillow", read=read_folder)
def folder(root: Path) -> Path:
    for i in range(COUNT):
        path = root / "set" / "ab"[i % 2] / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURES[i])
    (root / "set" / "README.md").write_text("pictures")
    return root / "set"


def read_webdataset(where: Any) -> list[Sample]:
    import webdataset

    urls = str(where) if "{" in str(where) else [str(p) for p in sorted(where.glob("*.tar"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the collector
        rows = list(webdataset.WebDataset(urls, shardshuffle=False))
        gc.collect()
    return [({"jpg": row["jpg"], "cls": row["cls"]}, int(row["cls"])) for row in rows]


@source("WebDataset, folder of shards", "webdataset", read=read_webdataset)
def webdataset_folder(root: Path) -> Path:
    import webdataset

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        with webdataset.TarWriter(str(root / "set" / f"shard-{k:06d}.tar")) as writer:
            for i in numbers:
                writer.write({"__key__": f"{i:06d}", "jpg": PICTURES[i], "cls": i % 3})
    (root / "set" / "_SUCCESS").touch()
    return root / "set"


@source("WebDataset, brace pattern", "webdataset", read=read_webdataset)
def webdataset_braces(root: Path) -> str:
    return f"{webdataset_folder(root)}/shard-{{000000..000002}}.tar"


def read_tars(root: Path) -> list[Sample]:
    samples = []
    for path in sorted(root.iterdir()):
        with tarfile.open(path) as tar:
            samples += [(tar.extractfile(member).read(), -1) for member in tar]
    return samples


def write_tars(root: Path, mode: str, end: str) -> Path:
    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        with tarfile.open(root / "set" / f"{k}.tar{end}", mode) as tar:
            for i in numbers:
                info = tarfile.TarInfo(f"{i:06d}.jpg")
                info.size = len(PICTURES[i])
                tar.addfile(info, io.BytesIO(PICTURES[i]))
    return root / "set"


@source("tar files", "tarfile", read=read_tars)
def tars(root: Path) -> Path:
    return write_tars(root, "w", "")


@source("tar.gz files", "tarfile", in_place=False, read=read_tars, counted=False)
def tars_gz(root: Path) -> Path:
    return write_tars(root, "w:gz", ".gz")


def read_manifest(path: Path) -> list[Sample]:
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    classes = list(dict.fromkeys(row["class"] for row in rows))
    return [((path.parent / r["path"]).read_bytes(), classes.index(r["class"])) for r in rows]


@source("CSV that lists files and classes", "csv", read=read_manifest)
def manifest(root: Path) -> Path:
    folder(root)
    path = root / "list.csv"
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["path", "class"])
        writer.writerows([f"set/{'ab'[i % 2]}/{i:03d}.jpg", f"class {i % 3}"] for i in range(COUNT))
    return path


# -- tables -------------------------------------------------------------------------------------------


def pictures_table(numbers: range) -> Any:
    import pyarrow as pa

    return pa.table(
        {
            "image": [PICTURES[i] for i in numbers],
            "label": [i % 5 for i in numbers],
            "width": [i * 2 for i in numbers],
            "score": [i / 7 for i in numbers],
        }
    )


def read_table(load: Callable[[Path], Any], name: str = "image") -> Callable[[Any], list[Sample]]:
    def read(root: Path) -> list[Sample]:
        rows = [row for path in sorted(root.iterdir()) for row in load(path).to_pylist()]
        return [(row[name], row.get("label", -1)) for row in rows]

    return read


def read_numbers(load: Callable[[Path], Any]) -> Callable[[Any], dict[str, list[float]]]:
    def read(root: Path) -> dict[str, list[float]]:
        rows = [row for path in sorted(root.iterdir()) for row in load(path).to_pylist()]
        return {name: [row[name] for row in rows] for name in ("width", "score")}

    return read


def load_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path)


def load_arrow(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(path).read_all()


def load_stream(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(path).read_all()


def write_parquet(root: Path, **options: Any) -> Path:
    import pyarrow.parquet as pq

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        pq.write_table(pictures_table(numbers), root / "set" / f"part-{k}.parquet", **options)
    return root / "set"


@source(
    "Parquet, plain pages",
    "pyarrow",
    read=read_table(load_parquet),
    columns=read_numbers(load_parquet),
)
def parquet_plain(root: Path) -> Path:
    return write_parquet(root, compression="none", use_dictionary=False)


@source(
    "Parquet, snappy and dictionaries", "pyarrow", in_place=False, read=read_table(load_parquet),
    columns=read_numbers(load_parquet),
)  # fmt: skip
def parquet_snappy(root: Path) -> Path:
    return write_parquet(root)


def read_lists(load: Callable[[Path], Any], dtype: str) -> Callable[[Any], list[Sample]]:
    read = read_table(load, "input_ids")
    return lambda root: [(np.array(tokens, dtype).tobytes(), -1) for tokens, _ in read(root)]


def tokens_table(numbers: range, kind: str) -> Any:
    import pyarrow as pa

    return pa.table({"input_ids": pa.array([TOKENS[i] for i in numbers], kind)})


@source("Parquet, lists of tokens", "pyarrow", in_place=False, read=read_lists(load_parquet, "<i4"))
def parquet_tokens(root: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        table = tokens_table(numbers, pa.list_(pa.int32()))
        pq.write_table(table, root / "set" / f"{k}.parquet")
    return root / "set"


def read_features(root: Path) -> list[Sample]:
    rows = [row for path in sorted(root.iterdir()) for row in load_parquet(path).to_pylist()]
    return [
        ({"a": np.float32(r["a"]).tobytes(), "b": np.int64(r["b"]).tobytes()}, r["label"])
        for r in rows
    ]


@source("Parquet, numbers alone", "pyarrow", read=read_features)
def parquet_numbers(root: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        a, b = pa.array([i / 3 for i in numbers], pa.float32()), pa.array([i * i for i in numbers])
        table = pa.table({"a": a, "b": b, "label": [i % 4 for i in numbers]})
        path = root / "set" / f"{k}.parquet"
        pq.write_table(
            table.cast(not_null(table.schema)), path, compression="none", use_dictionary=False
        )
    return root / "set"


def not_null(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema([field.with_nullable(False) for field in schema])


def write_arrow(root: Path, table: Callable[[range], Any], *, stream: bool = False) -> Path:
    import pyarrow as pa

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        rows = table(numbers)
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        path = root / "set" / f"{k}.arrow"
        with pa.OSFile(str(path), "wb") as f, make(f, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=7)
    return root / "set"


@source("Arrow IPC file", "pyarrow", read=read_table(load_arrow), columns=read_numbers(load_arrow))
def arrow_file(root: Path) -> Path:
    return write_arrow(root, pictures_table)


@source(
    "Arrow IPC stream", "pyarrow", read=read_table(load_stream), columns=read_numbers(load_stream)
)
def arrow_stream(root: Path) -> Path:
    return write_arrow(root, pictures_table, stream=True)


@source("Arrow, lists of tokens", "pyarrow", read=read_lists(load_arrow, "<u2"))
def arrow_tokens(root: Path) -> Path:
    import pyarrow as pa

    return write_arrow(root, lambda numbers: tokens_table(numbers, pa.list_(pa.uint16())))


@source(
    "Feather, LZ4", "pyarrow", in_place=False, counted=False, read=read_table(load_arrow),
    columns=read_numbers(load_arrow),
)  # fmt: skip
def feather(root: Path) -> Path:
    import pyarrow.feather

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        path = str(root / "set" / f"{k}.feather")
        pyarrow.feather.write_feather(pictures_table(numbers), path, compression="lz4")
    return root / "set"


def read_dataset(name: str) -> Callable[[Any], list[Sample]]:
    def read(where: Any) -> list[Sample]:
        import datasets

        rows = where if isinstance(where, datasets.Dataset) else datasets.load_from_disk(str(where))
        return [(row[name].encode(), row["label"]) for row in rows]

    return read


def dataset_of_texts() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": TEXTS, "label": [i % 3 for i in range(COUNT)]})


@source("Hugging Face, `save_to_disk`", "datasets", read=read_dataset("text"))
def saved(root: Path) -> Path:
    dataset_of_texts().save_to_disk(str(root / "set"), num_shards=2)
    return root / "set"


def read_hub(root: Path) -> list[Sample]:
    import datasets

    rows = datasets.Dataset.from_parquet(
        str(root / "blobs/feed"), cache_dir=str(root.parent / "cache")
    )
    return [(row["text"].encode(), row["label"]) for row in rows]


@source("Hugging Face, hub cache", "datasets", in_place=False, read=read_hub)
def hub_cache(root: Path) -> Path:
    top = root / "set"
    snapshot = top / "snapshots/0123abcd/data"
    for each in (snapshot, top / "blobs", top / "refs"):
        each.mkdir(parents=True)
    (top / "refs/main").write_text("0123abcd")
    dataset_of_texts().to_parquet(str(top / "blobs/feed"))
    (snapshot / "train-00000-of-00001.parquet").symlink_to(top / "blobs/feed")
    (snapshot.parent / "README.md").write_text("a card")
    return top


def read_lance(path: Path) -> list[Sample]:
    import lance

    rows = lance.dataset(str(path)).to_table().to_pylist()
    return [(row["image"], row["label"]) for row in rows]


@source("Lance", "pylance", in_place=False, read=read_lance)
def lance_folder(root: Path) -> Path:
    import lance

    lance.write_dataset(pictures_table(range(COUNT)).drop(["width", "score"]), str(root / "set"))
    return root / "set"


# -- texts --------------------------------------------------------------------------------------------


def read_lines(load: Callable[[Path], bytes]) -> Callable[[Any], list[Sample]]:
    def read(root: Path) -> list[Sample]:
        lines = b"\n".join(load(path) for path in sorted(root.iterdir())).split(b"\n")
        return [(line, json.loads(line)["label"]) for line in lines if line]

    return read


def write_lines(root: Path, end: str, pack: Callable[[bytes], bytes]) -> Path:
    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        lines = "\n".join(TEXTS[i] for i in numbers) + "\n" * (k + 1)
        (root / "set" / f"{k}.jsonl{end}").write_bytes(pack(lines.encode()))
    return root / "set"


@source("JSON Lines", "json", read=read_lines(lambda p: p.read_bytes()), options={"label": "label"})
def json_lines(root: Path) -> Path:
    return write_lines(root, "", bytes)


@source(
    "JSON Lines, gzip", "gzip", in_place=False, counted=False, options={"label": "label"},
    read=read_lines(lambda path: gzip.decompress(path.read_bytes())),
)  # fmt: skip
def json_lines_gz(root: Path) -> Path:
    return write_lines(root, ".gz", gzip.compress)


def unzstd(path: Path) -> bytes:
    import zstandard

    with path.open("rb") as f, zstandard.ZstdDecompressor().stream_reader(f) as stream:
        return stream.read()


@source(
    "JSON Lines, zstd", "zstandard", in_place=False, counted=False, read=read_lines(unzstd),
    options={"label": "label"},
)  # fmt: skip
def json_lines_zst(root: Path) -> Path:
    import zstandard

    return write_lines(root, ".zst", zstandard.ZstdCompressor().compress)


# -- arrays -------------------------------------------------------------------------------------------


def read_hdf5(root: Path) -> list[Sample]:
    import h5py

    samples = []
    for path in sorted(root.iterdir()):
        with h5py.File(path) as f:
            samples += [(f["x"][i].tobytes(), int(f["label"][i])) for i in range(len(f["x"]))]
    return samples


def write_hdf5(root: Path, **options: Any) -> Path:
    import h5py

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        with h5py.File(root / "set" / f"{k}.h5", "w") as f:
            f.create_dataset("x", data=ROWS[numbers], **options)
            f["label"] = np.array(numbers) % 5
    return root / "set"


@source("HDF5, contiguous", "h5py", read=read_hdf5)
def hdf5(root: Path) -> Path:
    return write_hdf5(root)


@source("HDF5, chunks in gzip", "h5py", in_place=False, counted=False, read=read_hdf5)
def hdf5_gzip(root: Path) -> Path:
    return write_hdf5(root, chunks=(5, 3, 4), compression="gzip")


def read_npy(path: Path) -> list[Sample]:
    rows = np.load(path, mmap_mode="r")
    return [(row.tobytes(), -1) for row in rows]


@source("npy", "numpy", read=read_npy)
def npy(root: Path) -> Path:
    np.save(root / "x.npy", ROWS)
    return root / "x.npy"


def read_npz(path: Path) -> list[Sample]:
    with np.load(path) as arrays:
        x, labels = arrays["x"], arrays["label"]
    return [({"x": row.tobytes()}, int(label)) for row, label in zip(x, labels, strict=True)]


@source("npz", "numpy", read=read_npz)
def npz(root: Path) -> Path:
    np.savez(root / "x.npz", x=ROWS, label=np.arange(COUNT) % 5)
    return root / "x.npz"


def read_zarr(path: Path) -> list[Sample]:
    import zarr

    node = zarr.open(str(path), mode="r")
    if isinstance(node, zarr.Array):
        return [(np.asarray(node[i]).tobytes(), -1) for i in range(node.shape[0])]
    return [(np.asarray(node["x"][i]).tobytes(), int(node["y"][i])) for i in range(COUNT)]


def write_zarr(root: Path, version: int) -> Path:
    import zarr

    array = zarr.create_array(
        store=str(root / "set"), shape=ROWS.shape, chunks=(7, 3, 4), dtype="f4", zarr_format=version
    )
    array[:] = ROWS
    return root / "set"


@source("Zarr 2 array", "zarr", in_place=False, read=read_zarr)
def zarr_2(root: Path) -> Path:
    return write_zarr(root, 2)


@source("Zarr 3 array", "zarr", in_place=False, read=read_zarr)
def zarr_3(root: Path) -> Path:
    return write_zarr(root, 3)


@source("Zarr group", "zarr", in_place=False, read=read_zarr)
def zarr_group(root: Path) -> Path:
    import zarr

    group = zarr.open_group(str(root / "set"), mode="w")
    for name, values in (("x", ROWS), ("y", np.arange(COUNT) % 5)):
        shape = values.shape
        group.create_array(name, shape=shape, chunks=(8, *shape[1:]), dtype=values.dtype)[:] = (
            values
        )
    return root / "set"


def read_lmdb(path: Path) -> list[Sample]:
    import lmdb

    with (
        lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir()) as environment,
        environment.begin() as transaction,
    ):
        return [(bytes(value), -1) for key, value in transaction.cursor() if key != b"__len__"]


def write_lmdb(path: Path, *, subdir: bool) -> Path:
    import lmdb

    with (
        lmdb.open(str(path), map_size=1 << 24, subdir=subdir) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, data in enumerate(PICTURES):
            transaction.put(b"%06d" % i, data)
        transaction.put(b"__len__", str(COUNT).encode())
    return path


@source("LMDB, folder", "lmdb", in_place=False, read=read_lmdb)
def lmdb_folder(root: Path) -> Path:
    return write_lmdb(root / "set", subdir=True)


@source("LMDB, one file", "lmdb", in_place=False, read=read_lmdb)
def lmdb_file(root: Path) -> Path:
    return write_lmdb(root / "set.lmdb", subdir=False)
