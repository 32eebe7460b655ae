"""The modules of the package, what each imports, and which import one another."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import placement

ROOT = Path(placement.__file__).resolve().parent


def modules() -> dict[str, Path]:
    """The modules of the package by dotted name, without policies, which are a package of their
    own."""
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if "policies" not in parts:
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports anywhere: for annotations, inside functions,
    and by `import_module` of a literal."""
    for name in _names_in(path.read_text()):
        module = _longest_known(name, known)
        if module is not None:
            yield module


@functools.cache
def _names_in(source: str) -> list[str]:
    return [name for node in ast.walk(ast.parse(source)) for name in _names(node)]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [
            argument.value
            for argument in node.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
    return []


def _longest_known(name: str, known: dict[str, Path]) -> str | None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if module in known:
            return module
    return None


def cycles(known: dict[str, Path] | None = None) -> list[list[str]]:
    """Groups of modules that import one another, directly or indirectly, without the package's own
    `__init__` (Tarjan 1972)."""
    known = modules() if known is None else known
    graph = {
        name: set(imports(path, known)) - {name, "placement"}
        for name, path in known.items()
        if name != "placement"
    }
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    groups = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        open_.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in open_:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            group = open_[open_.index(name) :]
            del open_[open_.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return groups
