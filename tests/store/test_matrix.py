"""The matrix: every kind of data set that people bring, as the library that wrote it reads it.

Count, every label and ten samples at random are compared; pack, index, info and the doctor agree on the count.
With `-s` each line is printed as it is held. docs/howto/formats.md shows the lines, and is current.
"""

import random
import re
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import SourceError
from headrace.insight.doctor.survey import survey
from headrace.store.summary import summarise

from . import matrix_libraries  # noqa: F401 - adds its lines
from .matrix import COUNT, SOURCES, table
from .test_shuffled_pack import rows, shuffled_order

PAGE = Path(__file__).parents[2] / "docs/howto/formats.md"
MODULES = {
    "pillow": "PIL",
    "pylance": "lance",
    "megatron.core": "megatron.core.datasets.indexed_dataset",
}


def check_samples(store, expected):
    assert len(store) == len(expected) == COUNT
    labels = [-1] * COUNT if store.labels is None else store.labels.tolist()
    assert labels == [label for _, label in expected]
    for i in random.Random(7).sample(range(COUNT), 10):
        data = expected[i][0]
        if isinstance(data, dict):
            assert set(store.parts) == set(data)
            for part, value in data.items():
                assert bytes(store.read(i, part=part)) == value
        else:
            assert bytes(store.read(i)) == data


@pytest.mark.parametrize("each", SOURCES, ids=lambda each: each.name)
def test_what_is_read_is_what_its_library_wrote(each, tmp_path):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say of their own imports
            import_module(MODULES.get(each.library, each.library))
    except ImportError:
        pytest.skip(f"{each.library} is not installed")
    root = tmp_path / "written"
    root.mkdir()
    source = each.write(root)
    expected = each.read(source)
    packed = headrace.pack(source, tmp_path / "packed", **each.options)
    with headrace.open(tmp_path / "packed") as store:
        check_samples(store, expected)
        assert summarise(store).samples == packed.samples == COUNT
        for name, values in (each.columns(source) if each.columns else {}).items():
            assert np.allclose(store.columns[name], values)
        headrace.pack(source, tmp_path / "shuffled", shuffle=7, **each.options)
        with headrace.open(tmp_path / "shuffled") as shuffled:
            assert rows(shuffled) == [rows(store)[i] for i in shuffled_order(COUNT, 7)]
    if each.in_place:
        indexed = headrace.index(source, tmp_path / "indexed", **each.options)
        assert indexed.samples == COUNT
        with headrace.open(tmp_path / "indexed") as store:
            check_samples(store, expected)
        with headrace.open(source, **each.options) as store:
            check_samples(store, expected)
    else:
        with pytest.raises(SourceError, match="can only be read front to back") as error:
            headrace.index(source, tmp_path / "indexed", **each.options)
        assert "Pack it" in error.value.next_step
    data, pool = survey(str(source), 1.0)
    pool.close()
    if each.counted:
        assert (data.samples, data.exact) == (COUNT, True)
    else:
        assert not data.exact
    print(f"{each.name}: {COUNT} samples, as {each.library} reads them")


def test_the_page_shows_the_matrix():
    """Written anew by `python -m tests.store.test_matrix`, from the repository's root."""
    assert len(SOURCES) >= 24
    assert _with_table(PAGE.read_text()) == PAGE.read_text()


def _with_table(page):
    begin, end = "<!-- the matrix -->\n", "<!-- end of the matrix -->\n"
    return re.sub(f"{begin}.*?{end}", f"{begin}\n{table()}\n{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(_with_table(PAGE.read_text()))
