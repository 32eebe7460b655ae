"""Ways to train a model in steps of GRPO's shape on one GPU: plain torch, FSDP2, DeepSpeed and verl
with their offloading, and placement under three policies."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import placement
from bench import _peers
from bench._decoder import Decoder, Shape, empty_decoder, fill
from bench._rig import Rig
from bench.forecast import measured_link
from placement.core.states import IDLE
from placement.policies import Colocated, Cyclic, Resident
from placement.registration import streamed_optimizer

_PHASES = ("ref_log_prob", "old_log_prob", "train", "weight_sync")
_OWN_PHASES = {"old_log_prob": ("actor",)}


def working_bytes(rig: Rig, shape: Shape) -> int:
    """Device bytes that a step needs beside weights and moments: gradients, and an allowance for
    activations."""
    parameters = sum(parameter.numel() for parameter in empty_decoder(shape).parameters())
    return 4 * parameters + rig.pick(1 << 26, 12 * 10**9, 12 * 10**9)


def grpo_loss(new: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """The loss of a group of answers, from log-probabilities [answers, tokens]."""
    advantages = torch.linspace(-1, 1, new.shape[0], device=new.device)[:, None]
    ratio = torch.exp(new - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    distance = torch.exp(reference - new) - (reference - new) - 1
    return (0.02 * distance - gain).mean()


class Trainer:
    """torch: everything is on the device. Other systems say what they do before each phase.

    Args:
        note: called with the name of each part of the job when it begins, and once more at the end
            of the training, when the host holds the most.

    Attributes:
        step_seconds: the time of the last `optimizer.step()`.
    """

    name = "torch"
    needs_gpu = False
    needs_package = "torch"

    def __init__(self, rig: Rig, shape: Shape, note: Callable[[str], None]) -> None:
        self.rig, self.shape, self._note = rig, shape, note
        self.step_seconds = 0.0

    # --- what systems do in their own way

    def prepare(self) -> None:
        """Make actor, reference and optimizer."""
        self.actor, self.ref = self.model(torch.float32), self.model(torch.bfloat16)
        self.optimizer = self.adamw()

    def begin(self, phase: str) -> None:
        """Bring what this phase needs, after the one before."""

    def end(self) -> None:
        """The step is over."""

    def weights(self) -> Iterator[Tensor]:
        """Every weight of the actor on the device, one at a time."""
        for parameter in self.actor.parameters():
            yield parameter.detach().to(self.rig.torch_device, non_blocking=True)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a micro-batch."""
        loss.backward()

    def seconds_of_moves(self) -> float | None:
        """Seconds in which the step stood still for moves since the last call; None where the
        system does not know."""
        return None

    # --- the job

    def model(self, dtype: torch.dtype) -> Decoder:
        model = empty_decoder(self.shape).to(dtype).to_empty(device=self.rig.torch_device)
        fill(model, self.rig.torch_device)
        return model.requires_grad_(dtype == torch.float32)

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.actor.parameters(), lr=1e-4, fused=True)

    def log_probs(self, model: Decoder, ids: Tensor) -> Tensor:
        device = self.rig.torch_device.type
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            log_probs: Tensor = model(ids)
        return log_probs

    def step(self, batches: Tensor) -> tuple[float, float]:
        """One step over micro-batches of ids [batches, sequences, length]. Returns the loss and the
        mean log-probability."""
        self._begin("ref_log_prob")
        with torch.no_grad():
            reference = [self.log_probs(self.ref, ids) for ids in batches]
        self._begin("old_log_prob")
        with torch.no_grad():
            old = [self.log_probs(self.actor, ids) for ids in batches]
        self._begin("train")
        losses = []
        for index, ids in enumerate(batches):
            new = self.log_probs(self.actor, ids)
            loss = grpo_loss(new, old[index], reference[index]) / len(batches)
            self.backward(loss, is_last=index == len(batches) - 1)
            losses.append(loss.detach())
        self.rig.sync()
        began = time.perf_counter()
        self.optimizer.step()
        self.rig.sync()
        self.step_seconds = time.perf_counter() - began
        self._note("train")
        self.optimizer.zero_grad()
        self._begin("weight_sync")
        self._publish()
        self.end()
        return torch.stack(losses).sum().item(), torch.stack(old).mean().item()

    def _begin(self, phase: str) -> None:
        self._note(phase)
        self.begin(phase)

    @torch.no_grad()
    def _publish(self) -> None:
        largest = max(parameter.numel() for parameter in self.actor.parameters())
        engine = torch.empty(largest, dtype=torch.bfloat16, device=self.rig.torch_device)
        for weight in self.weights():
            engine[: weight.numel()].view_as(weight).copy_(weight)


