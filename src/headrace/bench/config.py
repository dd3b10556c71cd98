"""Configuration: DLIO's workload files and its command line, without hydra.

    workload=unet3d_h100 ++workload.reader.batch_size=8 --config-dir=DIR ++hydra.run.dir=DIR

The order is hydra's: the workload's file, then the overrides one after the other. `--config-dir` is searched
before what is shipped. `++x=v` sets a key, `+x=v` adds one, `x=v` changes one that is there, `~x` takes one
away. What hydra can do beyond running one job (sweeps, launchers, its logging) is refused by name. All
problems of a workload are reported at once, each with file and line.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from headrace.base.text import redacted
from headrace.bench.objects import object_url
from headrace.bench.schema import ALIASES, KEYS, SECTION_ALIASES, Workload
from headrace.bench.values import TimeDistribution, build, values_of
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_ASSIGNMENT: Final = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_REFUSED: Final = {
    **dict.fromkeys(("--multirun", "-m"), "run the command once for each value"),
    **dict.fromkeys(("--config-path", "-cp"), "give --config-dir, which is looked at first"),
    **dict.fromkeys(("--config-name", "-cn"), "the workload is named by workload=NAME"),
    "--overwrite": "headrace bench generate has it, with the same workload and overrides",
    "--experimental-rerun": "give the overrides again",
    **dict.fromkeys(("--shell-completion", "-sc"), "the shell completes `headrace` itself"),
}


class HydraOverride(NamedTuple):
    """One word of the command line about a key of the workload."""

    sign: str
    """++, +, ~ or nothing."""
    key: str
    value: str | None
    """As written; None without `=`."""
    written: str
    """The whole word."""


@dataclass(slots=True)
class CommandLine:
    """What a command line says, before any file is read."""

    workload: str = "default"
    config_dir: str | None = None
    run_dir: str | None = None
    """`hydra.run.dir`."""
    output_subdir: str = ".hydra"
    """`hydra.output_subdir`: where the configuration is written, below the output folder."""
    overrides: tuple[HydraOverride, ...] = ()
    task_overrides: tuple[str, ...] = ()
    """All that hydra lists in overrides.yaml: what is not about hydra itself."""
    hydra_overrides: tuple[str, ...] = ()


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Read the words after the program's name.

    Raises:
        WorkloadError: a word makes no sense, or asks for what is not done here; names all of them.
    """
    line, problems, rest = CommandLine(), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        try:
            if word.startswith("-"):
                line.config_dir = _config_dir(word, rest)
            else:
                _take(line, word)
        except ValueError as e:
            problems.append(redacted(str(e)))
    if problems:
        raise WorkloadError("\n".join(problems))
    return line


def _config_dir(word: str, rest: list[str]) -> str:
    """The value of --config-dir, the one option that is done here."""
    name, equals, value = word.partition("=")
    if name in _REFUSED:
        raise ValueError(f"{name} is not done here: {_REFUSED[name]}")
    if name not in ("--config-dir", "-cd"):
        raise ValueError(f"{name} is not known; it is no option of DLIO's command line")
    value = value if equals else rest.pop(0) if rest else ""
    if not value:
        raise ValueError(f"{name} needs a folder that holds workload/NAME.yaml")
    return value


def _take(line: CommandLine, word: str) -> None:
    """Add an assignment to the command line's."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        example = f"workload={word}" if word.isidentifier() else "workload=NAME"
        raise ValueError(f"{word!r} makes no sense, expected KEY=VALUE such as {example}")
    sign, key, value = match["sign"], match["key"], match["value"] or ""
    section, _, name = key.partition(".")
    if section == "hydra":
        line.hydra_overrides += (word,)
        if key == "hydra.run.dir" and value:
            line.run_dir = _unquoted(value)
        elif key == "hydra.output_subdir" and value:
            line.output_subdir = _unquoted(value)
        elif key != "hydra.job.chdir" or value.lower() != "false":  # which is what is done
            known = "hydra.run.dir and hydra.output_subdir"
            raise ValueError(f"{word!r}: of hydra only {known} have a meaning here")
    elif section != "workload":
        meant = _meant(key) or key
        shown = value if redacted(word) == word else "***"
        whole = f"{sign or '++'}workload.{meant}" + (f"={shown}" if value else "")
        raise ValueError(f"{word!r}: {key} is no key, did you mean {whole}?")
    elif name:
        line.overrides += (HydraOverride(sign, name, match["value"], redacted(word)),)
    elif sign == "~":
        raise ValueError(f"{word!r}: a run needs a workload")
    else:
        line.workload = _unquoted(value)
    if section == "workload":
        line.task_overrides += (redacted(word),)


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


_DOCUMENT_BYTES_MAX: Final = 4 << 20
_DEPTH_MAX: Final = 12

_MAPPINGS: Final = ("storage.storage_options", "checkpoint.ksm")
_FREE: Final = frozenset({*_MAPPINGS, *(name for name in KEYS if name.endswith("_time"))})
"""Keys whose value may be a mapping of its own."""

_DICT_KEY: Final = re.compile(r"([{,]\s*[\w.]+):(?=\S)")
"""hydra's {a:1,b:2}, where YAML wants {a: 1, b: 2}."""


