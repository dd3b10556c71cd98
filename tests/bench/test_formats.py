"""Files of each format are what the field's own libraries expect, and their extents hold the samples."""

import io
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
from PIL import Image

import headrace as hr
from headrace.base.checksum import crc32c
from headrace.bench.content import BLOCK_BYTES, LARGEST_CODE, Checksum, Content, PieceKind
from headrace.bench.dataset_files import generate
from headrace.bench.formats import FileJob, format_of, layout_of
from headrace.errors import MissingPackage, SourceError
from headrace.store.sources.tfrecord import mask

from .scaled import spec_of


def extents_of(extents, sample):
    """Offsets and lengths of what must be read for a sample."""
    group = extents.group[sample]
    part = slice(extents.first[group], extents.first[group + 1])
    return extents.offset[part], extents.length[part]


def generated(tmp_path, *, direct=True, **section):
    """A spec of 3 samples a file, unless said otherwise, and its files."""
    image = section["format"] in ("jpeg", "png")
    section = {"num_samples_per_file": 1 if image else 3, "record_length_bytes": 3000,
               "num_files_train": 2, "data_folder": str(tmp_path / "data"), **section}  # fmt: skip
    if "record_dims" not in section:
        section.setdefault("record_length_bytes_stdev", 900)
    spec = spec_of(section)
    generate(spec, direct=direct)
    return spec, [spec.path("train", i) for i in range(spec.num_files_train)]


def content_of(spec, index, count=None):
    """The bytes that a file's samples are made of."""
    shape = tuple(spec.sample_shapes()[index].tolist())
    job = FileJob(spec, "train", index, shape, Content(spec.seed))
    return job, job.stream().take(job.sample_bytes * (count or job.samples))


def extent_bytes(path, spec, sample):
    extents = format_of(spec).sample_extents(path, spec)
    data = Path(path).read_bytes()
    return b"".join(data[o : o + n] for o, n in zip(*extents_of(extents, sample), strict=True))


@pytest.mark.parametrize("section", [
    {"format": "npz"}, {"format": "npz", "compression": "zip"}, {"format": "npy"},
    {"format": "npz", "record_dims": [5, 4, 3], "record_element_type": "int16"},
    {"format": "npz", "num_samples_per_file": 1, "record_length_bytes": 3 * BLOCK_BYTES},
], ids=str)  # fmt: skip
def test_numpy_reads_arrays_with_samples_on_the_last_axis(tmp_path, section):
    spec, paths = generated(tmp_path, **section)
    job, expected = content_of(spec, 1)
    result = np.load(paths[1])
    if spec.format == "npz":
        assert result.zip.testzip() is None  # all CRCs
        assert result["y"].tolist() == [0] * job.samples
        result = result["x"]
    assert result.shape == (*job.shape, job.samples)
    assert result.dtype == spec.dtype
    assert result.tobytes() == expected.tobytes()
    last = format_of(spec).read_sample(paths[1], spec, job.samples - 1)
    assert np.array_equal(last, result[..., -1])
    whole = extent_bytes(paths[1], spec, 0)
    assert whole == (
        Path(paths[1]).read_bytes() if spec.compression == "zip" else expected.tobytes()
    )


