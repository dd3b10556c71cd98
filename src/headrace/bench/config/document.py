"""Documents: YAML as a flat list of settings, each of which knows its file and line.

Merging files and overrides is a matter of dictionaries then, and every complaint can say where.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.config.keys import KEYS
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Setting", "flatten", "parse_value", "read_document", "yaml_of"]

DOCUMENT_BYTES_MAX: Final = 4 << 20
DEPTH_MAX: Final = 12

_FREE: Final = frozenset(
    {"storage.storage_options", "checkpoint.ksm"}
    | {name for name in KEYS if name.endswith("_time")}
)  # fmt: skip
"""Keys whose value may be a mapping of its own."""

_DICT_KEY: Final = re.compile(r"([{,]\s*[\w.]+):(?=\S)")
"""hydra's {a:1,b:2}, where YAML wants {a: 1, b: 2}."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was given."""

    value: Any
    where: str


def yaml_of() -> Any:
    """PyYAML.

    Raises:
        WorkloadError: it is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as e:
        raise WorkloadError(
            "reading workloads needs PyYAML, which is not installed.",
            next_step="pip install 'headrace[bench]'",
        ) from e
    return yaml


def read_document(path: Path, label: str) -> dict[str, Setting]:
    """The settings of a YAML file, by their full keys.

    Raises:
        WorkloadError: the file cannot be read, is no YAML, or says a key twice.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(DOCUMENT_BYTES_MAX + 1)
        written = raw.decode()
    except (OSError, UnicodeDecodeError) as e:
        raise WorkloadError(f"{path} cannot be read: {e}.", path=str(path)) from e
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise WorkloadError(f"{path} is larger than {DOCUMENT_BYTES_MAX} bytes.", path=str(path))
    yaml = yaml_of()
    try:
        node = yaml.compose(written, yaml.SafeLoader)
        found = _Walk(yaml, label).settings(node)
    except yaml.YAMLError as e:
        raise WorkloadError(f"{path} is no YAML: {' '.join(str(e).split())}.") from e
    except RecursionError as e:
        raise WorkloadError(f"{path} is nested too deeply.", path=str(path)) from e
    return found


def parse_value(written: str) -> Any:
    """A value of the command line: hydra's grammar, as far as it is YAML's; `off` stays a word."""
    yaml = yaml_of()
    if written.strip().lower() in ("off", "on", "yes", "no"):
        return written.strip().lower()  # words in hydra's grammar, booleans in YAML 1.1
    if written.lstrip().startswith("{"):
        written = _DICT_KEY.sub(r"\1: ", written)
    try:
        return yaml.safe_load(written)
    except yaml.YAMLError:
        return written


class _Walk:
    """One pass over a composed document."""

    def __init__(self, yaml: Any, label: str) -> None:
        self._yaml = yaml
        self._label = label

    def settings(self, node: Any) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        if node is not None:
            if not isinstance(node, self._yaml.MappingNode):
                raise WorkloadError(f"{self._at(node)}: expected sections such as `dataset:`.")
            self._mapping(node, "", found, 0)
        return found

    def _mapping(self, node: Any, prefix: str, found: dict[str, Setting], depth: int) -> None:
        if depth > DEPTH_MAX:
            raise WorkloadError(f"{self._at(node)}: it is nested too deeply.")
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in seen:
                raise WorkloadError(f"{self._at(key)}: {name} stands there twice.")
            seen.add(name)
            nested = isinstance(value, self._yaml.MappingNode) and name not in _FREE
            if nested:
                self._mapping(value, name + ".", found, depth + 1)
            elif not self._empty_section(name, value):
                found[name] = Setting(self._value(value), self._at(key))

    def _empty_section(self, name: str, value: Any) -> bool:
        """`reader:` with nothing below."""
        return value.tag == "tag:yaml.org,2002:null" and any(k.startswith(name + ".") for k in KEYS)

    def _value(self, node: Any) -> Any:
        loader = self._yaml.SafeLoader("")
        try:
            return loader.construct_object(node, deep=True)
        finally:
            loader.dispose()

    def _at(self, node: Any) -> str:
        return f"{self._label}:{node.start_mark.line + 1}"


def flatten(name: str, value: Any, where: str) -> dict[str, Setting]:
    """Settings of one override, whose value may be a whole section as a mapping."""
    if not isinstance(value, dict) or name in _FREE:
        return {name: Setting(value, where)}
    found: dict[str, Setting] = {}
    for key, inner in value.items():
        found |= flatten(f"{name}.{key}" if name else str(key), inner, where)
    return found
