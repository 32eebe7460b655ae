"""The weight of the project as a reader feels it: `python -m tools.size [ROOT]`.

Of each folder it prints files, lines, tokens, tokens a line and functions. Tokens are the names,
operators, numbers and strings of Python's tokenizer, so a longer line or a fuller file gains
nothing. Of four calls it prints the files and functions that they enter, how often, and how often
a call or a return goes into another file: two Linears and their AdamW on the simulated device. None
of the figures is a limit, and none depends on the machine.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import placement
from placement.testing import SimulatedDevice
from tools.imports import ROOT

FOLDERS = ("placement", "policies", "tests", "bench")
_KINDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass
class Weight:
    """What a folder's Python files hold together."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    functions: int = 0

    def add(self, text: str) -> None:
        self.files += 1
        self.lines += text.count("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            self.tokens += token.type in _KINDS
        for node in ast.walk(ast.parse(text)):
            self.functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def weigh(folder: Path) -> Weight:
    weight = Weight()
    for path in sorted(folder.rglob("*.py")):
        weight.add(path.read_text())
    return weight


@dataclass
class Walk:
    """The functions of placement that one call runs through."""

    calls: int = 0
    file_changes: int = 0
    """How often a call or a return goes from one file of placement into another."""
    functions: set[CodeType] = field(default_factory=set)
    _open: list[str] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = not code.co_name.endswith("comp>") and code.co_name != "<genexpr>"
        if event not in ("call", "return") or not is_function or not is_ours(code.co_filename):
            return
        caller = self._open[-1] if self._open else code.co_filename
        if event == "call":
            self.calls += 1
            self.functions.add(code)
            self.file_changes += caller != code.co_filename
            self._open.append(code.co_filename)
        elif self._open:  # empty for functions that were entered before the walk began
            self._open.pop()
            self.file_changes += bool(self._open) and self._open[-1] != code.co_filename


def is_ours(filename: str) -> bool:
    return "/placement/" in filename and Path(filename).resolve().is_relative_to(ROOT)


def walks() -> dict[str, Walk]:
    """`register` of the module, `enter` and `leave` of a training phase that moves both, and one
    pass over `weights()`."""
    manager = placement.Manager(device=SimulatedDevice(1 << 24, chunk_bytes=4096))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    done: dict[str, Walk] = {}

    def walk(name: str, call: Callable[[], Any]) -> Any:
        with Walk() as done[name]:
            return call()

    actor = walk("register", lambda: manager.register("actor", model, role="actor"))
    manager.register("actor.optimizer", optimizer)
    # the second round is typical: the optimizer's state exists, and the cycle is known
    for _ in range(2):
        phase = manager.phase("train")
        walk("enter train", phase.__enter__)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        walk("leave train", lambda phase=phase: phase.__exit__(None, None, None))
    with manager.phase("weight_sync"):
        walk("weights()", lambda: list(actor.weights(bucket_bytes=1 << 20)))
    manager.close()
    return done


def main(arguments: Sequence[str]) -> None:
    root = Path(arguments[0]) if arguments else ROOT.parent
    for name in FOLDERS:
        weight = weigh(root / name)
        print(
            f"{name}: {weight.files} files, {weight.lines:,} lines, {weight.tokens:,} tokens "
            f"({weight.tokens / max(weight.lines, 1):.2f} a line), {weight.functions:,} functions"
        )
    for name, walk in walks().items():
        print(
            f"{name}: {len(walk.files)} files, {len(walk.functions)} functions, "
            f"{walk.calls:,} calls, {walk.file_changes:,} changes of file"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
