"""Data that many tests share: a small folder of images, and the store packed from it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import headrace as hr
from tests_shared import comes_true, descriptors, write_photos

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from browser import Browser


# Threads of torch's that have nothing to do sleep: awake they take the processors from other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An example, or the drawing of some, that took long says that the machine was busy.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
# With several processes, a long module that begins last is what all wait for: these modules go first, by the
# time that they take, then these folders.
LONG = (
    "repository/test_documents.py", "recipes/test_torch_recipes.py", "cluster/launch/test_endings.py",
    "insight/test_examples.py", "cluster/launch/test_local_job.py", "job/test_nodes.py",
    "cluster/test_slurm_use.py", "repository/test_built_pages.py", "soak",
    "cluster", "frameworks", "insight", "launchers", "web", "demo", "node", "posix", "control",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--module-order-seed", type=int, metavar="N",
        help="Run the modules in a random order of this seed: none may rely on what another one left.",
    )  # fmt: skip


# Browsers, clusters, guests and programs may be late once, on a machine whose load is not ours: such a test is
# tried again, three in a run at most, and named in its summary. What tests samples is never tried twice.
STARTED = frozenset({"cli", "cluster", "demo", "launchers", "peers", "posix", "telemetry", "web"})


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: the collector need not look at it time and again.

    Hypothesis is imported before: it looks for who refers to other libraries' generators, trio's for one.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--module-order-seed")
    if seed is not None:
        modules = sorted({str(item.path) for item in items})
        random.Random(seed).shuffle(modules)
        place = {module: at for at, module in enumerate(modules)}
        items.sort(key=lambda item: place[str(item.path)])
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in STARTED:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):  # one of several processes, which take a module each
        _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONG)}

    def turn(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS)
        return place.get(path.as_posix(), place.get(path.parts[0], len(place)))

    items.sort(key=turn)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_to_the_collector() -> None:
    """A read-ahead that tests before left in a cycle stands in for `open` until it is collected."""
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """Also where the tests run in the background, for which shells have SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests index and agree to is not written down for this machine's users."""
    os.environ["HEADRACE_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a module's tests opened is closed when they are over, whoever forgot to close it.

    Descriptors that stay add up over the modules, until a test of few descriptors fails far away.
    """
    folder = tmp_path_factory.getbasetemp()
    before = descriptors(folder)
    yield
    gc.collect()
    comes_true(lambda: not descriptors(folder) - before)
    assert not descriptors(folder) - before


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 36 PNG files in three class folders. Not to be changed."""
    return write_photos(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="session")
def packed_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store packed from `photos`. Not to be changed: see `own_store`."""
    target = tmp_path_factory.mktemp("packed") / "photos.hr"
    hr.pack(photos, target)
    return target


@pytest.fixture
def own_store(packed_photos: Path, tmp_path: Path) -> Path:
    """A copy of `packed_photos` that the test may damage."""
    return Path(shutil.copytree(packed_photos, tmp_path / "own.hr"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium without a network, one for all tests: see `browser.Browser`."""
    browser = pytest.importorskip("browser", reason="selenium is not installed")
    if (what := browser.missing()) is not None:
        pytest.skip(f"pages cannot be looked at: {what}")
    opened = browser.Browser()
    yield opened
    opened.close()
