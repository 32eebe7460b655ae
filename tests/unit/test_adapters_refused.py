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

from placement.adapters import adapter_for
from placement.errors import RegistrationError

CPU = torch.device("cpu")


def adapt(obj: Any, **options: Any) -> Any:
    return adapter_for(obj, name="actor", compute_device=CPU, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a class as if `module` had defined it."""

    def make(module: str, name: str, *bases: type, **fields: Any) -> Any:
        fake = ModuleType(module)
        cls = type(name, bases, {**fields, "__module__": module})
        setattr(fake, name, cls)
        monkeypatch.setitem(sys.modules, module, fake)
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


def test_data_parallel_is_refused() -> None:
    assert_refused(nn.DataParallel(nn.Linear(2, 2)), "DataParallel is not supported", "register the plain module")


def test_distributed_data_parallel_is_refused_also_inside_a_module(one_rank: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert_refused(wrapped, "DistributedDataParallel is not supported", "not wrapped")
    assert_refused(nn.Sequential(wrapped), "(submodule '0')", "external=True")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of one rank, of FSDP1
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_is_refused(one_rank: None, original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU, use_orig_params=original)
    assert_refused(wrapped, "FullyShardedDataParallel is not supported", "not wrapped")


def fully_sharded(**options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for part in (module[0], module):
        fully_shard(part, mesh=mesh, **options)
    return module


def test_fsdp2_is_refused_without_and_external_with_cpu_offload_policy(one_rank: None) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    assert_refused(fully_sharded(), "FSDP2 without CPUOffloadPolicy (at the root, 0)", "offload_policy=CPUOffloadPolicy()")
    module = fully_sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    adapter = adapt(module)
    assert [id(parameter) for parameter in adapter.parameters()] == [id(parameter) for parameter in module.parameters()]
    assert adapter.external == "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    assert [item.name for item in adapter.owned()] == [f"{part}.{name}._local_tensor" for part in "01" for name in ("weight", "bias")]
    assert sum(item.tensor.nbytes for item in adapter.owned()) == 2 * (4 + 2) * 4


def test_an_optimizer_of_cpu_shards_beside_an_accelerator_is_external(one_rank: None) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    module = fully_sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = optim.AdamW(module.parameters())
    elsewhere = torch.device("meta")  # any device that is not the CPU: none of its tensors is made here
    adapter = adapter_for(optimizer, name="adam", compute_device=elsewhere)
    assert adapter.external == "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = [item.name for item in adapter.owned()]
    assert found[:3] == ["state.0.step", "state.0.exp_avg._local_tensor", "state.0.exp_avg_sq._local_tensor"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own module uses TorchScript when it is imported
def test_an_optimizer_sharded_over_ranks_is_refused(one_rank: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.Linear(2, 2)
    sharded = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=optim.Adam)
    assert_refused(sharded, "ZeroRedundancyOptimizer is not supported", "not sharded over ranks")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script is deprecated, and still in use
def test_torchscript_is_refused() -> None:
    assert_refused(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "(submodule '0')", "torch.compile instead")


def test_modules_that_accelerate_moves_are_refused(stand_in: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0]._hf_hook = stand_in("accelerate.hooks", "AlignDevicesHook")()
    assert_refused(module, "moves at every forward (AlignDevicesHook)", "load without device_map")


def test_a_device_map_over_several_places_is_refused_and_one_place_is_plain() -> None:
    module = nn.Linear(2, 2)
    module.hf_device_map = {"embed": 0, "layers": "cpu"}
    assert_refused(module, "a device map over 2 places", "load without device_map")
    module.hf_device_map = {"": 0}
    assert len(list(adapt(module).owned())) == 2


@pytest.mark.parametrize(
    ("package", "name", "advice"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "offload_states"),
        ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel", "not wrapped"),
        ("bitsandbytes.nn.modules", "Linear4bit", "without quantisation"),
    ],
)
def test_modules_of_frameworks_are_refused(stand_in: Any, package: str, name: str, advice: str) -> None:
    engine = stand_in(package, name, nn.Module)()
    engine.module = nn.Linear(2, 2)
    assert_refused(engine, f"{package}.{name} is not supported", advice)
    derived = type("Derived", (type(engine),), {})()
    assert_refused(derived, "Derived is not supported", advice)


def test_quantised_parameters_are_refused_by_their_class(stand_in: Any) -> None:
    for package, name in (("bitsandbytes.nn.modules", "Params4bit"), ("torchao.quantization", "Int8Tensor")):
        module = nn.Linear(2, 2)
        module.packed = torch.zeros(2).as_subclass(stand_in(package, name, torch.Tensor))
        with pytest.raises(RegistrationError, match=rf"'packed' is a {package}\.{name}: only plain tensors.*external=True"):
            adapt(module)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"),
        ("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        ("bitsandbytes.optim.adamw", "PagedAdamW8bit"),
        ("torchao.optim.adam", "AdamW8bit"),
    ],
)
def test_optimizers_of_frameworks_are_refused_also_inside_a_wrapper(stand_in: Any, package: str, name: str) -> None:
    cls = stand_in(package, name, optim.AdamW)
    parameter = nn.Parameter(torch.zeros(2))
    assert_refused(cls([parameter]), f"{package}.{name} is not supported", "external=True")
    chained = stand_in("megatron.core.optimizer.optimizer", "ChainedOptimizer", step=lambda _: None)()
    chained.chained_optimizers = [optim.AdamW([parameter])]
    assert adapt(chained).external is None
    chained.chained_optimizers.append(cls([parameter]))
    assert_refused(chained, f"{package}.{name} is not supported", "external=True")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer"),
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
        ("torchao.optim.cpu_offload", "CPUOffloadOptimizer"),
    ],
)
def test_optimizers_that_place_their_state_themselves_are_external(stand_in: Any, package: str, name: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    placed = stand_in(package, name, optim.AdamW)([parameter])
    placed.sub_optimizers = [optim.AdamW([parameter])]
    parameter.grad = torch.ones(2)
    placed.step()
    adapter = adapt(placed)
    assert name in adapter.external or "CPU" in adapter.external
    assert len(list(adapter.owned())) == 3
    assert adapter.expected_sizes() == ()


def test_a_refused_object_is_as_it_was() -> None:
    module = nn.DataParallel(nn.Linear(2, 2))
    before = [dict(vars(part)) for part in module.modules()]
    assert_refused(module, "DataParallel", "plain module")
    assert [dict(vars(part)) for part in module.modules()] == before


def test_no_framework_is_imported() -> None:
    program = (
        "import sys, torch\n"
        "from placement.adapters import adapter_for\n"
        "module = torch.nn.Linear(2, 2)\n"
        "assert 'torch.distributed.fsdp' not in sys.modules\n"
        "optimizer = torch.optim.AdamW(module.parameters())\n"
        "before = set(sys.modules)  # the constructor of a torch optimizer imports torch._dynamo, and with it much of torch\n"
        "cpu = torch.device('cpu')\n"
        "adapter_for(module, name='a', compute_device=cpu)\n"
        "adapter_for(optimizer, name='o', compute_device=cpu).expected_sizes()\n"
        "heavy = ('torch.distributed.fsdp', 'torch._dynamo', 'accelerate', 'deepspeed', 'megatron', 'transformers', 'torchao')\n"
        "print(sorted(set(heavy) & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"
