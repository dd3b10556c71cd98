"""Doctor: why a training would wait for its data, found out in seconds, without changing anything.

`examine` measures the data set where it lies, and the machine; `diagnose` says what follows: the rates
that torch's DataLoader and headrace's are expected to have, a verdict in a sentence, and what to do first.
The first needs a disk and a clock; the second is pure.

    from headrace.insight.doctor import diagnose, examine, lines_of

    findings = examine("photos/")
    for _, line in lines_of(diagnose(findings, batch=256, step_s=0.08)):
        print(line)
"""

from __future__ import annotations

from headrace.insight.doctor.advice import diagnose
from headrace.insight.doctor.examine import ExamineOptions, examine
from headrace.insight.doctor.findings import Diagnosis, Findings
from headrace.insight.doctor.text import doctor_page, lines_of

__all__ = [
    "Diagnosis",
    "ExamineOptions",
    "Findings",
    "diagnose",
    "doctor_page",
    "examine",
    "lines_of",
]
