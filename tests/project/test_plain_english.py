"""Docstrings name their subject, and their sections are indented as they should be."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import placement.policies
from tools.imports import ROOT

POLICIES = Path(placement.policies.__file__).resolve().parent
"""In a checkout a folder of its own, in an installed package one inside."""
_RIDDLE = re.compile(r"(Of|By|What|Who|Whom|Whose)\s")
_SECTIONS = {"Args:", "Attributes:", "Raises:", "Returns:", "Yields:"}


def modules() -> dict[str, Path]:
    """Every module of placement and of policies, by its path from there."""
    found = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    return found | {f"policies/{path.name}": path for path in POLICIES.glob("*.py")}


@functools.cache
def docstrings(source: str) -> list[tuple[int, str]]:
    """Line and text of every string that stands alone: docstrings of modules, classes, functions
    and attributes."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def misplaced(source: str) -> list[tuple[int, str]]:
    """Section headers that are not at their docstring's indentation, and first entries that are not
    four columns inside."""
    found = []
    for first, text in docstrings(source):
        lines = text.split("\n")
        column = len(lines[-1])  # of the closing quotes, which stand alone where there are sections
        for number, (line, following) in enumerate(zip(lines, lines[1:], strict=False), first):
            indents = [len(each) - len(each.lstrip()) for each in (line, following)]
            if line.strip() in _SECTIONS and indents != [column, column + 4]:
                found.append((number, line.strip()))
    return found


def test_no_docstring_begins_without_its_subject() -> None:
    """None begins with "Of ...", "By ..." or a relative clause ("What the ...", "Who ...")."""
    found = [
        (f"{name}:{line}", text.lstrip())
        for name, path in modules().items()
        for line, text in docstrings(path.read_text())
    ]
    assert [each for each in found if _RIDDLE.match(each[1])] == []


def test_sections_of_docstrings_are_indented() -> None:
    assert [
        f"{name}:{line}: {text}"
        for name, path in modules().items()
        for line, text in misplaced(path.read_text())
    ] == []
