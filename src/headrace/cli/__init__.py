"""The command line: one file per command, each thin: it prints what the library returns.

Nothing heavy is imported here or by the commands' modules: numpy, rich and the rest of headrace
come in when a command runs, so that `headrace --help` answers at once.
"""

__all__ = ["main"]


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code (`headrace.cli.exit_codes`)."""
    import sys

    try:
        from headrace.cli.app import app_for

        app_for(sys.argv[1:])()
    except KeyboardInterrupt:  # before there was a command, or after it
        print("interrupted", file=sys.stderr)
        sys.exit(130)
