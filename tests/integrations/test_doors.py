"""Installed frameworks still have the doors that pages rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.doors import DOORS, Door, installed, parameters

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


@pytest.mark.parametrize("framework", DOORS)
def test_an_installed_framework_has_the_doors(framework: str) -> None:
    """The sources are read and not imported: most of these frameworks cannot be imported without a GPU."""
    root = installed(framework)
    if root is None:
        pytest.skip(f"{framework} is not installed here")
    found = {str(door): parameters(root, door) for door in DOORS[framework]}
    assert found == {str(door): door.parameters for door in DOORS[framework]}


def test_a_door_that_is_gone_or_changed_is_found(tmp_path: Path) -> None:
    door = Door("a/b.py", "A", "run", ("x", "*rest", "y", "**more"))
    assert parameters(tmp_path, door) is None
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / "b.py"
    source.write_text("class A:\n    async def run(self, x, *rest, y=1, **more): ...\n\n\ndef run(z): ...\n")
    assert parameters(tmp_path, door) == door.parameters
    assert parameters(tmp_path, Door("a/b.py", "", "run", ())) == ("z",)
    assert parameters(tmp_path, Door("a/b.py", "A", "walk", ())) is None
    assert parameters(tmp_path, Door("a/b.py", "B", "run", ())) is None


@pytest.mark.parametrize("framework", DOORS)
def test_the_page_names_every_door(framework: str) -> None:
    text = (PAGES / f"{framework}.md").read_text(encoding="utf-8")
    missing = [str(door) for door in DOORS[framework] if f"`{door.name}`" not in text and f"{door.name}(" not in text]
    files = [door.file for door in DOORS[framework] if door.file not in text]
    assert (missing, files) == ([], [])
