"""Policies: what an operator wants of the planes, as a document, and how two of them differ.

`document` says what may stand there, `parse` reads YAML and says what is wrong with it, `difference`
compares. All of it is plain: no clock, no socket, no file.
"""

from headrace.control.policy.document import (
    RESOURCES,
    FileSystem,
    JobRule,
    Policy,
    PolicyError,
    Rates,
    UserRule,
)

__all__ = ["RESOURCES", "FileSystem", "JobRule", "Policy", "PolicyError", "Rates", "UserRule"]
