"""How storages get their place in a range on a machine without an accelerator, by each way that
exists there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from placement.core.errors import RegistrationError
from placement.devices import base
from placement.devices.cuda.pool import plan
from placement.devices.simulated.device import SimulatedDevice
from placement.storage import layout as range_layout
from placement.storage.layout import Adoptee

CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
swap_only = pytest.mark.skipif(not CAN_SWAP, reason="torch before 2.13 cannot swap storages")


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(64 << 20, chunk_bytes=64 * 1024)


@pytest.fixture(params=[pytest.param("swap", marks=swap_only), "rebind"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a CPU storage; an older torch has only the second."""
    if request.param == "rebind":
        monkeypatch.setattr(base, "can_swap", lambda: False)
    return str(request.param)


def claims_of(tensors: dict[str, torch.Tensor]) -> list[Adoptee]:
    """One claim a storage, with every tensor given as its alias."""
    found: dict[int, tuple[str, torch.UntypedStorage, list[torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (name, storage, []))[2].append(tensor)
    return [Adoptee(name, storage, tuple(aliases)) for name, storage, aliases in found.values()]


@pytest.mark.parametrize(
    "hold",
    [
        lambda m: m.state_dict(),
        lambda m: m.weight.detach()[1:],
        lambda m: m(torch.ones(1, 4)).sum(),
    ],
)
def test_rebinding_refuses_a_storage_with_an_unknown_user(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, hold: Callable[[torch.nn.Module], Any]
) -> None:
    monkeypatch.setattr(base, "can_swap", lambda: False)
    model = torch.nn.Linear(4, 4, bias=False)
    model.scaled = torch.nn.Parameter(model.weight.data.t())
    before = model.weight.data_ptr(), model.weight.detach().clone()
    held = hold(model)
    tensors = dict(model.named_parameters())
    if isinstance(held, torch.Tensor) and held.grad_fn is not None:
        # a graph that saved the parameter itself follows it
        range_layout.RangeLayout(device, claims_of(tensors))
    else:
        with pytest.raises(RegistrationError, match=r"'weight': \d more user"):
            range_layout.RangeLayout(device, claims_of(tensors))
    del held
    gc.collect()
    range_layout.RangeLayout(device, claims_of(tensors))
    assert model.weight.data_ptr() == before[0]
    assert torch.equal(model.weight, before[1])


def test_rebinding_refuses_lazy_views(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "can_swap", lambda: False)
    odd = torch.randn(4, dtype=torch.complex64).conj()
    with pytest.raises(RegistrationError, match="conjugated or negated"):
        range_layout.RangeLayout(device, claims_of({"odd": odd}))


def test_old_memory_dies_at_move_in(device: SimulatedDevice, way: str) -> None:
    class Owner(bytearray):
        """A buffer whose death can be seen."""

    owner = Owner(4096)
    alive = weakref.ref(owner)
    tensor = torch.frombuffer(owner, dtype=torch.float32)
    del owner
    claims = claims_of({"t": tensor})
    layout = range_layout.RangeLayout(device, claims)
    layout.move_in()
    del claims
    layout.forget_adoptees()
    assert alive() is None
    assert bool(tensor.isnan().all())


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [1 << 20] * 3,
        [(1 << 20) + 1],
        [5, 30 << 20, 2 << 20, 700_000, 0, 600_000, 500_000, 1],
    ],
)
def test_the_plan_for_torchs_allocator_covers_every_segment_without_overlap(
    sizes: list[int],
) -> None:
    places, used = plan(sizes)
    spans = sorted((p.offset, p.offset + p.nbytes) for p in places)
    assert all(
        end <= start < end + 512 or start - end <= 1 << 20
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False)
    )
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert sorted(p.index for p in places if p.index is not None) == [
        i for i, n in enumerate(sizes) if n
    ]
    assert sum(p.opens for p in places) == used
    assert used % (2 << 20) == 0
    assert not spans or spans[-1][1] <= used
