"""What an administrator needs to run the daemon: a systemd user unit, and a Slurm prolog and epilog."""

from __future__ import annotations

import shlex

__all__ = ["systemd_unit"]


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
