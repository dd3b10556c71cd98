"""Values: what may stand under a key of a workload, declared once, at the dataclass field that holds it.

A key is honoured (it has a converter), honoured for some values only (`only`, with the reason), or refused
with a reason. Nothing is ignored silently: a key that did nothing would make two runs look different that are
not, so a key without effect says why (`unused`).

A converter takes what YAML gave and returns what we use; it raises `ValueError` whose message goes after
"expected".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataclasses import Field

    import numpy as np
    from numpy.typing import NDArray


Converter = Callable[[Any], Any]

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers like 1e-3, which YAML 1.1 takes for text and OmegaConf, DLIO's reader, does not."""


def boolean(value: Any) -> bool:
    """True or false, also as OmegaConf reads text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("true or false")


def integer(least: int | None = None, most: int | None = None) -> Converter:
    """Whole numbers within bounds; 4.0 is one."""
    return lambda value: int(_numeric(value, least, most, "a whole number"))


def number(least: float | None = None, most: float | None = None) -> Converter:
    """Finite numbers within bounds."""
    return lambda value: float(_numeric(value, least, most, "a number"))


def _numeric(value: Any, least: float | None, most: float | None, what: str) -> float | int:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        whole = what == "a number" or value == int(value)
        if whole and (least is None or value >= least) and (most is None or value <= most):
            return value
    at_least = "" if least is None else f" of at least {least:g}"
    raise ValueError(what + at_least + ("" if most is None else f", at most {most:g}"))


def text(value: Any) -> str:
    """A word or a line. Numbers are text, too: a prefix may be 7."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise ValueError("text")
    return str(value)


def word(value: Any) -> str:
    """Text, where YAML takes the word null for nothing."""
    return "null" if value is None else text(value)


def choice(*names: str) -> Converter:
    """One of some words, in any case."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError("one of " + ", ".join(names))

    return convert


def shuffle(value: Any) -> str:
    """off, seed or random. YAML reads a bare `off` as false, on which DLIO fails."""
    if value is False:
        return "off"
    converted: str = choice("off", "seed", "random")(value)
    return converted


def integers(least: int | None = None) -> Converter:
    """A list of whole numbers, as a tuple; one number is a list of one."""
    one = integer(least)

    def convert(value: Any) -> tuple[int, ...]:
        entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        try:
            return tuple(one(entry) for entry in entries)
        except ValueError as e:
            raise ValueError(f"a list, each {e}") from e

    return convert


def texts(value: Any) -> tuple[str, ...]:
    """A list of words, as a tuple; one word is a list of one."""
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple(text(entry) for entry in entries)


def mapping(value: Any) -> dict[str, Any]:
    """Keys and values, whatever they are."""
    if isinstance(value, dict):
        return value
    raise ValueError("keys and values")


def optional(converter: Converter) -> Converter:
    """The same, or null for none."""

    def convert(value: Any) -> Any:
        return None if value is None or value == "None" else converter(value)

    return convert


_PARAMETERS: Final = {
    "normal": ("mean", "stdev"),
    "uniform": ("min", "max"),
    "gamma": ("shape", "scale"),
    "exponential": ("scale",),
    "poisson": ("lam",),
}


@dataclass(frozen=True, slots=True)
class TimeDistribution:
    """A time in seconds.

    Attributes:
        kind: constant, normal, uniform, gamma, exponential or poisson.
        parameters: of the kind, in DLIO's order and names: constant has its value alone.
    """

    kind: str = "constant"
    parameters: tuple[float, ...] = (0.0,)

    @property
    def mean_s(self) -> float:
        """The expected time before negative draws are turned positive."""
        first, *rest = self.parameters
        if self.kind == "uniform":
            return (first + rest[0]) / 2
        if self.kind == "gamma":
            return first * rest[0]
        return first

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw `count` times: float64, shape (count,), none below 0."""
        import numpy as np

        if self.kind == "constant":
            return np.full(count, self.parameters[0])
        drawn: NDArray[np.float64] = getattr(random, self.kind)(*self.parameters, size=count)
        return np.abs(drawn.astype(np.float64))

    def with_stdev(self, stdev_s: float) -> TimeDistribution:
        """The same with DLIO's separate `..._stdev` key: a constant becomes a normal distribution."""
        if self.kind != "constant" or stdev_s == 0:
            return self
        return TimeDistribution("normal", (self.parameters[0], stdev_s))


NO_TIME: Final = TimeDistribution()
"""Always 0."""


