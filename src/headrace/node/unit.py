"""What an administrator needs to run the daemon: a systemd user unit, and a Slurm prolog and epilog."""

from __future__ import annotations

import shlex

__all__ = ["slurm_snippet", "systemd_unit"]


def systemd_unit(program: str, arguments: list[str]) -> str:
    """A unit for `systemctl --user`.

    Args:
        program: the path of `headrace`.
        arguments: of `headrace node start`.
    """
    command = shlex.join([program, "node", "start", "--foreground", *arguments])
    return f"""\
# ~/.config/systemd/user/headrace-node.service
# systemctl --user daemon-reload && systemctl --user enable --now headrace-node
[Unit]
Description=headrace node daemon

[Service]
ExecStart={command}
Restart=on-failure
KillSignal=SIGTERM
TimeoutStopSec=15
NoNewPrivileges=yes
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def slurm_snippet(program: str, arguments: list[str]) -> str:
    """Lines for a batch script, one daemon per node, or for a task prolog and epilog.

    Args:
        program: the path of `headrace`.
        arguments: of `headrace node start`.
    """
    start = shlex.join([program, "node", "start", "--foreground", *arguments])
    background = shlex.join([program, "node", "start", *arguments])
    quoted = shlex.quote(program)
    return f"""\
# In a batch script: a job step with one daemon on each node. It ends with the job.
export HEADRACE_RUNTIME_DIR="${{SLURM_TMPDIR:-/tmp}}/headrace-$SLURM_JOB_ID"
srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_NNODES" {start} &

# Or in the site's Prolog and Epilog, which run as root once per node and job:
#   runuser -u "$SLURM_JOB_USER" -- {background}
#   runuser -u "$SLURM_JOB_USER" -- {quoted} node stop --force
"""
