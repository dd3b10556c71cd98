"""When to try again: exponential backoff with full jitter, never sooner than the server asks.

Pure: the caller brings the clock and the random number.
"""

from __future__ import annotations

import email.utils
from dataclasses import dataclass

RETRY_AFTER_MAX_S = 3600.0
"""A server that asks for more is taken to have asked for this."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between attempts.

    Attributes:
        first_s: upper bound of the first pause; it doubles each time.
        most_s: upper bound of any pause.
    """

    first_s: float = 0.1
    most_s: float = 10.0

    def pause_s(
        self, attempt: int, elapsed_s: float, budget_s: float, luck: float, asked_s: float | None
    ) -> float | None:
        """Seconds to wait after attempt number `attempt` (1, 2, ...), or None to give up.

        Args:
            attempt: how many attempts have failed.
            elapsed_s: since the first one began.
            budget_s: what the read may take in all.
            luck: a random number from 0 to 1.
            asked_s: what the server's Retry-After said.

        A pause that would not end within the budget is not begun: the error comes at once.
        """
        bound = min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 60))
        pause = luck * bound + (asked_s or 0.0)
        return pause if elapsed_s + pause < budget_s else None


def parse_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds of a Retry-After header: a number or a date; None for none or nonsense."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), RETRY_AFTER_MAX_S)
    try:
        when = email.utils.parsedate_to_datetime(text)
        seconds = when.timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)
