"""How much code does one call go through? Counts files entered and call depth, modules in each
folder, and import cycles.

The walks use two Linears and their AdamW on the simulated device. They show what a maintainer must
read to follow one call. The numbers do not depend on the machine. `python -m bench.code_paths`
prints the table and writes `bench/results/code_paths.json`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import placement
from bench._results import Results
from placement.testing import SimulatedDevice

ROOT = Path(placement.__file__).resolve().parent


class Walk:
    """The files of placement that a call enters, and the depth to which calls of placement's
    functions nest."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.depth = 0
        self._open = 0

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if (
            event not in ("call", "return")
            or "/placement/" not in name
            or not Path(name).resolve().is_relative_to(ROOT)
        ):
            return
        if event == "call":
            self.files.add(name)
            self._open += 1
            self.depth = max(self.depth, self._open)
        else:
            self._open = max(0, self._open - 1)


def walks() -> dict[str, Walk]:
    """Walk through `register` of the module, `enter` and `leave` of a training phase that moves
    both, and one pass over `weights()`."""
    manager = placement.Manager(device=SimulatedDevice(1 << 24, chunk_bytes=4096))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, Walk] = {}

    def walk(name: str, call: Callable[[], Any]) -> Any:
        with Walk() as found[name]:
            return call()

    actor = walk("register", lambda: manager.register("actor", model, role="actor"))
    manager.register("actor.optimizer", optimizer)
    # the second round is typical: the optimizer's state exists, and the cycle is known
    for _ in range(2):
        phase = manager.phase("train")
        walk("enter", phase.__enter__)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        walk("leave", lambda phase=phase: phase.__exit__(None, None, None))
    with manager.phase("weight_sync"):
        walk("weights", lambda: list(actor.weights(bucket_bytes=1 << 20)))
    manager.close()
    return found


def modules() -> dict[str, Path]:
    """The modules of the package by dotted name, without policies, which are a package of their
    own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if "policies" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports anywhere, even for annotations and inside
    functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from [
                found
                for end in range(len(parts), 0, -1)
                if (found := ".".join(parts[:end])) in known
            ][:1]


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
    found = []

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
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    results = Results("code_paths", "simulated")
    for name, walk in walks().items():
        results.add(name, "placement", "files entered", len(walk.files), "files")
        results.add(name, "placement", "call depth", walk.depth, "calls")
    folders = Counter(str(path.parent.relative_to(ROOT.parent)) for path in modules().values())
    for folder, count in sorted(folders.items()):
        results.add(folder, "placement", "modules", count, "modules")
    results.add("imports", "placement", "cycles", len(cycles()), "cycles")
    results.write()


if __name__ == "__main__":
    main()