class YamlSetting(NamedTuple):
    """A value and where it was given."""

    value: Any
    where: str


def parse_value(written: str) -> Any:
    """A value of the command line: hydra's grammar, as far as it is YAML's; `off` stays a word."""
    if written.strip().lower() in ("off", "on", "yes", "no"):
        return written.strip().lower()  # words in hydra's grammar, booleans in YAML 1.1
    if written.lstrip().startswith("{"):
        written = _DICT_KEY.sub(r"\1: ", written)
    try:
        return yaml.safe_load(written)
    except yaml.YAMLError:
        return written


def read_document(path: Path) -> dict[str, YamlSetting]:
    """The settings of a YAML file, by their full keys, each with its file and line.

    Raises:
        WorkloadError: the file cannot be read, is no YAML, or says a key twice.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_DOCUMENT_BYTES_MAX + 1)
        written = raw.decode()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise WorkloadError(
            f"{path} cannot be read: {why}.", path=str(path),
            next_step="Check the path; `headrace bench workloads` lists those that are shipped.",
        ) from e  # fmt: skip
    if len(raw) > _DOCUMENT_BYTES_MAX:
        raise WorkloadError(f"{path} is larger than {_DOCUMENT_BYTES_MAX} bytes.", path=str(path))
    try:
        return _settings_of(written, str(path))
    except yaml.YAMLError as e:
        raise WorkloadError(f"{path} is no YAML: {' '.join(str(e).split())}.") from e
    except RecursionError as e:
        raise WorkloadError(f"{path} is nested too deeply.", path=str(path)) from e


def _settings_of(written: str, path: str) -> dict[str, YamlSetting]:
    settings: dict[str, YamlSetting] = {}

    def at(node: Any) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    def walk(node: Any, prefix: str, depth: int) -> None:
        if depth > _DEPTH_MAX:
            raise WorkloadError(f"{at(node)}: it is nested too deeply.")
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in seen:
                raise WorkloadError(f"{at(key)}: {name} stands there twice.")
            seen.add(name)
            empty = value.tag == "tag:yaml.org,2002:null"  # `reader:` with nothing below
            if isinstance(value, yaml.MappingNode) and name not in _FREE:
                walk(value, name + ".", depth + 1)
            elif not (empty and any(known.startswith(name + ".") for known in KEYS)):
                settings[name] = YamlSetting(loader.construct_object(value, deep=True), at(key))

    loader = yaml.SafeLoader(written)
    try:
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise WorkloadError(f"{at(root)}: expected sections such as `dataset:`.")
        if root is not None:
            walk(root, "", 0)
    finally:
        loader.dispose()
    return settings


def flatten(name: str, value: Any, where: str) -> dict[str, YamlSetting]:
    """Settings of one override, whose value may be a whole section as a mapping."""
    if not isinstance(value, dict) or name in _FREE:
        return {name: YamlSetting(value, where)}
    settings: dict[str, YamlSetting] = {}
    for key, inner in value.items():
        settings |= flatten(f"{name}.{key}" if name else str(key), inner, where)
    return settings


_PROBLEMS_MAX: Final = 30
_TIMES: Final = ("train.computation_time", "reader.preprocess_time", "evaluation.eval_time")
"""Each may have its deviation beside it: `..._stdev`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A workload and where it comes from."""

    name: str
    """`workload=NAME`."""
    source: str
    """The file."""
    workload: Workload
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


SHIPPED: Final = Path(str(files("headrace.bench") / "workloads"))


def shipped_workloads() -> list[str]:
    """The names of the workloads that come with headrace."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def load_workload(line: CommandLine) -> LoadedWorkload:
    """Find, merge and check.

    Raises:
        WorkloadError: no such workload, or something is wrong with it.
    """
    path = _find(line.workload, line.config_dir)
    merging = _Merging(str(path))
    for name, setting in read_document(path).items():
        merging.put(name, setting)
    for override in line.overrides:
        merging.override(override)
    workload = merging.workload()
    left = len(merging.problems) - _PROBLEMS_MAX
    if merging.problems:
        problems = merging.problems[:_PROBLEMS_MAX] + ([f"and {left} more"] if left > 0 else [])
        raise WorkloadError(redacted("\n".join(problems)), path=str(path))
    assert workload is not None
    return LoadedWorkload(
        name=line.workload, source=str(path), workload=workload, document=merging.document(),
        origins={name: s.where for name, s in merging.settings.items()},
        notes=tuple(merging.notes), listing_interval=merging.listing_interval,
    )  # fmt: skip


