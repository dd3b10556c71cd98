"""Load: from a command line to a workload, or everything that is wrong with it.

The order is hydra's: the workload's file, then the overrides one after the other. `--config-dir` is looked
at before what is shipped. All problems of a workload are told at once, each with file and line.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.config import sections
from headrace.bench.config.document import Setting, flatten, parse_value, read_document
from headrace.bench.config.keys import ALIASES, KEYS, SECTION_ALIASES
from headrace.bench.dataset import DatasetSpec
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.bench.config.command_line import CommandLine, Override

__all__ = ["LoadedWorkload", "closest_key", "load_workload", "shipped_workloads"]

PROBLEMS_MAX: Final = 30
_STDEVS: Final = {
    "train.computation_time_stdev": "train.computation_time",
    "reader.preprocess_time_stdev": "reader.preprocess_time",
    "evaluation.eval_time_stdev": "evaluation.eval_time",
}
_ONLY_CHECKED: Final = frozenset(
    name for name, key in KEYS.items() if key.only is not None and len(key.only) >= 1
) | {"dataset.data_gen_method", "dataset.skip_listing", "dataset.listing_validation_interval"}
"""Keys that have one meaning here, and so no field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A workload and where it comes from."""

    name: str
    """`workload=NAME`."""
    source: str
    """The file."""
    workload: sections.Workload
    document: Mapping[str, Any]
    """The composed configuration with DLIO's keys, for config.yaml."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each key that was given stands."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    listing_interval: int | None = None
    """`dataset.skip_listing`: folders are not listed, and every so many-th file is looked for."""

    def at(self, key: str) -> str:
        """Where a key was given, and its name, for messages."""
        return f"{self.origins[key]}: {key}" if key in self.origins else f"{self.source}: {key}"


def shipped_workloads() -> list[str]:
    """The names of the workloads that come with headrace."""
    folder = files("headrace.bench") / "workloads"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def load_workload(line: CommandLine) -> LoadedWorkload:
    """Find, merge and check.

    Raises:
        WorkloadError: no such workload, or something is wrong with it.
    """
    path = _find(line.workload, line.config_dir)
    merging = _Merging(str(path))
    for name, setting in read_document(path, str(path)).items():
        merging.put(name, setting)
    for override in line.overrides:
        merging.override(override)
    workload = merging.workload()
    left = len(merging.problems) - PROBLEMS_MAX
    if merging.problems:
        told = merging.problems[:PROBLEMS_MAX] + ([f"and {left} more"] if left > 0 else [])
        raise WorkloadError("\n".join(told), path=str(path))
    assert workload is not None
    return LoadedWorkload(
        name=line.workload,
        source=str(path),
        workload=workload,
        document=merging.document(),
        origins={name: s.where for name, s in merging.settings.items()},
        notes=tuple(merging.notes),
        listing_interval=merging.listing_interval,
    )


def _find(name: str, config_dir: str | None) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    shipped = Path(str(files("headrace.bench") / "workloads"))
    places = [shipped]
    if config_dir is not None:
        own = Path(config_dir)
        if not own.is_dir():
            raise WorkloadError(f"--config-dir {config_dir} is no folder.", path=config_dir)
        places.insert(0, own / "workload")
    for place in places:
        if (place / f"{name}.yaml").is_file() and os.sep not in name:
            return place / f"{name}.yaml"
    known = {file.stem for place in places if place.is_dir() for file in place.glob("*.yaml")}
    meant = difflib.get_close_matches(name, known, 1)
    looked = ", ".join(str(place) for place in places)
    raise WorkloadError(
        f"there is no workload {name!r} in {looked}."
        + (f" Did you mean {meant[0]}?" if meant else ""),
        next_step="`headrace bench workloads` lists those that are shipped.",
    )


