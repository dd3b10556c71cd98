"""Files that others may have made are opened in one place: `headrace.base.files`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("store", "plane", "checkpoint", "node", "job")
CALLS = {"open", "io.open", "os.open", "os.replace", "os.rename", "os.link", "fcntl.flock"}
METHODS = {"read_bytes", "read_text", "write_bytes", "write_text"}

ALLOWED = {
    "store/sources/": "a user's sources are where the user says, perhaps behind links",
    "store/segment.py": "the same, of an index and of a folder that was indexed",
    "store/residency.py": "the same",
    "store/output_file.py": "a library that writes by name locks the file itself",
    "node/files/disk_copies.py": "in a folder of mode 0700, under a lock: copies are renamed without a sync",
    "node/files/root_files.py": "a user's files, as the program itself would open them",
    "node/files/order.py": "a user's file",
    "node/files/run.py": "a user's files, as the program itself would open them",
    "node/server.py": "/dev/null",
    "job/store.py": "/proc/PID/fd, another process's file without a name",
}
"""Beginnings of paths, and why these open files by themselves."""


def calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        of_descriptor = name == "open" and node.args and isinstance(node.args[0], ast.Call)
        method = isinstance(node.func, ast.Attribute) and node.func.attr
        mode = ast.unparse(node.args[0]) if node.args else ""
        opens = method == "open" and mode.strip("'").rstrip("b+") in ("r", "w", "a", "x")
        if (name in CALLS and not of_descriptor) or method in METHODS or opens:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_packages_that_meet_others_files_open_them_in_one_place(root: Path) -> None:
    source = root / "src/headrace"
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((source / package).rglob("*.py")):
            if lines := calls(path):
                found[path.relative_to(source).as_posix()] = lines
    refused = {name: lines for name, lines in found.items() if not name.startswith(tuple(ALLOWED))}
    assert refused == {}, "open them with headrace.base.files, or add a reason to ALLOWED"
    unused = [start for start in ALLOWED if not any(name.startswith(start) for name in found)]
    assert unused == []


def test_the_lint_sees_what_it_forbids(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "open(name)\nos.open(name, 0)\nos.replace(a, b)\nfcntl.flock(fd, 1)\nfolder.read_text()\n"
        "folder.write_bytes(b'')\nfolder.open('wb')\nopen(open_file(name), 'rb')\nstore.open(path)\n"
    )
    assert len(calls(path)) == 7


def test_locks_are_taken_in_one_place(root: Path) -> None:
    paths = (root / "src/headrace").rglob("*.py")
    files = {path.name for path in paths if "fcntl.flock" in path.read_text()}
    assert files == {"files.py", "output_file.py"}
