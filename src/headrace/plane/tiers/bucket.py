"""TokenBucket: how much may be read now, by a rate. Pure: the caller brings the clock.

What is asked for is let through as soon as the bucket is not in debt, however large it is, and the
debt is paid off before the next. So a batch larger than the bucket cannot wait for ever, and the mean
rate is exact.
"""

from __future__ import annotations

__all__ = ["TokenBucket"]

BURST_S = 0.25
"""How much an idle bucket saves up, in seconds of its rate: hides a hiccup, not more."""


class TokenBucket:
    """Lets `rate` units a second through.

    Args:
        rate: units per second; None: everything at once.
        now: seconds on the caller's clock.
        burst_s: how much it saves up while idle, in seconds of its rate.
    """

    def __init__(self, rate: float | None, now: float, burst_s: float = BURST_S) -> None:
        self._burst_s = burst_s
        self._rate = rate
        self._tokens = 0.0
        self._at = now

    @property
    def rate(self) -> float | None:
        """Units per second."""
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        """Change the rate from now on. A debt stays, in units."""
        self._fill(now)
        self._rate = rate

    def wait_s(self, now: float) -> float:
        """Seconds until something may pass; 0.0: now."""
        self._fill(now)
        if self._rate is None or self._tokens >= 0.0:
            return 0.0
        return -self._tokens / self._rate

    def spend(self, units: float) -> None:
        """Count what was let through; negative: what was paid for and then not needed."""
        if self._rate is not None:
            self._tokens -= units

    def _fill(self, now: float) -> None:
        if self._rate is None:
            self._tokens = 0.0
        else:
            earned = max(0.0, now - self._at) * self._rate
            self._tokens = min(self._rate * self._burst_s, self._tokens + earned)
        self._at = now
