"""Every Python block of README and of the pages runs, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.contexts import CONTEXTS, Tools
from tests.docs.pages import PAGES, Block, blocks

GOES_ON, WITH, NAMES_ONLY = "goes on", "with ", "names only, "
FRAMEWORKS_NEVER_RUN = ("nemo_rl.md", "openrlhf.md", "roll.md", "skyrl.md", "slime.md")
"""Pages with the lines for a file of the user's own: these frameworks cannot be installed here."""
ABSENT = {"nemo_rl", "openrlhf", "roll", "skyrl", "slime", "vllm"}
MOST_NAMES_ONLY = 2
"""On all other pages."""


def python_blocks() -> list[Block]:
    return [
        block
        for page in PAGES
        for block in blocks(page)
        if block.language.split(" ")[0] == "python"
    ]


def programs() -> list[list[Block]]:
    """Blocks that run one after the other in one namespace."""
    found: list[list[Block]] = []
    for block in python_blocks():
        if block.mark.startswith(NAMES_ONLY):
            continue
        if block.mark == GOES_ON:
            assert found, f"{block.place} goes on from nothing"
            assert found[-1][0].page == block.page, f"{block.place} goes on from another page"
            found[-1].append(block)
        else:
            found.append([block])
    return found


def names_only() -> list[Block]:
    return [block for block in python_blocks() if block.mark.startswith(NAMES_ONLY)]


def compiled(block: Block, replaced: dict[str, str]) -> Any:
    text = block.text
    for old, new in replaced.items():
        text = text.replace(old, new)
    return compile("\n" * (block.line - 1) + text, str(block.page), "exec")


# torch's checkpoints say so of a single process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("program", programs(), ids=lambda program: program[0].place)
def test_blocks_run(program: list[Block], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    tools = Tools(monkeypatch, tmp_path)
    mark = program[0].mark
    if not mark:
        names: dict[str, Any] = {}
        _run(program, names, tools)
        assert set(names) > {"__name__", "__builtins__"}, "the block has made nothing"
        return
    assert mark.startswith(WITH), f"{program[0].place}: unknown mark {mark!r}"
    assert mark.removeprefix(WITH) in CONTEXTS, (
        f"{program[0].place}: tests/docs/contexts.py has no {mark.removeprefix(WITH)!r}"
    )
    with CONTEXTS[mark.removeprefix(WITH)](tools) as names:
        _run(program, names, tools)


def _run(program: list[Block], names: dict[str, Any], tools: Tools) -> None:
    names["__name__"] = "a_block_of_the_documentation"
    for block in program:
        exec(compiled(block, tools.replaced), names)


@pytest.mark.parametrize("block", names_only(), ids=lambda block: block.place)
def test_blocks_that_cannot_run_here_name_what_exists(block: Block) -> None:
    compiled(block, {})
    assert resolve_all(ast.parse(block.text))


def test_few_blocks_cannot_run() -> None:
    assert (
        len([block for block in names_only() if block.page.name not in FRAMEWORKS_NEVER_RUN])
        <= MOST_NAMES_ONLY
    )


def test_every_mark_is_above_a_python_block() -> None:
    marks = sum(
        line.strip().startswith("<!-- code: ")
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
    )
    assert marks == sum(bool(block.mark) for block in python_blocks())
    used = {
        block.mark.removeprefix(WITH) for block in python_blocks() if block.mark.startswith(WITH)
    }
    assert used == set(CONTEXTS)


# --- what a block names


def resolve_all(tree: ast.Module) -> int:
    """How many names of modules a block has; each of them exists, but for those of frameworks that
    are never installed here."""
    found = {each for each in attributes(tree) if each[0].split(".")[0] not in ABSENT}
    for module, names in found:
        resolve(module, names)
    return len(found)


def attributes(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Module and names below it, for each import, and each dotted name that begins at a module."""
    modules = {"placement"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", (alias.name,)) for alias in node.names)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and (dotted := _dotted(node)) is not None
            and dotted[0] in modules
        ):
            yield dotted[0], dotted[1:]


def _dotted(node: ast.expr) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return (*before, node.attr)
    return None


def resolve(module: str, names: tuple[str, ...]) -> None:
    """Look for `module.names...`. Raises AttributeError: there is no such name."""
    found: Any = importlib.import_module(module)
    for name in names:
        if (
            isinstance(found, ModuleType)
            and not hasattr(found, name)
            and importlib.util.find_spec(f"{found.__name__}.{name}")
        ):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
