"""What ranks do in the tests of publishing: build a sharded model, publish it, compare with its
full state dict."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placement import Handle, Manager, WeightInfo
from placement.policies import Colocated
from placement.publish import ahead
from placement.storage.owners import RANGES
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import assert_same

CHUNK_BYTES = 4096
WIDTH, ROWS = 24, 31
"""`ROWS` divides by no world size: the last rank has less."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, ROWS)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.down = torch.nn.Linear(ROWS, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(self.norm(x)).relu()) * self.scale.mean()
        return y


class Model(torch.nn.Module):
    """Uneven, tied, with a frozen part, a scalar, values that only bytes tell apart, and a
    transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.blocks[0].norm.bias.requires_grad_(False)
        with torch.no_grad():
            self.blocks[1].up.bias[0], self.blocks[1].up.bias[1] = float("nan"), -0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def tokens() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4) + dist.get_rank()


def wanted_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a plain model publishes: parameters, then persistent buffers, tied ones once."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = model.state_dict()
    return found | {name: buffer.clone() for name, buffer in model.named_buffers() if name in saved}


# --- the models


def plain(model: Any) -> Any:
    return model


def ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any, offload: OffloadPolicy | None = None, **options: Any) -> Any:
    options |= {} if offload is None else {"offload_policy": offload}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2_external(model: Any) -> Any:
    return fsdp2(
        model,
        CPUOffloadPolicy(pin_memory=False),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
    )


def fsdp2_mixed(model: Any) -> Any:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2_rows(model: Any) -> Any:
    """Sharded along dimension 1 where that divides."""

    def along(parameter: torch.nn.Parameter) -> Any:
        return (
            Shard(1)
            if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
            else Shard(0)
        )

    return fsdp2(model, shard_placement_fn=along)


def _fsdp1(model: Any, of: Any, **options: Any) -> Any:
    policy = ModuleWrapPolicy({type(model.blocks[0])} if of is None else of)
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), auto_wrap_policy=policy, **options
    )


def fsdp1_flat(model: Any, of: Any = None) -> Any:
    model.requires_grad_(True)  # one flat parameter is trained as a whole
    return _fsdp1(model, of, use_orig_params=False)


def fsdp1_original(model: Any, of: Any = None) -> Any:
    return _fsdp1(model, of, use_orig_params=True)


def fsdp1_whole(model: Any, of: Any = None) -> Any:
    return _fsdp1(model, of, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp2_hybrid(model: Any) -> Any:
    """Replicated on a first dimension of the mesh."""
    return fsdp2(
        model,
        mesh=init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
        ),
    )


def fsdp2_of_tensor_parallel(model: Any) -> Any:
    """Cut by tensor parallelism and then by FSDP2, on the same dimension of the tensor."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return fsdp2(model, mesh=mesh["data"])


def tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


BUILDS: dict[str, Callable[[Any], Any]] = {
    each.__name__: each
    for each in (
        plain,
        ddp,
        fsdp2,
        fsdp2_external,
        fsdp2_mixed,
        fsdp2_rows,
        fsdp2_hybrid,
        fsdp2_of_tensor_parallel,
        fsdp1_flat,
        fsdp1_original,
        fsdp1_whole,
        tensor_parallel,
    )
}


# --- publishing


def manager_of(*, streams: bool = False, **settings: Any) -> Manager:
    return Manager(
        device=SimulatedDevice(64 << 20, chunk_bytes=CHUNK_BYTES),
        policy=Colocated(stream_sync=streams),
        **settings,
    )


