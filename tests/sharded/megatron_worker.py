"""Megatron-Core's DistributedDataParallel and optimizers, built small. Run on a rank, without a GPU
inside `pretend_cuda()`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager
from tests.group.part_worker import shared_with
from tests.sharded import training
from tests.sharded.pretend_cuda import pretend_cuda
from tests.support.ranks import group_of_all
from tests.support.seeds import seed

WIDTHS = {"cpu": (97, 33), "cuda": (1031, 519)}
"""Odd, so that shards end inside of parameters; on a GPU each handle fills more than a chunk."""


@dataclass(frozen=True)
class Kind:
    dtype: torch.dtype = torch.bfloat16
    is_distributed: bool = True
    overlaps: bool = False
    is_precision_aware: bool = False
    gradients_in_fp32: bool = True

    def __str__(self) -> str:
        words = [
            str(self.dtype).removeprefix("torch."),
            "distributed" if self.is_distributed else "replicated",
        ]
        words += ["overlap"] if self.overlaps else []
        words += ["precision-aware"] if self.is_precision_aware else []
        return "-".join(words + ([] if self.gradients_in_fp32 else ["16-bit-gradients"]))


KINDS = (
    Kind(),
    Kind(overlaps=True, gradients_in_fp32=False),
    Kind(is_precision_aware=True),
    Kind(dtype=torch.float32, overlaps=True),
    Kind(is_distributed=False),
    Kind(dtype=torch.float32, is_distributed=False),
)


class DecoupledAdam(torch.optim.AdamW):
    """What TransformerEngine's FusedAdam is to Megatron's precision-aware optimizer
    (`master_weights`, `use_decoupled_grad`).

    It needs CUDA. The same shape: the parameters are shards of the model in bfloat16, gradients are
    in `decoupled_grad`, the main parameter in float32 is state, and the step writes the model's
    shards itself.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for shard in group["params"]:
                state = self.state[shard]
                if not state:
                    state["exp_avg"] = torch.zeros_like(shard, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(shard, dtype=torch.float32)
                    state["master_param"] = shard.float().clone()
                    group["step"] = 0
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for shard in group["params"]:
                state, gradient = self.state[shard], shard.decoupled_grad.float()
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                root = (
                    (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                )
                state["master_param"].addcdiv_(
                    state["exp_avg"], root, value=-group["lr"] / (1 - first ** group["step"])
                )
                shard.copy_(state["master_param"])


class Net(torch.nn.Module):
    """Several storages, an expert whose gradients go to the expert-parallel buffers, a frozen layer
    outside of every buffer."""

    def __init__(self, wide: int = 97, narrow: int = 33) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, wide)
        self.expert = torch.nn.Linear(wide, narrow)
        self.frozen = torch.nn.Linear(narrow, narrow).requires_grad_(False)
        self.last = torch.nn.Linear(narrow, 8, bias=False)
        self.register_buffer("scale", torch.ones(8))
        for parameter in self.expert.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.expert(torch.relu(self.first(x))))
        return self.last(torch.relu(self.frozen(hidden))) * self.scale


def start() -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def wrap(kind: Kind, net: torch.nn.Module, **options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=kind.is_distributed,
        overlap_grad_reduce=kind.overlaps,
        overlap_param_gather=kind.overlaps and kind.is_distributed,
        grad_reduce_in_fp32=kind.gradients_in_fp32,
        bucket_size=1500,
        **options,
    )
    transformer = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    return DistributedDataParallel(transformer, config, net.to(kind.dtype))


def optimize(kind: Kind, model: Any) -> Any:
    from megatron.core import optimizer as megatron

    config = megatron.OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=kind.dtype is torch.bfloat16,
        use_distributed_optimizer=kind.is_distributed,
        overlap_param_gather=kind.overlaps and kind.is_distributed,
        clip_grad=math.inf if kind.is_precision_aware else 1.0,
    )
    if not kind.is_precision_aware:
        return megatron.get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    config.clip_grad = 0.0  # Megatron clips decoupled gradients by a kernel of TransformerEngine
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    chain = []
    parts = (
        (False, "buffers", model.intra_dp_cp_group),
        (True, "expert_parallel_buffers", model.intra_expt_dp_group),
    )
    for is_expert, field, group in parts:
        parameters = [
            p
            for p in model.parameters()
            if p.requires_grad and getattr(p, "allreduce", True) is not is_expert
        ]
        one = megatron.DistributedOptimizer(
            DecoupledAdam([{"params": parameters}], lr=1e-2),
            config,
            None,
            None,
            model_chunks=[model],
            per_model_buffers={0: getattr(model, field)},
            data_parallel_group=group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        one.grad_stats_parallel_group = group
        chain.append(one)
    return megatron.ChainedOptimizer(chain)


class Program(training.Program):
    """A step as Megatron's training loop does it: two micro-batches, the first without
    synchronising, gradients in `main_grad`."""

    def backward(self, step: int) -> torch.Tensor:
        with self.model.no_sync():
            loss = self.loss(2 * step)
            loss.backward()
        return loss.detach()

    def learn(self, step: int) -> torch.Tensor:
        loss = self.loss(2 * step + 1)
        loss.backward()
        self.model.finish_grad_sync()
        is_done, norm, _ = self.optimizer.step()
        assert is_done
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return loss.detach() + (norm or 0.0)

    def optimizers(self) -> Sequence[Any]:
        return inner(self.optimizer)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield f"{name}.main_grad", parameter.main_grad
        for number, buffer in enumerate(buffers(self.model)):
            yield f"buffers.{number}.grad_data", buffer.grad_data
            if buffer.param_data is not None:
                yield f"buffers.{number}.param_data", buffer.param_data
        for number, optimizer in enumerate(self.optimizers()):
            for index, each in enumerate(stepped(optimizer)):
                yield f"optimizer.{number}.main.{index}", each


def buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers with a state of their own."""
    return [each.optimizer for each in optimizer.chained_optimizers]


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def loss_of(model: Any, dtype: torch.dtype, number: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        1000 * number + (dist.get_rank() if dist.is_initialized() else 0)
    )
    loss: torch.Tensor = (
        model(torch.randn(4, 16, generator=generator).to(training.here(device), dtype))
        .float()
        .square()
        .mean()
    )
    return loss


def build(kind: Kind, device: str = "cpu") -> Program:
    start()
    model = wrap(kind, Net(*WIDTHS[device]).to(training.here(device)))
    return Program(
        model,
        optimize(kind, model),
        functools.partial(loss_of, model, kind.dtype, device=device),
    )


def compare(kind: Kind, **options: Any) -> training.Outcome:
    return training.compare(functools.partial(build, kind), within=pretend_cuda, **options)


def replicas(kind: Kind, generation: int) -> list[tuple[int, ...]]:
    """A reference with one host copy for the data-parallel ranks. The ranks that share it."""
    with pretend_cuda():
        seed(0)
        model = build(kind).model
        wanted = training.bytes_of([*model.parameters()])
        group = group_of_all(generation, 60.0)
        manager = Manager(device=training.device_of("cpu"), group=group, budget_bytes=1 << 40)
        handle = manager.register("ref", model, role="ref", readonly=True, replicated=True)
        for _ in range(2):
            with manager.phase("ref_log_prob"):
                assert training.bytes_of([*model.parameters()]) == wanted
            assert handle.resident_bytes == 0
        shared = shared_with(handle)
        manager.close()
        assert training.bytes_of([*model.parameters()]) == wanted
    return shared
