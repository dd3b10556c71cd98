"""Times: how long a step computes: always the same, or drawn anew for every step.

The distributions are DLIO's (numpy's), draws below zero are turned positive as there. Unlike DLIO's,
they come from a generator of their own: how long a step takes does not depend on how data is shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.config.values import number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NO_TIME", "TimeDistribution", "time_distribution"]

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