def _find(name: str, config_dir: str | None) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    places = [SHIPPED]
    if config_dir is not None:
        own = Path(config_dir)
        if not own.is_dir():
            raise WorkloadError(f"--config-dir {config_dir} is no folder.", path=config_dir)
        places.insert(0, own / "workload")
    for place in places:
        if (place / f"{name}.yaml").is_file() and os.sep not in name:
            return place / f"{name}.yaml"
    known = {file.stem for place in places if place.is_dir() for file in place.glob("*.yaml")}
    meant = [f" Did you mean {m}?" for m in difflib.get_close_matches(name, known, 1)]
    raise WorkloadError(
        f"there is no workload {name!r}"
        + ("" if config_dir is None else f" in {places[0]}, nor among those that are shipped")
        + f".{''.join(meant)}",
        next_step="`headrace bench workloads` lists those that are shipped.",
    )


class _Merging:
    """The settings so far; collects what is wrong with them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.settings: dict[str, YamlSetting] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.listing_interval: int | None = None

    # -- merging ---------------------------------------------------------------------------------

    def put(self, name: str, setting: YamlSetting) -> None:
        """Take a setting under its key's right name; a key that is unknown is a problem."""
        spelled, note = self._spelled(name)
        if note:
            self.notes.append(f"{setting.where}: {name} is taken as {spelled} ({note})")
        known = next((key for key in (spelled, *_parents(spelled)) if key in KEYS), None)
        if known is None or (spelled != known and known not in _FREE):
            self.problems.append(f"{setting.where}: {closest_key(spelled)}")
        elif spelled != known and known not in _MAPPINGS:
            before = self.settings.get(known)  # one part of a distribution
            parts = before.value if before is not None and isinstance(before.value, dict) else {}
            part = spelled.removeprefix(known + ".")
            self.settings[known] = YamlSetting({**parts, part: setting.value}, setting.where)
        else:
            self.settings[spelled] = setting

    def override(self, override: HydraOverride) -> None:
        where = f"command line: {override.written}"
        name, _ = self._spelled(override.key)
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

    def _delete(self, override: HydraOverride, name: str, inside: list[str], where: str) -> None:
        given = None if override.value is None else parse_value(override.value)
        if not inside:
            self.problems.append(f"{where}: {name} is not there, so it cannot be taken away")
        elif override.value is not None and given != self.settings[inside[0]].value:
            self.problems.append(f"{where}: {name} has another value, so it is not taken away")
        else:
            for key in inside:
                del self.settings[key]

    def _spelled(self, name: str) -> tuple[str, str]:
        """A key's right name, and why it is not the one that was given."""
        section, dot, rest = name.partition(".")
        name = SECTION_ALIASES.get(section, section) + dot + rest
        return ALIASES.get(name, (name, ""))

    # -- checking --------------------------------------------------------------------------------

    def workload(self) -> Workload | None:
        """The workload; None, with problems, when there is none."""
        values: dict[str, Any] = {}
        for name, setting in self.settings.items():
            base = next((k for k in (name, *_parents(name)) if k in KEYS), name)
            try:
                value = _converted(base, name, setting.value)
            except ValueError as e:
                self.problems.append(f"{setting.where}: {e}")
                continue
            if base != name:  # storage.storage_options.endpoint_url
                values[base] = {**values.get(base, {}), name.removeprefix(base + "."): value}
            else:
                values[base] = value
        self._spread_times(values)
        if values.get("dataset.skip_listing"):
            self.listing_interval = values.get("dataset.listing_validation_interval", 1000)
        if values.get("dataset.requests") is not None:
            values["dataset.requests"] = self._beside(values["dataset.requests"])
        if self.problems:
            return None
        try:
            return _placed(build(Workload, values))
        except ValueError as e:  # of keys that do not go together
            self.problems.append(f"{self._where(str(e))}: {e}")
            return None

    def _spread_times(self, values: dict[str, Any]) -> None:
        for time in _TIMES:
            stdev = f"{time}_stdev"
            if values.get(stdev) and time in values:
                values[time] = values[time].with_stdev(values[stdev])
            elif values.get(stdev):
                self.problems.append(f"{self.settings[stdev].where}: {time} is missing beside it")

    def _beside(self, name: str) -> str:
        """A file that a workload names lies beside it; one of the command line, where we are."""
        given_in_file = self.settings["dataset.requests"].where.startswith(f"{self._source}:")
        folder = os.path.dirname(os.path.abspath(self._source)) if given_in_file else os.getcwd()
        return os.path.join(folder, name)

    def _where(self, message: str) -> str:
        """Where the key stands that a message begins with."""
        match = re.match(r"\w+\.[\w.]+", message)
        name = match[0] if match else ""
        for key in (name, *_parents(name)):
            if key in self.settings:
                return self.settings[key].where
        return self._source

    def document(self) -> dict[str, Any]:
        """The settings as nested mappings, with DLIO's names and without secrets."""
        nested: dict[str, Any] = {}
        for name, setting in self.settings.items():
            *outer, last = name.split(".")
            place = nested
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = setting.value
        plain: dict[str, Any] = redacted(nested)
        return plain


