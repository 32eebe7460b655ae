"""A manager that is collected is closed without an import: the collection can happen while any other import is half done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, gc, os, sys
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from placement import Manager, testing

class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Refusing:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        raise ImportError(f"{name} is imported by the finalizer of a manager")

modes = {
    "no mode": contextlib.nullcontext,
    "default device": lambda: torch.device("meta"),
    "function mode": Functions,
    "dispatch mode": Operations,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
asked, failed = [], []

def collected(mode, entered):
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    manager = Manager(device=testing.SimulatedDevice(1 << 24))
    manager.register("actor", model)
    phase = manager.phase("train")
    if entered:
        phase.__enter__()
    with modes[mode]():
        sys.meta_path.insert(0, Refusing())
        sys.unraisablehook = failed.append
        gc.disable()
        del manager, phase
        gc.collect()
        sys.meta_path.pop(0)
    assert not failed, [one.exc_value for one in failed]
    assert not asked, asked
    assert torch.equal(model.weight, before)

gc.collect()
gc.freeze()
for mode in modes:
    for entered in False, True:
        child = os.fork()  # each in a process of its own, because an import that succeeds once is not made again
        if not child:
            collected(mode, entered)
            os._exit(0)  # without the end of an interpreter
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{mode}, {'in a phase' if entered else 'offloaded'}: see above")
"""


def test_a_collected_manager_is_closed_without_an_import() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
