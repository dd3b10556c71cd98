"""One bad client: others get the right bytes in bounded time, and all that it held comes back (R19)."""

import pytest

from soak.bad_client import WAYS
from soak.fairness import is_well, measured


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    import tempfile
    from pathlib import Path

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="hr-") as work:
        patch.setenv("HEADRACE_RUNTIME_DIR", "")  # put back afterwards
        yield measured(Path(work) / "w", seconds=0.3)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_does_ill_hurts_nobody(found, way):
    row = found[way]
    print(way, row)
    assert is_well({way: row, "problems": found["problems"]}), row
    assert row["lives"]  # it went on all the time
    assert row["beside"]["node_batches"] > 0