def _join_alone(rig: Rig) -> None:
    """Make a process group of this process alone."""
    backend = "nccl" if rig.is_cuda else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


class Fsdp(Trainer):
    name = "FSDP2 CPUOffloadPolicy"
    needs_gpu = True

    def prepare(self) -> None:
        _join_alone(self.rig)
        super().prepare()

    def model(self, dtype: torch.dtype) -> Decoder:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        model = empty_decoder(self.shape).to(dtype)
        how: dict[str, Any] = {
            "mesh": torch.distributed.init_device_mesh(self.rig.torch_device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.rig.is_cuda),
        }
        for layer in model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        model.to_empty(device="cpu")
        fill(model, self.rig.torch_device)
        return model.requires_grad_(dtype == torch.float32)

    def weights(self) -> Iterator[Tensor]:
        for parameter in self.actor.parameters():
            local: Any = parameter
            yield local.detach().to_local().to(self.rig.torch_device, non_blocking=True)


class ZeroOffload(Trainer):
    """DeepSpeed's ZeRO stage 2 with `offload_optimizer`: bf16 weights stay on the device. Float32
    weights and moments are on the host, where `DeepSpeedCPUAdam` steps."""

    optimizer: Any  # DeepSpeed's engine, which has the methods of an optimizer
    name = "DeepSpeed ZeRO-Offload"
    needs_package = "deepspeed"
    needs_gpu = True

    def prepare(self) -> None:
        own_adam = _peers.deepspeed_cpu_adam()  # imports the whole package
        deepspeed = importlib.import_module("deepspeed")
        _join_alone(self.rig)
        os.environ["LOCAL_RANK"] = "0"  # which DeepSpeed wants to be told
        self.ref = self.model(torch.bfloat16)
        self.actor = self.model(torch.bfloat16).requires_grad_()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": self.rig.is_cuda},
            },
        }
        adam = own_adam(self.actor.parameters(), lr=1e-4, weight_decay=0.01)
        self.optimizer = deepspeed.initialize(model=self.actor, optimizer=adam, config=config)[0]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.optimizer.set_gradient_accumulation_boundary(is_last)
        self.optimizer.backward(loss)