@pytest.mark.parametrize("section", [
    {"format": "hdf5"},
    {"format": "hdf5", "record_length_bytes": 200_000},
    {"format": "hdf5", "record_dims": [6, 5], "record_element_type": "float32",
     "hdf5": {"num_dset_per_record": 3}},
    {"format": "hdf5", "record_dims": [4, 9], "hdf5": {"chunk_dims": [1, 2, 9], "max_shape": [8, 9]}},
    {"format": "hdf5", "compression": "gzip"},
], ids=str)  # fmt: skip
def test_h5py_reads_hdf5(tmp_path, section):
    spec, paths = generated(tmp_path, **section)
    shape = tuple(spec.sample_shapes()[0].tolist())
    pieces = spec.hdf5.num_dset_per_record
    with h5py.File(paths[0]) as f:
        assert f["labels"][:].tolist() == [0, 0, 0]
        arrays = [f[f"records_{k}"][:] for k in range(pieces)]
        assert arrays[0].shape == (3, shape[0] // pieces, *shape[1:])
        assert arrays[0].dtype == spec.dtype
        if pieces == 1:
            assert np.array_equal(f["records"][:], arrays[0])
        if spec.hdf5.max_shape:
            assert f["records_0"].maxshape == (3, 8, 9)
    sample = format_of(spec).read_sample(paths[0], spec, 2)
    assert sample.tobytes() == b"".join(a[2].tobytes() for a in arrays)
    if spec.compression == "none":
        assert extent_bytes(paths[0], spec, 2) == b"".join(a[2].tobytes() for a in arrays)
    # No two samples, and no two data sets, are alike.
    rows = {row.tobytes() for a in arrays for row in a}
    assert len(rows) == 3 * pieces


@pytest.mark.parametrize("size", [900, 2 << 20])
def test_tfrecords_are_examples_with_checksums(tmp_path, size):
    spec, paths = generated(
        tmp_path, format="tfrecord", record_length_bytes=size, record_length_bytes_stdev=0
    )
    job, expected = content_of(spec, 0)
    images = expected.reshape(3, -1)
    with hr.open(hr.index(paths, tmp_path / "index.hr").path) as store:  # checks every record
        messages = [bytes(store.read(i)) for i in range(6)]
    seen = set()
    for i in range(3):
        assert extent_bytes(paths[0], spec, i) == messages[i]
        sample = format_of(spec).read_sample(paths[0], spec, i)
        assert sample.size == job.sample_bytes
        seen.add(sample.tobytes())
        assert np.array_equal(sample, images[i])
    assert len(seen) == 3
    index = (tmp_path / "data/index/train" / (Path(paths[0]).name + ".idx")).read_text().split("\n")
    sizes = Path(paths[0]).stat().st_size // 3
    assert index == [f"{i * sizes} {sizes}" for i in range(3)] + [""]


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_images_have_the_declared_dimensions(tmp_path, kind):
    spec, paths = generated(tmp_path, format=kind)
    for path, shape in zip(paths, spec.sample_shapes().tolist(), strict=True):
        with Image.open(path) as image:
            image.load()
            assert image.format == kind.upper()
            assert list(np.asarray(image).shape) == shape
    job, expected = content_of(spec, 0)
    pixels = format_of(spec).read_sample(paths[0], spec, 0)
    assert pixels.shape == job.shape
    if kind == "png":
        assert pixels.tobytes() == expected.tobytes()


def test_a_jpeg_has_the_size_that_was_asked_for_and_does_not_compress(tmp_path):
    spec, paths = generated(tmp_path, format="jpeg", record_length_bytes=100_000, num_files_train=3)
    for path, shape in zip(paths, spec.sample_shapes().tolist(), strict=True):
        data = Path(path).read_bytes()
        assert len(data) == shape[0] * shape[1]
        assert len(zlib.compress(data)) > 0.98 * len(data)
        with Image.open(path) as image:
            pixels = np.asarray(image)
        # Noise from the top to the few flat blocks that make room for the headers.
        assert pixels[: 8 * (shape[0] // 8 - 3)].std() > 40
        assert len(np.unique(pixels)) == 256


@pytest.mark.parametrize(
    "shape", [(1, 1), (8, 8), (9, 70), (64, 64), (130, 17), (70, 300), (301, 70)], ids=str
)
def test_jpegs_of_any_shape_are_whole(tmp_path, shape):
    """Pillow says what is left over or missing in a scan: as a warning, which fails a test, or an error."""
    spec, paths = generated(tmp_path, format="jpeg", record_dims=list(shape), num_files_train=1)
    data = Path(paths[0]).read_bytes()
    assert data[-2:] == b"\xff\xd9"
    if shape[0] * shape[1] > 3000:  # smaller ones have no room for their headers
        assert len(data) == shape[0] * shape[1]
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image.size == shape[::-1]
    assert format_of(spec).file_bytes(spec, shape) == len(data)


def test_an_image_that_no_jpeg_can_hold_is_refused(tmp_path):
    with pytest.raises(SourceError, match="70,000 x 8 pixels"):
        generated(tmp_path, format="jpeg", record_dims=[70_000, 8])


LAID_OUT = [
    {"format": "npz"},
    {"format": "npz", "num_samples_per_file": 1, "record_length_bytes": 9 << 20},
    {"format": "npy", "record_length_bytes": 200_000},
    {"format": "tfrecord"},
    {"format": "tfrecord", "record_length_bytes": 3 << 20},
    {"format": "indexed_binary"},
    {"format": "jpeg"},
    {"format": "jpeg", "record_length_bytes": 6 << 20},
]


def bytes_of_layout(layout, stream):
    """What native code writes, piece by piece: the reference."""
    out, begin, crc = bytearray(), 0, 0
    for run in layout.runs:
        for piece in run.pieces * run.times:
            match piece.kind:
                case PieceKind.TEXT:
                    out += piece.text
                case PieceKind.NOISE:
                    out += stream.take(piece.nbytes).tobytes()
                case PieceKind.CODES:
                    out += np.minimum(stream.take(piece.nbytes), LARGEST_CODE).tobytes()
                case PieceKind.BEGIN:
                    begin = len(out)
                case PieceKind.END if layout.checksum is Checksum.RECORD:
                    out += mask(crc32c(bytes(out[begin:]))).to_bytes(4, "little")
                case PieceKind.END:
                    crc = zlib.crc32(out[begin:])
    for at in layout.patches:
        out[at : at + 4] = crc.to_bytes(4, "little")
    return bytes(out)


@pytest.mark.parametrize("section", LAID_OUT, ids=str)
@pytest.mark.parametrize("direct", [True, False])
def test_native_files_have_the_bytes_that_their_layout_says(tmp_path, section, direct):
    spec, paths = generated(tmp_path, direct=direct, **section)
    for index, path in enumerate(paths):
        job, _ = content_of(spec, index, 0)
        layout = format_of(spec).layout(spec, job.shape)
        assert Path(path).read_bytes() == bytes_of_layout(layout, job.stream())
        assert Path(path).stat().st_size == layout_of(spec, job.shape).nbytes == layout.nbytes


def test_a_large_png_is_written_in_pieces(tmp_path):
    spec, paths = generated(
        tmp_path, format="png", record_length_bytes=3_000_000, num_files_train=1
    )
    with Image.open(paths[0]) as image:
        assert list(np.asarray(image).shape) == spec.sample_shapes()[0].tolist()


@pytest.mark.parametrize("compression", ["none", "gzip", "bz2", "xz", "zip"])
def test_pandas_reads_csv(tmp_path, compression):
    spec, paths = generated(tmp_path, format="csv", compression=compression)
    job, _ = content_of(spec, 0)
    frame = pd.read_csv(paths[0], header=None)
    assert frame.shape == (3, job.sample_bytes)
    rows = frame.to_numpy()
    stream = job.stream()
    assert all(np.array_equal(rows[i], stream.take(job.sample_bytes)) for i in range(3))
    assert np.array_equal(format_of(spec).read_sample(paths[0], spec, 2), rows[2])
    if compression == "none":
        text = extent_bytes(paths[0], spec, 1).decode()
        assert text == ",".join(map(str, rows[1])) + "\n"


def test_csv_with_the_header_of_dlio_2_0_is_read(tmp_path):
    spec, paths = generated(tmp_path, format="csv", record_dims=[2, 2])
    rows = pd.read_csv(paths[0], header=None)
    rows.to_csv(paths[0])
    assert np.array_equal(format_of(spec).read_sample(paths[0], spec, 1), rows.to_numpy()[1])
    assert (
        extent_bytes(paths[0], spec, 1).decode()
        == "1," + ",".join(map(str, rows.to_numpy()[1])) + "\n"
    )


def test_csv_of_other_types_is_read_back(tmp_path):
    spec, paths = generated(tmp_path, format="csv", record_dims=[7, 3], record_element_type="int32")
    _, expected = content_of(spec, 0, 1)
    assert np.array_equal(format_of(spec).read_sample(paths[0], spec, 0), expected.view(np.int32))


@pytest.mark.parametrize("kind", ["indexed_binary", "mmap_indexed_binary"])
def test_indexed_binaries_lie_end_to_end(tmp_path, kind):
    spec, paths = generated(tmp_path, format=kind)
    job, expected = content_of(spec, 1)
    assert Path(paths[1]).read_bytes() == expected.tobytes()
    size = job.sample_bytes
    assert np.fromfile(paths[1] + ".off.idx", np.uint64).tolist() == [0, size, 2 * size]
    assert np.fromfile(paths[1] + ".sz.idx", np.uint64).tolist() == [size] * 3
    assert extent_bytes(paths[1], spec, 2) == expected[2 * size :].tobytes()
    middle = format_of(spec).read_sample(paths[1], spec, 1)
    assert middle.tobytes() == expected[size : 2 * size].tobytes()


COLUMNS = [
    {"name": "x", "dtype": "float32", "size": 3},
    {"name": "skipped", "dtype": "binary", "size": 500, "read": False},
    {"name": "word", "dtype": "string"},
    {"name": "blob", "dtype": "binary", "size": 7},
    {"name": "flag", "dtype": "bool"},
    {"name": "small", "dtype": "uint8"},
    {"name": "listed", "dtype": "list", "size": 2},
]


def test_pyarrow_reads_parquet_columns(tmp_path):
    spec, paths = generated(tmp_path, format="parquet", num_samples_per_file=10, compression="zstd",
                       parquet={"columns": COLUMNS, "row_group_size": 4,
                                "generation_batch_size": 3})  # fmt: skip
    file = pyarrow.parquet.ParquetFile(paths[0])
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [4, 4, 2]
    table = file.read()
    kinds = [str(kind) for kind in table.schema.types]
    assert kinds[1:-1] == ["binary", "string", "binary", "bool", "uint8"]
    assert [kinds[0], kinds[-1]] == [f"fixed_size_list<element: float>[{n}]" for n in (3, 2)]
    assert {len(v) for v in table["blob"].to_pylist()} == {7}
    assert len(set(table["word"].to_pylist())) == 10
    extents = format_of(spec).sample_extents(paths[0], spec)
    assert extents.group.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    # What is not read is not in any extent: it lies between the first column and the third.
    group = file.metadata.row_group(1)
    chunks = [group.column(i) for i in range(7)]
    wanted = sum(c.total_compressed_size for c in chunks if c.path_in_schema != "skipped")
    assert extents_of(extents, 5)[1].sum() == wanted
    row = format_of(spec).read_sample(paths[0], spec, 9)
    assert row[:12].tobytes() == np.array(table["x"][9].as_py(), np.float32).tobytes()
    assert table["word"][9].as_py().encode() in row.tobytes()


def test_parquet_without_columns_has_one_of_bytes(tmp_path):
    spec, paths = generated(tmp_path, format="parquet")
    job, expected = content_of(spec, 0)
    table = pyarrow.parquet.read_table(paths[0])
    assert table.column_names == ["data"]
    rows = np.array(table["data"].to_pylist(), np.uint8)
    assert rows.tobytes() == expected.tobytes()
    assert format_of(spec).read_sample(paths[0], spec, 1).tobytes() == rows[1].tobytes()
    # 8-bit numbers are stored as 32 bits without a dictionary.
    assert Path(paths[0]).stat().st_size < 1.5 * rows.size + 4000
    assert job.samples == 3


def test_synthetic_files_hold_their_number(tmp_path):
    spec, paths = generated(tmp_path, format="synthetic")
    assert Path(paths[1]).read_text() == "1"
    assert format_of(spec).read_sample(paths[1], spec, 2).tobytes() == b"1"


def damaged(data, kind):
    if kind == "cut":
        return data[: len(data) // 2]
    return b"" if kind == "empty" else b"\0" * len(data)


@pytest.mark.parametrize("kind", ["cut", "empty", "zeros"])
@pytest.mark.parametrize(
    "form", ["npz", "npy", "hdf5", "tfrecord", "csv", "indexed_binary", "parquet", "jpeg", "png"]
)
def test_damaged_files_are_named(tmp_path, form, kind):
    spec, paths = generated(tmp_path, format=form)
    path = Path(paths[0])
    path.write_bytes(damaged(path.read_bytes(), kind))
    if form == "indexed_binary" and kind == "zeros":
        return  # any bytes are its samples
    module = format_of(spec)
    with pytest.raises(SourceError, match=path.name):
        module.sample_extents(paths[0], spec)
        module.read_sample(paths[0], spec, 0)


def test_another_number_of_samples_is_refused(tmp_path):
    for form in ("npz", "npy", "hdf5", "tfrecord", "csv", "indexed_binary", "parquet"):
        _, paths = generated(tmp_path / form, format=form)
        wrong = spec_of({"format": form, "num_samples_per_file": 4})
        with pytest.raises(SourceError, match="4"):
            format_of(wrong).sample_extents(paths[0], wrong)


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackage, match=r"pip install 'headrace\[hdf5\]'"):
        generated(tmp_path, format="hdf5")
    assert not list((tmp_path / "data/train").iterdir())


def test_zip_members_are_numpys(tmp_path):
    """The archive has what numpy.savez writes, so that tools that know npz only see npz."""
    _, paths = generated(tmp_path, format="npz")
    text = io.BytesIO()
    np.savez(text, x=np.zeros(3), y=np.zeros(3))
    with zipfile.ZipFile(paths[0]) as ours, zipfile.ZipFile(text) as numpys:
        assert ours.namelist() == numpys.namelist()
        assert [i.compress_type for i in ours.infolist()] == [
            i.compress_type for i in numpys.infolist()
        ]
