"""Public names and signatures, as their sources say: nothing is imported, so frameworks need not be there."""

from __future__ import annotations

import ast
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from tests_shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = ROOT / "src"

MODULES = (
    "headrace",
    "headrace.checkpoint",
    "headrace.cluster",
    "headrace.errors",
    "headrace.fsspec",
    "headrace.grain",
    "headrace.ray",
    "headrace.tensorflow",
    "headrace.testing",
    "headrace.torch",
)
"""Modules that users import from."""

_SPECIAL = {
    f"__{name}__"
    for name in ("call", "contains", "enter", "exit", "getitem", "init", "iter", "len", "next")
}
"""Members that programs use without naming them."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names_text() -> str:
    """Each public name of each public module with its signature, and the hash of the native stub."""
    lines = []
    for module in MODULES:
        lines.append(module)
        for name in sorted(exported(module)):
            lines += [f"  {line}" for line in _described(module, name)]
        lines.append("")
    stub = (SOURCES / "headrace/_native.pyi").read_bytes()
    return "\n".join([*lines, f"headrace/_native.pyi sha256 {sha256(stub).hexdigest()}", ""])


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCES.joinpath(*module.split("."))
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those below `if TYPE_CHECKING` and `try` too."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _statements(statement.body)


def exported(module: str) -> list[str]:
    for statement in _tree(module).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return list(ast.literal_eval(statement.value))
    raise LookupError(f"{module} has no __all__")


def _defined(module: str, name: str) -> tuple[str, list[ast.stmt]]:
    """Where a name is defined, and by which statements: several where it is overloaded."""
    found: list[ast.stmt] = []
    for statement in _statements(_tree(module).body):
        if isinstance(statement, Definition) and statement.name == name:
            found.append(statement)
        elif isinstance(statement, ast.ImportFrom) and not found:
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    return _imported(module, statement, alias.name)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                found.append(statement)
    if not found:
        raise LookupError(f"{module} does not define {name}")
    return module, found


def _imported(module: str, statement: ast.ImportFrom, name: str) -> tuple[str, list[ast.stmt]]:
    source = statement.module or ""
    if not source.startswith("headrace"):
        return source, []
    if source != module:
        try:
            return _defined(source, name)
        except LookupError:
            pass
    return f"{source}.{name}", []  # a module


def _described(module: str, name: str) -> Iterator[str]:
    where, statements = _defined(module, name)
    if not statements:
        yield f"{name}: module {where}" if where.startswith("headrace.") else f"{name}: {where}"
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            yield from _class(where, statement, set(exported(module)))
        elif isinstance(statement, Definition):
            yield _signature(statement)
        else:
            yield f"{name} = {ast.unparse(statement.value)}"


def _class(module: str, definition: ast.ClassDef, listed: set[str]) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in (*definition.bases, *definition.keywords))
    decorators = "".join(f"@{ast.unparse(d)} " for d in definition.decorator_list)
    yield f"{decorators}class {definition.name}({bases})"
    for lines in _members(module, definition, listed).values():
        yield from (f"  {line}" for line in lines)


def _members(module: str, definition: ast.ClassDef, listed: set[str]) -> dict[str, list[str]]:
    """Public members by name, those of our own base classes too unless these are listed by themselves."""
    members: dict[str, list[str]] = {}
    for base in definition.bases:
        name = ast.unparse(base).partition("[")[0]
        if name in listed - {definition.name}:
            continue
        try:
            where, statements = _defined(module, name)
        except LookupError:
            continue  # a builtin, or of a framework
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                members |= _members(where, statement, listed)
    own: dict[str, list[str]] = {}
    for statement in definition.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = "".join(f"@{ast.unparse(d)} " for d in statement.decorator_list)
            own.setdefault(statement.name, []).append(decorators + _signature(statement))
            if statement.name == "__init__":
                own |= {
                    name: [f"{name}: set by __init__"] for name in sorted(_attributes(statement))
                }
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            own[statement.target.id] = [ast.unparse(statement)]
    public = {name: lines for name, lines in own.items() if name[0] != "_" or name in _SPECIAL}
    return members | public


def _attributes(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """What a function sets of `self`."""
    return {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _signature(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async def" if isinstance(definition, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    return f"{kind} {definition.name}({ast.unparse(definition.args)}){returns}"