class Verl(Trainer):
    name = "verl"
    needs_gpu = True
    needs_package = "verl"

    def prepare(self) -> None:
        self._verl = _peers.verl()
        self._seconds = 0.0
        self._loaded: list[Decoder] = []
        self.actor = self.model(torch.float32)
        self._verl.offload_fsdp_model_to_cpu(self.actor)
        self.ref = self.model(torch.bfloat16)
        self._verl.offload_fsdp_model_to_cpu(self.ref)
        self.optimizer = self.adamw()

    def begin(self, phase: str) -> None:
        self._seconds += self.rig.seconds(lambda: self._exchange(phase))

    def _exchange(self, phase: str) -> None:
        """What the phase before has used goes, and what this one uses comes."""
        for model in self._loaded:
            self._verl.offload_fsdp_model_to_cpu(model)
        self._verl.offload_fsdp_optimizer(self.optimizer)
        self.rig.empty_cache()
        of_phase = {"ref_log_prob": [self.ref], "weight_sync": []}
        self._loaded = of_phase.get(phase, [self.actor])
        for model in self._loaded:
            self._verl.load_fsdp_model_to_gpu(model)
        if phase == "train":
            self._verl.load_fsdp_optimizer(self.optimizer, self.rig.torch_device)

    def seconds_of_moves(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Placed(Trainer):
    """placement under one policy.

    Attributes:
        work_seconds: the durations of each phase since the last forecast, without moves.
        moved_seconds: likewise those of the moves on the way to each phase.
    """

    policy: placement.Policy

    def prepare(self) -> None:
        self.work_seconds: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        self.moved_seconds: dict[str, list[float]] = {phase: [] for phase in (*_PHASES, IDLE)}
        device = self.rig.placement_device()
        streamed_optimizer.BUCKET_BYTES = self.rig.pick(1 << 16, 512 << 20, 512 << 20)
        self._budget = self.rig.free_bytes() - working_bytes(self.rig, self.shape)
        self.manager = placement.Manager(
            device=device, policy=self.policy, budget_bytes=self._budget, phases=_OWN_PHASES
        )
        self._link = measured_link(self.manager.device, self.rig.pick(1 << 20, 1 << 30, 1 << 30))
        # one after the other, so that no two models are in torch's own memory together
        self.actor = self.model(torch.float32)
        self.handle = self.manager.register("actor", self.actor, role="actor")
        self.ref = self.model(torch.bfloat16)
        self.manager.register("ref", self.ref, role="ref", readonly=True)
        self.optimizer = self.adamw()
        self.manager.register("actor.optimizer", self.optimizer)
        self.rig.empty_cache()

    def _register_sizes(self, run: Any) -> None:
        actor, ref = empty_decoder(self.shape), empty_decoder(self.shape).to(torch.bfloat16)
        run.register("actor", actor, role="actor")
        run.register("ref", ref, role="ref", readonly=True)
        run.register("actor.optimizer", torch.optim.AdamW(actor.parameters()))

    def forecast(self) -> placement.Forecast:
        """The forecast of the steps since the last call. It is told how long their work took,
        because copies that come early go on meanwhile. The first step does not count."""
        work = {phase: statistics.median(taken[1:]) for phase, taken in self.work_seconds.items()}
        told = placement.forecast(
            self._register_sizes,
            policy=self.policy,
            cycle=_PHASES,
            budget_bytes=self._budget,
            phases=_OWN_PHASES,
            device=self.manager.device,
            link=self._link,
            work_seconds=work,
        )
        for phase in told.phases:
            moved = statistics.median(self.moved_seconds[phase.phase][1:])
            if phase.phase == "train":  # a streamed step is told as a stall of its phase
                moved += self.step_seconds
            print(
                f"   {phase.phase}: moves told {phase.stall_seconds:.3f} s, took {moved:.3f} s; "
                f"work took {work.get(phase.phase, 0.0):.3f} s",
                flush=True,
            )
        for seconds in (*self.work_seconds.values(), *self.moved_seconds.values()):
            seconds.clear()
        return told

    def begin(self, phase: str) -> None:
        if self.manager.phase_name == IDLE:
            self._move(phase, lambda: self.manager.enter(phase))
        else:
            self._note_work()
            self._move(phase, lambda: self.manager.switch(phase))
        self._began = time.perf_counter()

    def end(self) -> None:
        self._note_work()
        self._move(IDLE, self.manager.leave)

    def _move(self, phase: str, change: Callable[[], object]) -> None:
        """Change to a phase, and wait until all that its work needs is there. Copies that go on
        beside the work are not waited for."""
        began = time.perf_counter()
        change()
        self.manager.device.wait_for_work()
        self.moved_seconds[phase].append(time.perf_counter() - began)

    def _note_work(self) -> None:
        """Note the seconds of the phase that is open. Kernels that still run are no move, so they
        are waited for."""
        self.manager.device.wait_for_work()
        seconds = time.perf_counter() - self._began
        if self.manager.phase_name == "train":
            seconds -= self.step_seconds
        elif self.manager.phase_name == "weight_sync" and not self.handle.is_on_device:
            seconds = 0.0  # the host copy is read then: nothing else can come meanwhile
        self.work_seconds[self.manager.phase_name].append(seconds)

    def weights(self) -> Iterator[Tensor]:
        for bucket in self.handle.weights(dtype=torch.bfloat16):
            for _, weight in bucket:
                yield weight

    def seconds_of_moves(self) -> float:
        return sum(seconds[-1] for seconds in self.moved_seconds.values())


class PlacedColocated(Placed):
    name = "placement, colocated"
    policy = Colocated("streamed", stream_sync=True)


class PlacedCyclic(Placed):
    name = "placement, cyclic"
    policy = Cyclic(optimizer_in="streamed")


class PlacedResident(Placed):
    name = "placement, resident"
    policy = Resident()


TRAINERS: dict[str, type[Trainer]] = {
    system.name: system
    for system in (Trainer, PlacedColocated, PlacedCyclic, PlacedResident, Verl, Fsdp, ZeroOffload)
}
