"""Clean-skip: who writes how into a parameter does not matter. What was written is never stale, and
nothing else is copied."""

from __future__ import annotations

import copy
import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager
from placement.devices.cuda import fingerprint_kernel
from placement.storage.fingerprints import fingerprints
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import assert_same

CHUNK = 16384
SIDE = 64
"""A parameter of SIDE x SIDE floats fills one chunk."""


class Blocks(nn.Module):
    """Three parameters of one chunk each, and a buffer in a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.written, self.last = (
            nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(3)
        )
        self.register_buffer("mean", torch.zeros(SIDE, SIDE))


@pytest.mark.parametrize(
    "write",
    [lambda p: p.data.mul_(2), lambda p: ctypes.memset(p.data_ptr() + 4 * 77, 0x3F, 4)],
    ids=["all", "some"],
)
def test_one_parameter_written_and_one_chunk_copied(
    write: Callable[[nn.Parameter], object],
) -> None:
    """A fingerprint sees bytes, not who wrote them. Which it tells apart is shown below, and fused
    steps."""
    torch.manual_seed(0)
    model = Blocks()
    twin = copy.deepcopy(model)
    manager = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))
    handle = manager.register("actor", model, role="actor")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("sgd", sgd)

    def offloaded_and_skipped(change: Callable[[], object]) -> tuple[int, int]:
        before = handle.counters.offloaded_bytes, handle.counters.skipped_bytes
        with manager.phase("train"):
            change()
        return handle.counters.offloaded_bytes - before[0], handle.counters.skipped_bytes - before[
            1
        ]

    _, size = offloaded_and_skipped(lambda: None)
    assert size == 4 * CHUNK
    assert offloaded_and_skipped(lambda: write(model.written)) == (CHUNK, size - CHUNK)
    write(twin.written)
    assert_same(dict(handle.state_dict()), dict(twin.state_dict()))
    with manager.phase("train"):
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert_nothing_resident(manager)
    assert offloaded_and_skipped(lambda: None) == (0, size)


# --- optimizers

OPTIMIZERS = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type)
    and issubclass(found, torch.optim.Optimizer)
    and found is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "LBFGS": {"history_size": 3},
}
FUSED_ON_CPU = ("Adagrad", "Adam", "AdamW", "SGD")


def cases() -> list[Any]:
    """Every optimizer of this torch in every implementation that it has on the CPU."""
    found = []
    for name, optimizer in OPTIMIZERS.items():
        accepted = inspect.signature(optimizer).parameters
        found.append((name, {}))
        found += [(name, {"foreach": True})] if "foreach" in accepted else []
        found += [(name, {"fused": True})] if name in FUSED_ON_CPU else []
    shown = ("AdamW", "SGD", "SparseAdam")  # the others without options
    return [
        pytest.param(
            name,
            options,
            id="-".join([name, *options] if options else [name, "plain"]),
            marks=[pytest.mark.sweep] if options and name not in shown else [],
        )
        for name, options in found
    ]


Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def trained(name: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A model, its optimizer, and one step of it."""
    torch.manual_seed(1)
    is_sparse = name == "SparseAdam"
    model: nn.Module = (
        nn.Embedding(SIDE, SIDE, sparse=True) if is_sparse else nn.Linear(SIDE, SIDE, bias=False)
    )
    data = torch.arange(0, SIDE, 2) if is_sparse else torch.randn(4, SIDE)
    optimizer = OPTIMIZERS[name](
        model.parameters(), **{"lr": 0.01, **OPTIONS.get(name, {}), **options}
    )

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        optimizer.zero_grad()

    return model, optimizer, step


@pytest.mark.parametrize(("name", "options"), cases())
def test_every_optimizer(name: str, options: dict[str, Any]) -> None:
    model, optimizer, step = trained(name, options)
    twin, its_optimizer, _ = trained(name, options)
    manager = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK))
    handles = (
        manager.register("actor", model, role="actor"),
        manager.register("optimizer", optimizer),
    )
    for _ in range(4):
        before = handles[0].counters.offloaded_bytes
        with manager.phase("train"):
            step(model, optimizer)
        step(twin, its_optimizer)
        assert handles[0].counters.offloaded_bytes > before
        assert_same(handles[0].state_dict(), twin.state_dict())
        assert_same(handles[1].state_dict(), its_optimizer.state_dict())
        with manager.phase("train"):
            assert_same(model.state_dict(), twin.state_dict())
            assert_same(optimizer.state_dict(), its_optimizer.state_dict())
    copied = [handle.counters.offloaded_bytes for handle in handles]
    skipped = [handle.counters.skipped_bytes for handle in handles]
    with manager.phase("train"):
        sizes = [
            sum(r.nbytes for r in handle.holding.ranges)
            for handle in handles
            if handle.holding is not None
        ]
    assert [handle.counters.offloaded_bytes for handle in handles] == copied
    assert [
        handle.counters.skipped_bytes - before
        for handle, before in zip(handles, skipped, strict=True)
    ] == sizes
    assert_nothing_resident(manager)


# --- fingerprints: changes that simpler sums and xors miss


Change = Callable[[torch.Tensor], object]

CHANGES: dict[str, Change] = {
    "negation": lambda v: v.neg_(),
    "two sign flips": lambda v: v.index_copy_(0, torch.tensor([3, 900]), -v[[3, 900]]),
    "a swap of two values": lambda v: v.index_copy_(0, torch.tensor([1, 800]), v[[800, 1]]),
    "a rotation": lambda v: v.copy_(v.roll(1)),
    "a reversal": lambda v: v.copy_(v.flip(0)),
    "a swap of two words": lambda v: v.view(torch.int64).index_copy_(
        0, torch.tensor([1, 400]), v.view(torch.int64)[[400, 1]]
    ),
    "rows in another order": lambda v: v.view(16, 64).copy_(v.view(16, 64).flip(0)),
    "one last bit": lambda v: v.view(torch.int32)[512].bitwise_xor_(1),
    "equal steps up and down": lambda v: v.view(torch.int64).index_add_(
        0, torch.tensor([10, 20]), torch.tensor([1, -1])
    ),
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
    assert fingerprints(torch.empty(0, dtype=torch.uint8), []).shape == (0,)


def test_a_fingerprint_is_the_sum_of_words_mixed_with_their_positions() -> None:
    """By Python's integers, over the border of the blocks in which a processor computes it."""
    words = torch.randint(-(2**63), 2**63 - 1, ((1 << 17) + 3,), dtype=torch.int64)
    total, everything = 0, (1 << 64) - 1
    for position, word in enumerate(words.tolist(), start=1):
        mixed = (word + position * 0x9E3779B97F4A7C15) & everything
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & everything
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & everything
        total = (total + (mixed ^ (mixed >> 31))) & everything
    found = fingerprints(words.view(torch.uint8), [words.nbytes])
    assert found.item() & everything == total


def test_a_kernel_that_cannot_be_compiled_is_reported_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(architecture: str) -> bytes:
        raise RuntimeError(f"nvrtcResult NVRTC_ERROR_INVALID_OPTION: {architecture}")

    monkeypatch.setattr(fingerprint_kernel, "_compiled", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (99, 0))
    device = torch.device("cuda", 0)
    fingerprint_kernel.kernel_of.cache_clear()
    try:
        assert fingerprint_kernel.kernel_of(device) is None
        assert fingerprint_kernel.kernel_of(device) is None
    finally:
        fingerprint_kernel.kernel_of.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "NVRTC_ERROR_INVALID_OPTION: sm_990" in said
