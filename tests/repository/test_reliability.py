"""docs/reliability.md: each fault has a test that exists."""

import ast
import re

import pytest

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FAULTS_MIN = 60


@pytest.fixture(scope="module")
def rows(root):
    lines = (root / "docs" / "reliability.md").read_text().splitlines()
    return [line for line in lines if line.startswith("|") and not re.match(r"\|[-| ]+\|$", line)]


def functions_of(path):
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_test_that_the_page_names_exists(root, rows):
    named = [found for row in rows for found in NAMED.findall(row)]
    assert len(named) >= FAULTS_MIN
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (root / path).is_file() or name not in functions_of(root / path)
    ]
    assert missing == []


def test_every_row_names_a_test(rows):
    heads = [row for row in rows if re.search(r"\| test \|$", row)]
    assert len(heads) >= 6
    assert [row for row in rows if row not in heads and not NAMED.search(row)] == []
