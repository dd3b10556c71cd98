"""Public names: what is exported exists, is documented, and costs nothing to import."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import headrace
import headrace.errors
from headrace.config import ReaderOptions

MODULES = [
    module.name
    for module in pkgutil.walk_packages(headrace.__path__, "headrace.")
    if not re.search(
        r"\.(_native|torch|tensorflow|grain|frameworks|testing)\b|^headrace\.(demo|ray)",
        module.name,
    )
]
"""All modules that can be imported without a framework."""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )


def test_importing_headrace_needs_numpy_only():
    code = "import sys; before = set(sys.modules); import headrace; {}; print(*set(sys.modules) - before)"
    for use in ("pass", "headrace.open, headrace.loader, headrace.pack, headrace.Store"):
        ended = run(code.format(use))
        assert ended.returncode == 0, ended.stderr
        roots = {name.partition(".")[0] for name in ended.stdout.split()}
        foreign = roots - set(sys.stdlib_module_names) - {"headrace", "numpy"}
        # An editable install brings its own finder.
        assert {name for name in foreign if not name.startswith("_")} == set()


def test_help_imports_neither_numpy_nor_rich():
    code = (
        "import sys; sys.argv = ['headrace', '--help']\n"
        "from headrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded:', *sorted({'numpy', 'rich', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    ended = run(code)
    assert ended.stdout.splitlines()[-1] == "loaded:", ended.stdout + ended.stderr


def test_submitting_imports_neither_numpy_nor_pydantic(tmp_path):
    """They would take as long as all the rest; typer wants pydantic for a number, not for texts."""
    for name, words in (("sbatch", "cat >/dev/null; echo 17"), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    code = (
        f"import os, sys; os.environ |= {{'PATH': '{tmp_path}:/usr/bin:/bin', 'HOME': '{tmp_path}'}}\n"
        f"os.environ['XDG_STATE_HOME'] = '{tmp_path}'\n"
        f"sys.argv = 'headrace cluster batch --gpus 2 --json {tmp_path}/job.sh'.split()\n"
        "from headrace.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "print('loaded:', *sorted({'numpy', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    ended = run(code)
    assert '"job": "17"' in ended.stdout, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "loaded:"


SCONTROL = """case "$*" in
*nodes) echo "NodeName=g1 CPUTot=8 RealMemory=9000 Gres=gpu:2 State=IDLE Partitions=main" ;;
*partitions) echo "PartitionName=main Default=YES State=UP Nodes=g1 MaxTime=60" ;;
*config) echo "ClusterName = lab"; echo "SLURM_VERSION = 22.05.8" ;;
esac"""


def test_the_benchmark_of_files_imports_no_object_engine():
    code = (
        "import sys, headrace.bench.session\n"
        "print('loaded:', *sorted({'asyncio', 'headrace.io.objects.engine', 'ssl'} & set(sys.modules)))"
    )
    ended = run(code)
    assert ended.stdout.splitlines()[-1] == "loaded:", ended.stdout + ended.stderr


def test_all_names_what_is_public_and_nothing_else():
    wrong = []
    for name in MODULES:
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", None)
        if exported is None:
            continue
        own = {
            key
            for key, value in vars(module).items()
            if not key.startswith("_")
            and getattr(value, "__module__", None) == name
            and (inspect.isclass(value) or inspect.isfunction(value))
        }
        if len(set(exported)) != len(exported):
            wrong.append(f"{name}: a name twice in __all__")
        wrong += [
            f"{name}.{each}: in __all__, but not there"
            for each in exported
            if not hasattr(module, each)
        ]
        wrong += [
            f"{name}.{each}: public, but not in __all__" for each in sorted(own - set(exported))
        ]
    assert not wrong


def test_every_module_says_what_it_is_for():
    assert [
        name for name in MODULES if not (importlib.import_module(name).__doc__ or "").strip()
    ] == []


def test_every_name_of_the_facade_is_documented(root):
    names = sorted(set(headrace.__all__) - {"__version__"})
    assert [name for name in names if not inspect.getdoc(getattr(headrace, name))] == []


def test_every_error_is_drawn_and_documented(root):
    page = (root / "docs/reference/errors.md").read_text()
    for name in headrace.errors.__all__:
        assert re.search(rf"\b{name}\b", headrace.errors.__doc__), name
        assert f"autoexception:: {name}\n" in page


def test_every_option_is_documented_with_its_default(root):
    page = (root / "docs/reading.md").read_text()
    for field in dataclasses.fields(ReaderOptions):
        row = re.search(rf"^\| `{field.name}` \| (.+?) \|", page, re.MULTILINE)
        assert row, field.name
        shown = row[1].strip("`").replace(" MiB", f"*{1 << 20}")
        if field.name == "budget_bytes":
            number, _, factor = shown.partition("*")
            assert int(number) * int(factor) == field.default
        else:
            assert shown in (str(field.default).lower(), f"{field.default:g}"
                             if isinstance(field.default, float) else str(field.default))  # fmt: skip


def test_every_command_is_documented(root):
    from headrace.cli.app import app

    page = (root / "docs/reference/cli.md").read_text()
    for command in app.registered_commands:
        assert f"`headrace {command.name or command.callback.__name__}" in page


def test_every_exit_code_is_documented(root):
    from headrace.cli import exit_codes

    page = (root / "docs/reference/cli.md").read_text()
    for name in exit_codes.__all__:
        assert f"| {getattr(exit_codes, name)} |" in page
