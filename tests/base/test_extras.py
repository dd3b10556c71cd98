"""Optional packages: each module names an extra that exists, and what is missing says which one."""

import pickle
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.base.extras import EXTRAS, import_extra
from headrace.errors import HeadraceError, MissingPackage

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_module_is_brought_by_an_extra_and_all_has_every_extra_but_the_frameworks():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    every = set(extras["all"][0].removeprefix("headrace[").removesuffix("]").split(","))
    assert every == set(extras) - {"all", "demo", "torch", "tensorflow", "jax", "ray"}


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingPackage, match=r"reading a\.zarr needs the package zarr") as raised:
        import_extra("zarr", "reading a.zarr")
    assert raised.value.next_step == "Install it: pip install 'headrace[zarr]'"
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    assert isinstance(copy, HeadraceError)
    assert isinstance(copy, ImportError)


def test_a_package_that_fails_to_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise ImportError('no libfoo.so')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match=r"broken_package, which fails: no libfoo\.so"):
        import_extra("broken_package", "this test")
