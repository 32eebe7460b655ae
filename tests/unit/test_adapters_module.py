"""Which tensors the adapter finds in a module, and in what order."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from placement.core.errors import RegistrationError
from placement.ownership.module import ModuleAdapter

CPU = torch.device("cpu")


def adapt(module: nn.Module, **options: Any) -> ModuleAdapter:
    return ModuleAdapter(module, name="actor", compute_device=CPU, **options)


def names(adapter: ModuleAdapter) -> list[str]:
    return [item.name for item in adapter.owned()]


def by_name(adapter: ModuleAdapter) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor for item in adapter.owned()}


class Block(nn.Module):
    """A module with everything a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.original_angles = self.angles  # as rotary embeddings keep it: the same object under a second name
        self.loose_view = self.angles[1:3]
        self.table = [torch.zeros(2), {"left": (torch.ones(1), 7), "right": None}]
        self.empty = torch.empty(0)
        self.label = "no tensor"


def test_buffers_persistent_or_not_and_tensor_attributes_are_found_once_each() -> None:
    module = Block()
    adapter = adapt(module)
    assert names(adapter) == [
        "angles",
        "loose_view",
        "table.0",
        "table.1.left.0",
        "inner.weight",
        "inner.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    found = by_name(adapter)
    assert found["loose_view"].untyped_storage().data_ptr() == found["angles"].untyped_storage().data_ptr()
    assert len({id(tensor) for tensor in found.values()}) == len(found)


def test_old_style_weight_norm_keeps_its_computed_weight() -> None:
    with pytest.warns(FutureWarning):
        module = torch.nn.utils.weight_norm(nn.Linear(3, 2))
    module(torch.ones(1, 3))
    assert {item.name: item.transient for item in adapt(module).owned()} == {
        "bias": False,
        "weight_g": False,
        "weight_v": False,
        "weight": True,
    }


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo layout"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quantised layout"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "nested layout"),
        (lambda: torch.zeros(2).share_memory_(), "shared memory"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that nested and quantised tensors are going to change
def test_tensors_that_cannot_be_moved_are_refused_by_name(tensor: Any, complaint: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_buffer("odd", tensor())
    with pytest.raises(RegistrationError, match=rf"'actor': '0\.odd' .*{complaint}"):
        adapt(module)


def test_a_tensor_subclass_is_refused_and_external_ones_are_measured() -> None:
    class Packed(torch.Tensor):
        pass

    module = nn.Linear(2, 2)
    module.packed = torch.zeros(2).as_subclass(Packed)
    with pytest.raises(RegistrationError, match=r"'packed' is a .*Packed: only plain tensors"):
        adapt(module)
    adapter = adapt(module, external=True)
    assert adapter.external is not None
    assert names(adapter) == ["weight", "bias"]


def test_of_a_wrapper_subclass_what_it_wraps_is_moved() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module = nn.Module()
    module.pair = TwoTensor(torch.zeros(2), torch.ones(2))
    for external in (False, True):
        assert names(adapt(module, external=external)) == ["pair.a", "pair.b"]


def test_sparse_tensors_of_an_external_module_are_no_bytes_that_could_be_measured() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    module.register_buffer("graph", torch.eye(2).to_sparse())
    module(torch.tensor([1])).sum().backward()
    assert names(adapt(module, external=True)) == ["weight", "weight.grad.indices", "weight.grad.values"]


def test_a_device_map_over_several_places_is_refused_and_one_place_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    module = nn.Linear(2, 2)
    module.hf_device_map = {"embed": 0, "layers": "cpu"}
    with pytest.raises(RegistrationError, match=r"'actor'.*a device map with 2 entries on several devices.*load without device_map"):
        adapt(module)
    assert adapt(module, external=True).external == "the caller says so (external=True)"
    module.hf_device_map = {"": 0}
    assert len(names(adapt(module))) == 2


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_values_that_are_not_those_of_the_bytes_are_refused(make: Any) -> None:
    """A tensor over the same bytes elsewhere, such as that of a state dict, would have other values."""
    net = nn.Linear(2, 2)
    net.register_buffer("freqs", make(torch.tensor([1 + 2j, 3 + 4j])))
    with pytest.raises(RegistrationError, match=r"'freqs' is a lazily conjugated or negated view.*resolve_conj\(\) or resolve_neg\(\)"):
        adapt(net)
    net.freqs = net.freqs.resolve_conj().resolve_neg()
    assert "freqs" in names(adapt(net))


@pytest.mark.gpu
def test_cpu_tensors_of_a_module_on_the_gpu_stay_there() -> None:
    device = torch.device("cuda")
    born_on_gpu = nn.Linear(2, 2, device=device)
    born_on_gpu.lengths = torch.zeros(3)
    adapter = ModuleAdapter(born_on_gpu, name="actor", compute_device=device)
    assert names(adapter) == ["weight", "bias"]
    born_on_cpu = nn.Linear(2, 2)
    born_on_cpu.lengths = torch.zeros(3)
    adapter = ModuleAdapter(born_on_cpu, name="actor", compute_device=device)
    born_on_cpu.weight.data = born_on_cpu.weight.data.to(device)  # as adoption does, one tensor after the other
    assert names(adapter) == ["weight", "bias", "lengths"]
