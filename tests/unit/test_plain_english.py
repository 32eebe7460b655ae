"""Docstrings name their subject: none begins with "Of ...", "By ..." or a relative clause ("What the ...", "Who ...")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.code_paths import ROOT

REPOSITORY = ROOT.parent
_RIDDLE = re.compile(r"(Of|By|What|Who|Whom|Whose)\s")


def modules() -> list[Path]:
    """Every module of placement and of policies."""
    rooms = [each for each in sorted(ROOT.iterdir()) if each.name != "policies"]
    rooms.append(REPOSITORY / "policies")
    return [path for room in rooms for path in (sorted(room.rglob("*.py")) if room.is_dir() else [room]) if path.suffix == ".py"]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.lstrip()


def riddles(source: str) -> list[tuple[int, str]]:
    return [(line, text.partition("\n")[0]) for line, text in docstrings(source) if _RIDDLE.match(text)]


def test_no_docstring_begins_without_its_subject() -> None:
    found = [f"{path.relative_to(REPOSITORY)}:{line}: {text}" for path in modules() for line, text in riddles(path.read_text())]
    assert found == []


def test_most_modules_are_looked_at() -> None:
    looked_at = {path.relative_to(REPOSITORY).as_posix() for path in modules()}
    assert {"placement/core/states.py", "placement/observe/dashboards/worker.py", "policies/base.py"} <= looked_at


@pytest.mark.parametrize("text", ["Of the plan.", "By name, the module.", "What the client gets.", "Who is meant."])
def test_a_docstring_without_subject_is_found_wherever_it_stands(text: str) -> None:
    quoted = f'"""{text}"""'
    places = (quoted, f"class A:\n    {quoted}", f"def f():\n    {quoted}", f"class A:\n    x: int = 0\n    {quoted}")
    assert [len(riddles(place)) for place in places] == [1] * len(places)


def test_a_docstring_with_subject_is_not_found() -> None:
    assert riddles('"""Offloaded handles."""\n\n\nx = "Of a value, which is no docstring"\n') == []
