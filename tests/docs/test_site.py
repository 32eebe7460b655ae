"""The site as a whole: `make docs` builds it strictly where the extra `docs` is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, blocks


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(
        r"^\s+- (?:[^:\n]+: )?([\w/]+\.md)$",
        (ROOT / "mkdocs.yml").read_text(),
        flags=re.MULTILINE,
    )
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    pytest.importorskip(
        "mkdocstrings", reason="mkdocs and mkdocstrings (the extra docs) are not installed"
    )
    pytest.importorskip("material", reason="mkdocs-material (the extra docs) is not installed")
    script = tmp_path / "mermaid.js"
    script.write_text("// draws\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "MERMAID_SCRIPT": str(script), "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    manager = (tmp_path / "site" / "reference" / "manager.html").read_text()
    assert 'id="placement.Manager.register"' in manager  # the docstrings are there
    architecture = (tmp_path / "site" / "architecture.html").read_text()
    assert (
        architecture.count('<pre class="mermaid">')
        == (DOCS / "architecture.md").read_text().count("```mermaid")
        > 0
    )
    assert "javascripts/mermaid.min.js" in architecture
    assert (tmp_path / "site" / "javascripts" / "mermaid.min.js").read_text() == "// draws\n"
    loaded = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', architecture)
    assert loaded == []  # nothing from elsewhere
    assert not list((tmp_path / "site").rglob("_mermaid*"))


def test_diagrams_have_no_semicolon() -> None:
    """Mermaid ends a statement there, also in the middle of a note, and then draws nothing."""
    diagrams = [block for page in PAGES for block in blocks(page) if block.language == "mermaid"]
    assert len(diagrams) >= 2
    assert [block.place for block in diagrams if ";" in block.text] == []
