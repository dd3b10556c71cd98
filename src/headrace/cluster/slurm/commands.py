"""Commands: Slurm's programs, each run with a deadline, and what their refusals mean.

A refusal becomes the most telling error: no Slurm here, no configuration, slurmctld away or slow, a request
that this cluster cannot meet. What the program said is always in the message.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.cluster.executor import SchedulerUnavailable
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping


_SAID_MAX = 2000

# What would change the output of the commands that we read. SLURM_TIME_FORMAT: seconds know no time zone and no
# hour that comes twice; SLURM_BITSTR_LEN=0: the numbers of an array are not cut short.
_QUERY = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
_NOT_OURS = re.compile(r"(SQUEUE|SINFO|SACCT|SCONTROL|SPRIO)_")

_REFUSALS: Final[dict[str, tuple[type[ClusterError], str, str | None]]] = {
    r"Unable to contact slurm controller|Connection refused|controller.*not responding|"
    r"Zero Bytes were transmitted|Unexpected message received|Communication connection failure|"
    r"Transport endpoint|standby mode": (
        SchedulerUnavailable, "{}: {}.", "slurmctld is down: ask `scontrol ping`, and try again."),
    "Socket timed out|Message receive failure|timed out": (ClusterTimeout, "{}: {}.",
        "slurmctld is overloaded. Look with squeue whether it was done, and try again."),
    # Before requests: "Invalid authentication" and the like are none.
    r"(?s)\A(?!.*submission failed).*(configuration source|fetch_config|slurm\.conf|DNS SRV|"
    r"Unable to process configuration|cannot find [^\n]* plugin|Incompatible Slurm plugin|munge|"
    r"authentication)": (
        ClusterError, "{} cannot find this cluster: {}.",
        ("Slurm is installed but not set up here (SLURM_CONF, /etc/slurm/slurm.conf, munge); "
         "HEADRACE_EXECUTOR=local runs jobs on this machine.")),
    r"Invalid .*(partition|account|qos|generic resource|gres|feature|job array|--|dependency|license)|"
    r"node configuration is not available|reservation is invalid|time limit is invalid|"
    r"violates accounting|dependency problem|More processors|can not be satisfied|unrecognized option|"
    r"option .* (requires|is ambiguous)|does not look like a batch script|Invalid .* specification|"
    r"Unable to open file|DOS line breaks|Access/permission denied|Job size specification|"
    r"Node count specification|Pathname|Invalid (?!job id)": (ClusterRequestError, "{}: {}.", None),
}  # fmt: skip
"""What a program says, the error that it means, and what to do. The first one that fits holds."""


def is_set_up(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine has Slurm's commands and configuration; slurmctld may be down all the same."""
    files = (environment.get("SLURM_CONF", "/etc/slurm/slurm.conf"), "/run/slurm/conf/slurm.conf")
    return shutil.which("scontrol") is not None and any(map(os.path.exists, files))


@dataclass(frozen=True, slots=True)
class Commands:
    """How Slurm's programs are called."""

    deadline_s: float = 30.0

    def query(self, *command: str) -> str:
        """Run a program that only asks; its output."""
        environment = {k: v for k, v in os.environ.items() if not _NOT_OURS.match(k)} | _QUERY
        return self.run(*command, environment=environment)[0].decode(errors="replace")

    def run(
        self,
        *command: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
    ) -> tuple[bytes, str]:
        """Run a program; what it wrote to its output, and what it told the user.

        Raises:
            ClusterError: it is missing, refuses, or does not end in time; see the module.
        """
        try:
            ended = subprocess.run(  # noqa: S603 - no shell; options are joined to their values
                command, input=stdin, env=environment, cwd=directory, capture_output=True,
                check=False, timeout=self.deadline_s,
            )  # fmt: skip
        except FileNotFoundError as e:
            if directory is not None and not os.path.isdir(directory):  # noqa: PTH112 - as given
                text = f"{directory}: the job's working directory does not exist"
                raise ClusterRequestError(text, path=directory) from e
            raise ClusterError(
                f"{command[0]} is not installed here, or not on PATH.",
                next_step="Run this where Slurm's commands are, or use the local executor "
                "(HEADRACE_EXECUTOR=local).",
            ) from e
        except OSError as e:
            raise ClusterError(f"{command[0]} cannot be run: {e.strerror}.") from e
        except subprocess.TimeoutExpired as e:
            raise ClusterTimeout(
                f"{' '.join(command[:4])} did not answer within {self.deadline_s:g} s: slurmctld is overloaded "
                "or cannot be reached.",
                next_step="Ask `scontrol ping`, and try again.",
            ) from e
        message = ended.stderr.decode(errors="replace").strip()
        if ended.returncode != 0:
            message = message or ended.stdout.decode(errors="replace")
            raise refusal(command[0], ended.returncode, message)
        return ended.stdout, message


def refusal(program: str, status: int, message: str) -> ClusterError:
    """What a program's failure means, from what it said."""
    text = " ".join(line.strip() for line in message.splitlines())[:_SAID_MAX]
    text = text.replace(f"{program}: error: ", "").replace(f"{program}: fatal: ", "")
    for pattern, (error, says, next_step) in _REFUSALS.items():
        if re.search(pattern, message, re.IGNORECASE):
            return error(says.format(program, text), next_step=next_step)
    return ClusterError(f"{program} failed with status {status}: {text or 'it said nothing'}.")
