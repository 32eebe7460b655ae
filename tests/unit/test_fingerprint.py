"""Changes that simpler sums and xors miss."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from placement.storage import changes
from placement.storage.changes import fingerprints

Change = Callable[[torch.Tensor], object]

CHANGES: dict[str, Change] = {
    "negation": lambda v: v.neg_(),
    "two sign flips": lambda v: v.index_copy_(0, torch.tensor([3, 900]), -v[[3, 900]]),
    "a swap of two values": lambda v: v.index_copy_(0, torch.tensor([1, 800]), v[[800, 1]]),
    "a rotation": lambda v: v.copy_(v.roll(1)),
    "a reversal": lambda v: v.copy_(v.flip(0)),
    "a swap of two words": lambda v: v.view(torch.int64).index_copy_(0, torch.tensor([1, 400]), v.view(torch.int64)[[400, 1]]),
    "rows in another order": lambda v: v.view(16, 64).copy_(v.view(16, 64).flip(0)),
    "one last bit": lambda v: v.view(torch.int32)[512].bitwise_xor_(1),
    "equal steps up and down": lambda v: v.view(torch.int64).index_add_(0, torch.tensor([10, 20]), torch.tensor([1, -1])),
    "minus zero": lambda v: v[7].neg_(),
    "another NaN": lambda v: v.view(torch.int32)[8].bitwise_xor_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_shows(change: Change) -> None:
    values = torch.randn(1024)
    values[7:9] = torch.tensor([0.0, torch.nan])
    data = values.view(torch.uint8)
    before = fingerprints(data, [4096])
    change(values)
    assert fingerprints(data, [4096]).tolist() != before.tolist()


def test_a_piece_has_the_same_fingerprint_wherever_it_lies_and_whatever_surrounds_it() -> None:
    piece = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    alone = fingerprints(piece, [4096])
    after = fingerprints(torch.cat([piece.flip(0), piece, piece]), [4096, 4096, 4096])
    assert after[1:].tolist() == [*alone.tolist(), *alone.tolist()]
    assert after[0] != alone[0]


def test_nothing_has_no_fingerprint() -> None:
    assert fingerprints(torch.empty(0, dtype=torch.uint8), []).shape == (0,)


def test_the_kernel_names_nothing_that_triton_does_not_know() -> None:
    """Triton evaluates the annotations of the arguments, too, and refuses any global name that is neither its own nor built in."""
    spec = importlib.util.find_spec("placement.storage.transfer.fingerprint_triton")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (kernel,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    local = {argument.arg for argument in kernel.args.args}
    compiled = [node for part in (kernel.args, *kernel.body) for node in ast.walk(part)]
    local |= {node.id for node in compiled if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in compiled if isinstance(node, ast.Name)}
    assert used - local - set(dir(builtins)) == {"tl"}


def test_a_kernel_that_cannot_be_compiled_is_reported_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(fingerprints=fails))
    changes._kernel.cache_clear()
    try:
        assert changes._kernel(torch.device("cpu")) is None
        assert changes._kernel(torch.device("cpu")) is None
    finally:
        changes._kernel.cache_clear()
    assert [record.getMessage() for record in caplog.records if "Failed to find C compiler" in record.getMessage()] != []
    assert len(caplog.records) == 1, "said once"