class _Merging:
    """The settings so far; collects what is wrong with them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.settings: dict[str, Setting] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.listing_interval: int | None = None

    # -- merging ---------------------------------------------------------------------------------

    def put(self, name: str, setting: Setting) -> None:
        known = self._known(name, setting.where)
        if known:
            self.settings[known] = setting

    def override(self, override: Override) -> None:
        where = f"command line: {override.written}"
        name = self._spelled(override.key)
        inside = [key for key in self.settings if key == name or key.startswith(name + ".")]
        if override.sign == "~":
            self._delete(override, name, inside, where)
            return
        assert override.value is not None
        if override.sign == "+" and name in self.settings:
            self.problems.append(f"{where}: {name} is there already; write ++ to change it")
        elif override.sign == "" and not inside and name in KEYS:
            self.problems.append(f"{where}: {name} is not there yet; write ++ to set it")
        for key, setting in flatten(override.key, parse_value(override.value), where).items():
            self.put(key, setting)

    def _delete(self, override: Override, name: str, inside: list[str], where: str) -> None:
        if not inside:
            self.problems.append(f"{where}: {name} is not there, so it cannot be taken away")
        elif override.value is not None and (
            parse_value(override.value) != self.settings[inside[0]].value
        ):
            self.problems.append(f"{where}: {name} has another value, so it is not taken away")
        else:
            for key in inside:
                del self.settings[key]

    def _spelled(self, name: str) -> str:
        section, dot, rest = name.partition(".")
        name = SECTION_ALIASES.get(section, section) + dot + rest
        return ALIASES[name][0] if name in ALIASES else name

    def _known(self, name: str, where: str) -> str | None:
        """The key's right name; None when it is unknown, which is told."""
        spelled = self._spelled(name)
        section, dot, rest = name.partition(".")
        note = ALIASES.get(SECTION_ALIASES.get(section, section) + dot + rest)
        if note:
            self.notes.append(f"{where}: {name} is taken as {note[0]} ({note[1]})")
        for key in (spelled, *_parents(spelled)):
            if key in KEYS:
                return spelled if key == spelled or key.startswith("storage.") else key
        self.problems.append(f"{where}: {closest_key(spelled)}")
        return None

    # -- checking --------------------------------------------------------------------------------

    def workload(self) -> sections.Workload | None:
        """The workload; None, with problems, when there is none."""
        values: dict[str, Any] = {}
        for name, setting in self.settings.items():
            base = next((k for k in (name, *_parents(name)) if k in KEYS), name)
            converted = self._converted(base, name, setting)
            if isinstance(converted, _Wrong):
                continue
            if base != name:  # storage.storage_options.endpoint_url
                inner = name.removeprefix(base + ".")
                values[base] = {**values.get(base, {}), inner: converted}
            else:
                values[base] = converted
        for stdev, of in _STDEVS.items():
            if values.get(stdev):
                values[of] = self._with_stdev(values, of, values[stdev])
        if values.get("dataset.skip_listing"):
            self.listing_interval = values.get("dataset.listing_validation_interval", 1000)
        return None if self.problems else self._built(values)

    def _with_stdev(self, values: dict[str, Any], of: str, stdev: float) -> Any:
        if of not in values:
            self.problems.append(f"{self.settings[of + '_stdev'].where}: {of} is missing beside it")
            return None
        return values[of].with_stdev(stdev)

    def _converted(self, base: str, name: str, setting: Setting) -> Any:
        key = KEYS[base]
        if key.convert is None:
            self.problems.append(f"{setting.where}: {base} is not supported: {key.reason}")
            return _Wrong()
        if isinstance(setting.value, str) and "${" in setting.value:
            self.problems.append(
                f"{setting.where}: {name}: interpolation (${{...}}) is not done here"
            )
            return _Wrong()
        if base != name:
            return setting.value
        try:
            value = key.convert(setting.value)
        except (ValueError, TypeError) as e:
            self.problems.append(f"{setting.where}: {name} is {setting.value!r}, expected {e}")
            return _Wrong()
        if key.only is not None and value not in key.only:
            self.problems.append(
                f"{setting.where}: {name} is {setting.value!r}, which is not supported: {key.reason}"
            )
            return _Wrong()
        return value

    def _built(self, values: dict[str, Any]) -> sections.Workload | None:
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, dot, key = name.partition(".")
            if not dot or name in _ONLY_CHECKED or name in _STDEVS:
                continue
            grouped.setdefault(section, {})[key] = value
        dataset = self._dataset(grouped.pop("dataset", {}))
        made: dict[str, Any] = {"dataset": dataset}
        for section, given in grouped.items():
            kind = _SECTIONS[section]
            made[section] = kind(**{key.replace(".", "_"): value for key, value in given.items()})
        if "framework" in values:
            made["framework"] = values["framework"]
        if self.problems:
            return None
        workload = sections.Workload(**made)
        root = workload.storage.storage_root
        folder = os.path.normpath(os.path.join(root, dataset.data_folder))
        return replace(workload, dataset=replace(dataset, data_folder=folder))

    def _dataset(self, flat: dict[str, Any]) -> DatasetSpec:
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            outer, dot, inner = key.partition(".")
            if dot:
                nested.setdefault(outer, {})[inner] = value
            else:
                nested[outer] = value
        if nested.get("requests") is not None:
            nested["requests"] = self._beside(nested["requests"], "dataset.requests")
        try:
            return DatasetSpec.from_mapping(nested)
        except (ValueError, TypeError, AttributeError) as e:
            self.problems.append(f"{self._where(str(e))}: {e}")
            return DatasetSpec()

    def _beside(self, name: str, key: str) -> str:
        """A file that a workload names lies beside it; one of the command line, where we are."""
        given_in_file = self.settings[key].where.startswith(f"{self._source}:")
        folder = os.path.dirname(os.path.abspath(self._source)) if given_in_file else os.getcwd()
        return os.path.join(folder, name)

    def _where(self, message: str) -> str:
        """Where the key stands that a message of DatasetSpec names."""
        match = re.match(r"dataset\.[\w.]+", message)
        name = match[0] if match else ""
        for key in (name, *_parents(name)):
            if key in self.settings:
                return self.settings[key].where
        return self._source

    def document(self) -> dict[str, Any]:
        """The settings as nested mappings, with DLIO's names."""
        nested: dict[str, Any] = {}
        for name, setting in self.settings.items():
            *outer, last = name.split(".")
            place = nested
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = setting.value
        return nested


class _Wrong:
    """A value that was told to be wrong."""


_SECTIONS: Final = {
    f.name: getattr(sections, f.name.capitalize())
    for f in fields(sections.Workload)
    if f.name not in ("framework", "dataset")
}


def _parents(name: str) -> Sequence[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def closest_key(name: str) -> str:
    """That a key is not known, and which one was meant."""
    if name.split(".", maxsplit=1)[0] in ("defaults", "hydra"):
        return f"{name}: files are not composed of others here; write all keys into one"
    known = [*KEYS, *ALIASES, *_SECTIONS, "dataset"]
    meant = difflib.get_close_matches(name, known, 1, 0.6)
    if not meant:
        last = name.rsplit(".", maxsplit=1)[-1]
        meant = [key for key in KEYS if key.split(".")[-1] == last][:1]
    if not meant:
        tails = {key.split(".")[-1]: key for key in KEYS}
        meant = [
            tails[n]
            for n in difflib.get_close_matches(name.rsplit(".", maxsplit=1)[-1], tails, 1, 0.75)
        ]
    return f"{name} is not known" + (f"; did you mean {meant[0]}?" if meant else "")
