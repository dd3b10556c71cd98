"""A arbiter and planes in a made-up time, for tests without sockets."""

from __future__ import annotations

import secrets

import numpy as np

from headrace.control.messages import API, Flow, Register, Report
from headrace.control.policy import parse_policy
from headrace.control.service.arbiter import Arbiter

FS = "file_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 100, reads_per_s: 1000}}}\n"


class World:
    """Time, a arbiter, and planes that use what they are told, as far as they want it."""

    def __init__(self, policy=FS, epoch=1):
        self.now = 1000.0
        self.arbiter = Arbiter(parse_policy(policy), "reign", epoch, self.now)
        self.planes = []

    def plane(self, user="u", name="n"):
        plane = Simulated(self, user, name)
        self.planes.append(plane)
        return plane

    def round(self, seconds=1.0):
        """Time passes, and every plane that speaks reports once."""
        self.now += seconds
        for plane in self.planes:
            plane.report(seconds)

    def state(self):
        return self.arbiter.describe(self.now)


class Simulated:
    """One plane: `wants` is bytes (or three amounts) a second by job."""

    def __init__(self, world, user, name):
        self.world = world
        self.instance = secrets.token_hex(16)
        self.hello = Register(API, name, user, 1, self.instance)
        self.lease = world.arbiter.register(self.hello, world.now)
        self.sequence = 0
        self.silent = False
        self.wants = {}
        self.used = {}

    def granted(self, job, system="fs"):
        """Bytes a second; None: no limit; 0: nothing was said."""
        for grant in self.lease.grants:
            if (grant.job, grant.file_system) == (job, system):
                return grant.rates[0]
        return 0.0

    def report(self, seconds=1.0, system="fs"):
        if self.silent:
            return
        flows = []
        for job, want in self.wants.items():
            wanted = want if isinstance(want, tuple) else (want, 0.0, 0.0)
            rates = next(
                (g.rates for g in self.lease.grants if (g.job, g.file_system) == (job, system)),
                (1.0, 1.0, 1.0),
            )
            # A job goes at the pace of what is scarcest.
            pace = min(
                [1.0, *(r / w for r, w in zip(rates, wanted, strict=True) if w and r is not None)]
            )
            self.used[job] = tuple(w * pace for w in wanted)
            held = pace < 1.0
            scarce = [
                held and w > 0 and r is not None and w * pace >= r * 0.999
                for r, w in zip(rates, wanted, strict=True)
            ]
            flows.append(
                Flow(
                    job,
                    system,
                    tuple(u * seconds for u in self.used[job]),
                    tuple(w if s else 0.0 for w, s in zip(wanted, scarce, strict=True)),
                    tuple(seconds if s else 0.0 for s in scarce),
                )
            )
        self.sequence += 1
        message = Report(self.sequence, seconds, flows)
        self.lease = self.world.arbiter.report(self.lease.plane, message, self.world.now)


def total(planes, job):
    return float(np.sum([plane.granted(job) or 0.0 for plane in planes]))
