"""The doctor at an object store: what can be measured there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from headrace.base.causes import Cause
from headrace.errors import HeadraceError
from headrace.insight.doctor import ExamineOptions, diagnose, examine, lines_of
from headrace.io.objects.listing import write
from tests_shared import png

if TYPE_CHECKING:
    from objects.faulty_proxy import FaultyProxy


def test_a_store_at_a_url(packed: str, options: dict[str, Any], proxy: FaultyProxy) -> None:
    found = examine(packed, ExamineOptions(seconds=2.0, storage_options=options))
    assert found.data is not None
    assert found.storage is not None
    assert (found.data.kind, found.data.samples, found.data.classes) == ("object", 60, 3)
    assert found.place is not None
    assert found.place.network
    assert found.place.file_system == "s3"
    assert [point.depth for point in found.storage.points][:2] == [1, 4]
    assert found.resident is None
    assert {line.split()[0] for line, _ in proxy.requests} <= {"GET", "HEAD"}
    told = diagnose(found, workers=2)
    assert told.cause in (Cause.NETWORK, Cause.PYTHON, Cause.COLLATE)
    assert "over the network" in "\n".join(line for _, line in lines_of(told))


@pytest.mark.parametrize("pattern", ["/photos/", "/photos/*.png"])
def test_plain_objects(
    bucket: str, direct: dict[str, Any], options: dict[str, Any], pattern: str
) -> None:
    images = [png(i, side=32) for i in range(20)]
    for i, data in enumerate(images):
        write(data, f"{bucket}/photos/{i}.png", direct, create=True)
    found = examine(f"{bucket}{pattern}", ExamineOptions(seconds=5.0, storage_options=options))
    assert found.data is not None
    assert found.storage is not None
    assert found.decode is not None
    assert (found.data.kind, found.data.format, found.data.samples) == ("object", "png", 20)
    assert found.data.nbytes == sum(map(len, images))
    assert found.storage.points[0].per_s > 0
    assert found.decode.format == "png"
    assert not found.notes


def test_nothing_at_a_url(bucket: str, options: dict[str, Any]) -> None:
    with pytest.raises(HeadraceError) as caught:
        examine(f"{bucket}/none.hr", ExamineOptions(seconds=1.0, storage_options=options))
    assert caught.value.next_step
