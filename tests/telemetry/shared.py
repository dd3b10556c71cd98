"""What tests of the agent share: messages as loaders send them, clocks that are set by hand, accounts."""

import json

from headrace.base.job import JobIdentity
from headrace.telemetry.accounts import Accounts, Ledger, Now, Observation
from headrace.telemetry.processes import JobProcesses, Use

T0 = 1_700_000_000.0


def message(
    job="4711", instance="0" * 32, stall=None, worked=0.0, samples=0, gpus=0, ended=False,
    consumer=True, ranks=0, began=T0, tiers=None, **identity,
):  # fmt: skip
    """As `control/publishing.py` writes them."""
    systems = {*(stall or {}), *(tiers or {})}
    return json.dumps(
        {
            "v": 1, "instance": instance, "pid": 1,
            "job": {"job_id": job, "gpus": gpus, "gpu_indices": [], **identity},
            "consumer": consumer, "ended": ended, "began_s": began, "local_ranks": ranks,
            "worked_s": worked, "batches": samples, "samples": samples,
            "file_systems": {
                name: {
                    "stall_s": (stall or {}).get(name, {}),
                    "tier_bytes": (tiers or {}).get(name, {}),
                }
                for name in systems
            },
        }
    ).encode()  # fmt: skip


def processes(job="4711", uid=1000, began=T0, pids=(1,), gpus=0, **use):
    """A job as `Processes` finds it."""
    identity = JobIdentity(job_id=job, gpus=gpus, cpus=4, user="ann")
    return JobProcesses(identity, uid, began, set(pids), Use(**use))


def seen(*jobs, gpus=(), groups=None, pressure=0.0, busiest="", job_of=lambda _pid: ""):
    """A look at the node."""
    by_id = {one.identity.job_id: one for one in jobs}
    return Observation(by_id, groups or {}, list(gpus), job_of, pressure, busiest)


def now(seconds):
    """So many seconds after the beginning."""
    return Now(1000.0 + seconds, T0 + seconds)


def accounts(**given):
    """Accounts and the ledger that they write."""
    ledger = Ledger()
    return Accounts(ledger, lambda uid: {1000: "ann", 0: "root"}.get(uid, ""), **given), ledger


def totals(ledger, job="4711"):
    """A job's figures by name, label and file system."""
    return {key[1:]: value for key, value in ledger.totals.items() if key[0] == job}
