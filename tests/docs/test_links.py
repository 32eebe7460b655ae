"""Links between the pages lead somewhere: file and anchor. Every file that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import placement
from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, links, prose_with_code

PACKAGE = Path(placement.__file__).parent
_FILE = re.compile(
    r"`((?:bench|docs|examples|placement|policies|tests)/[\w./-]*|[A-Z]{4,}\.md|Makefile|mkdocs\.yml|constraints\.txt)`"
)


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.is_relative_to(DOCS) or not target.exists():
            found.append(f"{link}: there is no such page")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: {target.name} has no such anchor")
    return found


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_readme_is_short_and_needs_no_file_beside_it() -> None:
    """It is shown on a package's page, too, where no relative link leads anywhere."""
    assert [link for link in links(README) if not link.startswith(("http://", "https://"))] == []
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(_FILE.findall(prose_with_code(page)))
    assert {
        name
        for name in named
        if not any((place / name).exists() for place in (ROOT, PACKAGE.parent))
        and not _is_made(name)
    } == set()


def _is_made(name: str) -> bool:
    """Whether it is a pattern in words, made by a command, or a figure of `Manager.metrics`."""
    is_figure = name.startswith("placement/") and name.split("/")[1].endswith(
        ("_seconds", "_gb", "failures", "_violations", "_writes")
    )
    return name.startswith("bench/results") or "..." in name or is_figure
