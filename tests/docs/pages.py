"""The pages of the documentation, and what they are made of: Python blocks, links, anchors,
tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^`]*)$")
_MARK = re.compile(r"<!-- code: (.+?) -->")
_HEADING = re.compile(r"(#{1,6})\s+(.+?)\s*$")
_LINK = re.compile(r"(!?)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int  # of its first line of text, from 1
    language: str
    text: str
    mark: str  # of the comment on the line above; empty without one

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises ValueError: a block has no end."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            index += 1
            continue
        end = next(
            (n for n in range(index + 1, len(lines)) if lines[n].strip() == opening[2]), None
        )
        if end is None:
            raise ValueError(f"{page.name}:{index + 1}: this block has no end")
        mark = _MARK.fullmatch(lines[index - 1].strip()) if index else None
        text = "\n".join(lines[index + 1 : end]) + "\n"
        found.append(Block(page, index + 2, opening[3].strip(), text, mark[1] if mark else ""))
        index = end + 1
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", lambda match: "x" * len(match[0]), prose_with_code(page))
    return [match[2] for match in _LINK.finditer(text)]


def prose_with_code(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "\n")
    return text


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings, as the site names them, and the names that a reference
    page shows."""
    found: set[str] = set()
    for line in prose_with_code(page).splitlines():
        if (heading := _HEADING.match(line)) is not None:
            found.add(slug(heading[2]))
        if line.startswith("::: "):
            found.add(line.removeprefix("::: ").strip())
    return found


def slug(heading: str) -> str:
    """A heading as an anchor, by the rule of Python-Markdown's `toc`."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def between(page: Path, mark: str) -> str:
    """The text between `<!-- mark -->` and `<!-- /mark -->`. Raises ValueError: the marks are not
    there."""
    found = re.search(
        rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->",
        page.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"{page.name} has nothing between <!-- {mark} --> and <!-- /{mark} -->")
    return found[1]


def rows(table: str) -> list[list[str]]:
    """The cells of a table in Markdown, without its head and without backticks."""
    lines = [line.strip() for line in table.splitlines() if line.strip().startswith("|")]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]
    ]