def _placed(workload: Workload) -> Workload:
    """With the folders below `storage_root`. Raises ValueError if they are not of its bucket."""
    storage, data, saved = workload.storage, workload.dataset, workload.checkpoint
    if storage.is_objects:
        folder = object_url(storage, data.data_folder, "dataset.data_folder")
        if workload.workflow.checkpoint:
            place = object_url(storage, saved.checkpoint_folder, "checkpoint.checkpoint_folder")
            workload = replace(workload, checkpoint=replace(saved, checkpoint_folder=place))
    else:
        folder = os.path.normpath(os.path.join(storage.storage_root, data.data_folder))
    return replace(workload, dataset=replace(data, data_folder=folder))


def _converted(base: str, name: str, value: Any) -> Any:
    """A key's value as the schema wants it. Raises ValueError if it is not supported, or makes no sense."""
    if KEYS[base].convert is not None:
        if isinstance(value, str) and "${" in value:
            raise ValueError(f"{name}: interpolation (${{...}}) is not done here")
        if base != name:
            return value
    return KEYS[base].value(base, value)


def _parents(name: str) -> Sequence[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def closest_key(name: str) -> str:
    """That a key is not known, and which one was meant."""
    if name.partition(".")[0] in ("defaults", "hydra"):
        return f"{name}: files are not composed of others here; write all keys into one"
    meant = _meant(name)
    return f"{name} is not known" + (f"; did you mean {meant}?" if meant else "")


def _meant(name: str) -> str:
    """The key that is most like a name, which may lack its section or have another's; '': none."""
    section, _, word = name.rpartition(".")
    everywhere = [] if section in KEYS else [*KEYS, *ALIASES]  # a key has no keys below it
    last = [key for key in everywhere if key.rpartition(".")[2] == word]
    known = [*KEYS, *ALIASES, *(key.partition(".")[0] for key in KEYS)]
    return next(iter(difflib.get_close_matches(name, last or known, 1, 0.0 if last else 0.6)), "")


def queried(line: CommandLine) -> Any:
    """The value of the key that `workflow.query` names: as given, else its default; None without a query.

    Raises:
        WorkloadError: the workload is wrong, or has no such key.
    """
    queries = [override for override in line.overrides if override.key == "workflow.query"]
    others = tuple(override for override in line.overrides if override.key != "workflow.query")
    loaded = load_workload(replace(line, overrides=others))
    if not queries or queries[-1].value is None:
        return None
    name = str(parse_value(queries[-1].value))
    given: Any = loaded.document
    for part in name.split("."):
        given = given.get(part) if isinstance(given, dict) else None
    if given is not None and (name in KEYS or not isinstance(given, dict)):
        return given
    values = values_of(loaded.workload)
    if name not in values:
        raise WorkloadError(f"command line: {queries[-1].written}: {closest_key(name)}")
    value = values[name]
    return value.mean_s if isinstance(value, TimeDistribution) else value
