"""Chi-square thresholds without scipy.

All statistical tests use fixed seeds, so they pass or fail for good. `P_LIMIT` is the chance that a
truly random generator would have failed one of them when it was written.
"""

from math import sqrt

P_LIMIT = 1e-4
Z_LIMIT = 3.719  # standard normal quantile of 1 - P_LIMIT


def limit(freedom):
    """Upper quantile of the chi-square distribution (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + Z_LIMIT * sqrt(spread)) ** 3


def statistic(counts, expected):
    return float((((counts - expected) ** 2) / expected).sum())
