"""No `raise` within `except*`: Python 3.11.2 puts what is raised there into a group, although `from None` follows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def raises_within_except_star(source: str) -> list[int]:
    """The lines of `raise` statements in handlers of `except*`, without those of functions that are defined there."""
    if not re.search(r"except\s*\*", source):
        return []
    handlers = [
        handler for node in ast.walk(ast.parse(source)) if isinstance(node, ast.TryStar) for handler in node.handlers
    ]
    lines = []
    pending: list[ast.AST] = [statement for handler in handlers for statement in handler.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            lines.append(node.lineno)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return lines


@pytest.mark.parametrize("package", ["protocol", "vfsd"])
def test_no_module_raises_within_except_star(package: str) -> None:
    found = [
        f"{path}:{line}: record the error, and raise it after the block"
        for path in (REPOSITORY / package).rglob("*.py")
        for line in raises_within_except_star(path.read_text())
    ]
    assert found == []


def test_the_search_finds_one() -> None:
    source = "try:\n    f()\nexcept* OSError as group:\n    if group:\n        raise ValueError from None\n"
    assert raises_within_except_star(source) == [5]
