"""What is refused and what is recognised as placed by its framework.

torch's own wrappers are the real ones. Frameworks that are not installed are stood in for by classes of the same shape, put
into a module of the framework's name: recognition goes by the classes an object is made of, and imports no framework.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from placement.core.errors import RegistrationError
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter

CPU = torch.device("cpu")


def adapt(obj: Any, **options: Any) -> Any:
    cls = ModuleAdapter if isinstance(obj, nn.Module) else OptimizerAdapter
    return cls(obj, name="actor", compute_device=CPU, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a class as if `module` had defined it."""

    def make(module: str, name: str, *bases: type, **fields: Any) -> Any:
        fake = ModuleType(module)
        cls = type(name, bases, {**fields, "__module__": module})
        setattr(fake, name, cls)
        monkeypatch.setitem(sys.modules, module, fake)
        package = module.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
        return cls

    return make


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_refused(obj: Any, found: str, advice: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        adapt(obj)
    message = str(caught.value)
    assert message.startswith("'actor'")
    assert found in message
    assert "Supported: " in message
    assert advice in message
    assert adapt(obj, external=True).external == "the caller says so (external=True)"


def test_an_optimizer_of_cpu_shards_beside_an_accelerator_is_external(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for part in (module[0], module):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = optim.AdamW(module.parameters())
    elsewhere = torch.device("meta")  # any device that is not the CPU: none of its tensors is made here
    adapter = OptimizerAdapter(optimizer, name="adam", compute_device=elsewhere)
    assert adapter.external == "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = [item.name for item in adapter.owned()]
    assert found[:3] == ["state.0.step", "state.0.exp_avg._local_tensor", "state.0.exp_avg_sq._local_tensor"]


def test_a_device_map_over_several_places_is_refused_and_one_place_is_plain(stand_in: Any) -> None:
    stand_in("accelerate", "Accelerator")
    module = nn.Linear(2, 2)
    module.hf_device_map = {"embed": 0, "layers": "cpu"}
    assert_refused(module, "a device map with 2 entries on several devices", "load without device_map")
    module.hf_device_map = {"": 0}
    assert len(list(adapt(module).owned())) == 2


def test_an_optimizer_that_places_its_state_itself_is_external(stand_in: Any) -> None:
    """DeepSpeed's class has to be compiled before its constructor runs; this one has its name, place and shape."""
    parameter = nn.Parameter(torch.zeros(2))
    placed = stand_in("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", optim.AdamW)([parameter])
    parameter.grad = torch.ones(2)
    placed.step()
    adapter = adapt(placed)
    assert adapter.external == "DeepSpeed's CPU Adam keeps its state on the CPU"
    assert len(list(adapter.owned())) == 3
    assert adapter.expected_sizes() == ()


@pytest.mark.slow
def test_no_framework_is_imported() -> None:
    program = (
        "import sys, torch\n"
        "from placement import Manager, WeightInfo\n"
        "from placement.ownership.module import ModuleAdapter\n"
        "from placement.ownership.optimizer import OptimizerAdapter\n"
        "module = torch.nn.Linear(2, 2)\n"
        "assert not {'torch.distributed.fsdp', 'torch._dynamo'} & set(sys.modules)\n"
        "optimizer = torch.optim.AdamW(module.parameters())\n"
        "before = set(sys.modules)  # the constructor of a torch optimizer imports torch._dynamo, and with it much of torch\n"
        "cpu = torch.device('cpu')\n"
        "ModuleAdapter(module, name='a', compute_device=cpu)\n"
        "OptimizerAdapter(optimizer, name='o', compute_device=cpu).expected_sizes()\n"
        "heavy = ('torch.distributed.fsdp', 'torch._dynamo', 'accelerate', 'deepspeed', 'megatron', 'transformers', 'torchao')\n"
        "print(sorted(set(heavy) & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.conj().imag.unsqueeze(0)])
def test_values_that_are_not_those_of_the_bytes_are_refused(make: Any) -> None:
    """A tensor over the same bytes elsewhere, such as that of a state dict, would have other values."""
    net = nn.Linear(2, 2)
    net.register_buffer("freqs", make(torch.tensor([1 + 2j, 3 + 4j])))
    with pytest.raises(RegistrationError, match=r"'freqs' is a lazily conjugated or negated view.*resolve_conj\(\) or resolve_neg\(\)"):
        adapt(net)
    net.freqs = net.freqs.resolve_conj().resolve_neg()
    assert "freqs" in [each.name for each in adapt(net).owned()]


def test_such_values_in_an_optimizers_state_are_refused_too() -> None:
    adam = optim.Adam(nn.Linear(2, 2).parameters())
    first = adam.param_groups[0]["params"][0]
    adam.state[first]["exp_avg"] = torch.zeros(2, 2, dtype=torch.complex64).conj()
    with pytest.raises(RegistrationError, match=r"'state.0.exp_avg' is a lazily conjugated"):
        adapt(adam)