def placed(module: Any, **settings: Any) -> tuple[Manager, Handle]:
    """A manager, and an actor registered with it. `settings` are those of `manager_of`."""
    manager = manager_of(**settings)
    return manager, manager.register("actor", module, role="actor")


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that torch made while it is on and that are still alive: what
    publishing takes on a device.

    Not those over a range or a host copy, nor the host copy of what is external.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.peak = 0
        self._slabs = [] if handle.holding is None else [r.host for r in handle.holding.ranges]
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Live:
        # publishing leaves the modes of its caller
        self._left_alone = mock.patch.object(ahead, "without_modes", nullcontext)
        self._left_alone.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._left_alone.stop()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if type(each) is torch.Tensor
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                type(tensor) is torch.Tensor
                and not tensor.is_meta
                and not self._is_known(tensor.untyped_storage().data_ptr())
            ):
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.now > self.peak:
            self.peak = max(self.peak, self.settled(self.peak))
        return result

    def settled(self, enough: int) -> int:
        """What is alive once the threads of a collective that is through have let go of its
        tensors, or at most `enough`."""
        for _ in range(20):
            if self.now <= enough:
                break
            time.sleep(0.001)
        return self.now

    def _is_known(self, address: int) -> bool:
        return RANGES.owner_of(address) is not None or any(
            0 <= address - slab.address < slab.nbytes for slab in self._slabs
        )

    @property
    def now(self) -> int:
        self._seen = {
            key: (ref, nbytes) for key, (ref, nbytes) in self._seen.items() if not ref.expired()
        }
        return sum(nbytes for _, nbytes in self._seen.values())


def read(handle: Any, **options: Any) -> dict[str, torch.Tensor]:
    """What a handle publishes, in memory of our own; names, shapes and types are as announced, and
    no two buckets share."""
    announced = handle.weights_info(
        **{key: value for key, value in options.items() if key != "bucket_bytes"}
    )
    found: dict[str, torch.Tensor] = {}
    for bucket in handle.weights(**options):
        for name, tensor in bucket:
            assert name not in found
            assert RANGES.owner_of(tensor.untyped_storage().data_ptr()) is None
            assert type(tensor) is torch.Tensor
            assert not tensor.requires_grad
            found[name] = tensor.clone()
            # it is ours: nobody notices
            tensor.view(torch.uint8).fill_(0xAB) if tensor.is_contiguous() and tensor.ndim else None
    assert [
        WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()
    ] == announced
    return found


def publish(build: str, streams: bool) -> dict[str, Any]:
    """Publish a model that is resident or streamed, sharded and with its root left unsharded by a
    forward."""
    model = Model()
    wanted = wanted_of(model)
    module = BUILDS[build](copy.deepcopy(model))
    manager, actor = placed(module, streams=streams)
    infos = [actor.weights_info()]
    with manager.phase("weight_sync"):
        assert_same(read(actor, bucket_bytes=3000), wanted)
        if not actor.external:
            assert (actor.resident_bytes == 0) is streams
    assert_nothing_resident(manager, allow_foreign=True)
    with manager.phase("log_prob") as phase:
        # whose uneven rows torch can cut, but not compute with
        if not build.endswith("tensor_parallel"):
            with torch.no_grad():
                module(tokens())  # the root of FSDP2 and FSDP1 stays unsharded
        infos.append(actor.weights_info())
        phase.switch("weight_sync")
        assert_same(read(actor), wanted)
    assert_nothing_resident(manager, allow_foreign=True)
    infos.append(actor.weights_info())
    assert all(info == infos[0] for info in infos)
    return {"external": actor.external}


def peak(
    build: str, streams: bool, bucket_bytes: int, dtype: torch.dtype | None
) -> tuple[int, int]:
    """Most bytes that publishing had of its own at once, and the size of the largest weight as it
    is published."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(64, rows) for rows in (61, 128, 7, 64, 64))
    module = BUILDS[build](model)
    manager, actor = placed(module, streams=streams)
    with manager.phase("weight_sync"), Live(actor) as live:
        deque(actor.weights(bucket_bytes=bucket_bytes, dtype=dtype), maxlen=0)
        assert live.settled(0) == 0
    assert_nothing_resident(manager, allow_foreign=True)
    return live.peak, max(
        info.dtype.itemsize * torch.Size(info.shape).numel()
        for info in actor.weights_info(dtype=dtype)
    )
