"""Puts the script that draws the diagrams into the site, where `make docs` could fetch it; a
browser then needs no network for them."""

from __future__ import annotations

import os

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PLACE = "javascripts/mermaid.min.js"
SCRIPT = os.environ.get("MERMAID_SCRIPT", "")
"""Path of the script. Where there is no such file, the theme has it fetched over the network."""


def on_config(config: MkDocsConfig) -> None:
    if os.path.exists(SCRIPT):
        config.extra_javascript.append(PLACE)


def on_files(files: Files, config: MkDocsConfig) -> None:
    if os.path.exists(SCRIPT):
        files.append(File.generated(config, PLACE, abs_src_path=os.path.abspath(SCRIPT)))
