"""Sharing: who gets how much of a file system. Plain functions of arrays: no clock, no I/O, no names.

`fill` pours one amount over many, `decide` does that for file systems, users, jobs and planes,
`demand` estimates what each could use. docs/policies.md says what the result keeps to.
"""

from headrace.control.sharing.decide import Problem, Shares, decide
from headrace.control.sharing.demand import demand_after
from headrace.control.sharing.fill import fill

__all__ = ["Problem", "Shares", "decide", "demand_after", "fill"]