def time_distribution(value: Any) -> TimeDistribution:
    """A scalar, `{mean}`, `{mean, stdev}`, or `{type, ...}` with the parameters of the type.

    Raises:
        ValueError: anything else.
    """
    positive = number(0)
    if value is None or value == {}:
        return TimeDistribution()
    if not isinstance(value, dict):
        try:
            return TimeDistribution("constant", (positive(value),))
        except ValueError as e:
            raise ValueError(f"{e} (seconds), or a distribution like {{mean: 0.3}}") from e
    given = dict(value)
    if "type" not in given and set(given) == {"mean"}:
        return TimeDistribution("constant", (positive(given["mean"]),))
    kind = str(given.pop("type", "normal")).lower()
    names = _PARAMETERS.get(kind)
    if names is None:
        raise ValueError(f"a type of {', '.join(_PARAMETERS)}")
    if set(given) != set(names):
        raise ValueError(f"for the type {kind} exactly {', '.join(names)}")
    try:
        parameters = tuple(positive(given[name]) for name in names)
    except ValueError as e:
        raise ValueError(f"{', '.join(names)} each {e}") from e
    if kind == "uniform" and parameters[0] > parameters[1]:
        raise ValueError("min not above max")
    return TimeDistribution(kind, parameters)


@dataclass(frozen=True, slots=True)
class SchemaKey:
    """What may stand under a key.

    Attributes:
        convert: from YAML's value to ours; says what is expected.
        only: the values that are possible here, after conversion; None: all.
        reason: why others are not possible; alone: why the key is not possible at all.
        unused: why the key has no effect; of `engines`: with the others.
        engines: the engines that honour it.
    """

    convert: Converter | None = None
    only: tuple[Any, ...] | None = None
    reason: str = ""
    unused: str = ""
    engines: tuple[str, ...] = ()

    def value(self, name: str, given: Any) -> Any:
        """The converted value.

        Raises:
            ValueError: the value is not possible; the message names the key.
        """
        if self.convert is None:
            raise ValueError(f"{name} is not supported: {self.reason}")
        try:
            converted = self.convert(given)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{name} is {given!r}, expected {e}") from e
        if self.only is not None and converted not in self.only:
            raise ValueError(f"{name} is {given!r}, which is not supported: {self.reason}")
        return converted


def key(default: Any, convert: Converter, **more: Any) -> Any:
    """A field that is a key of DLIO's; `more` as in `SchemaKey`."""
    metadata = {"key": SchemaKey(convert, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata, repr=False)  # it may hold a secret
    return field(default=default, metadata=metadata)


def _entries(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], type[Any] | None]]:
    """The fields of a section: their full names, and the sections that they are.

    Keys of sections within sections are joined with `_` in the names of fields.
    """
    for entry in fields(kind):
        section = entry.default_factory if "key" not in entry.metadata else None
        name = prefix + re.sub(r"^(parallelism|transformer|metric)_", r"\1.", entry.name)
        yield name, entry, section if isinstance(section, type) else None


def keys_of(kind: type[Any], prefix: str = "") -> dict[str, SchemaKey]:
    """The keys of a section and of the sections in it, by their full names."""
    keys: dict[str, SchemaKey] = {}
    for name, entry, section in _entries(kind, prefix):
        if section:
            keys |= keys_of(section, f"{name}.")
        elif "key" in entry.metadata:
            keys[name] = entry.metadata["key"]
    return keys


def build(kind: type[Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    """A section of converted values, by their full names; keys that it does not have are left out."""
    arguments: dict[str, Any] = {}
    for name, entry, section in _entries(kind, prefix):
        if section:
            arguments[entry.name] = build(section, values, f"{name}.")
        elif name in values:
            arguments[entry.name] = values[name]
    return kind(**arguments)


def values_of(part: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a section's keys, by their full names."""
    values: dict[str, Any] = {}
    for name, entry, section in _entries(part, prefix):
        value = getattr(part, entry.name)
        values |= values_of(value, f"{name}.") if section else {name: value}
    return values


def check_fields(part: Any, where: str) -> None:
    """Convert the fields of a section that was made without a schema's help.

    Raises:
        ValueError: a value is not possible; the message names the key.
    """
    for entry in fields(part):
        if "key" in entry.metadata:
            given = getattr(part, entry.name)
            converted = entry.metadata["key"].value(f"{where}.{entry.name}", given)
            if converted != given:
                object.__setattr__(part, entry.name, converted)
