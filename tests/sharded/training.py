"""Training programs that run twice: plain, and with everything offloaded between any two phases.
They must not differ in one bit.

    def build() -> Program:                      # seeded; called once for each run, on every rank
        model = fully_shard(...)
        return Program(model, torch.optim.AdamW(model.parameters()), lambda number:
        model(batch(number)).square().mean())

    outcomes = two_ranks.run(training.compare, build)      # build: of a module that can be
    imported, or functools.partial of one

`compare` raises AssertionError on whatever differs: losses, parameters, gradients, buffers,
optimizer state (as bytes), tensor ids, optimizer keys and addresses, bytes left on the device
between phases, audits. What it returns is for what only the test knows (it moved at all; it did not
move because it is external).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from placement import Manager
from placement.devices.base import Device
from placement.devices.cuda.device import CudaDevice
from placement.policies import Colocated
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.poison import poison_like, reads_poison
from tests.support.seeds import seed

CAPACITY = 64 << 20
CHUNK_BYTES = 8192
STEPS = 20 if os.environ.get("SWEEP") == "all" else 2
"""Enough for the first step, in which state is born, and for a synchronisation of weights between
it and the second."""
SYNC_EVERY = 2
"""Weights are synchronised in one step of so many, as an asynchronous trainer does it."""


@dataclass
class Program:
    """A model, what steps it, and its loss. A subclass may override every method; `phases` is what
    a step consists of."""

    model: torch.nn.Module
    optimizer: Any
    loss: Callable[[int], torch.Tensor]
    """Forward and loss of one batch, by its number, with this rank's data."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further objects to register, by name, after model and optimizer (keywords of `register` as a
    pair: (object, {...}))."""
    phases: Sequence[tuple[str, str]] = (
        ("log_prob", "evaluate"),
        ("weight_sync", "evaluate"),
        ("train", "backward"),
        ("train", "learn"),
    )
    """Phase and method, in the order of a step. By default gradients of the first backward pass
    cross a phase transition."""

    def phases_of(self, step: int) -> list[tuple[str, str]]:
        return [each for each in self.phases if each[0] != "weight_sync" or step % SYNC_EVERY]

    # --- a step

    def evaluate(self, step: int) -> torch.Tensor:
        with torch.no_grad():
            return self.loss(2 * step)

    def backward(self, step: int) -> torch.Tensor:
        """Forward and backward of a first batch; its gradients stay."""
        loss = self.loss(2 * step)
        loss.backward()
        return loss.detach()

    def learn(self, step: int) -> torch.Tensor:
        """Forward and backward of a second batch, and the optimizer's step."""
        loss = self.loss(2 * step + 1)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def zeroes(self, step: int) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        return torch.tensor(float(step))

    # --- placement

    def register(self, manager: Manager) -> None:
        manager.register("actor", self.model, role="actor")
        manager.register("actor.optimizer", self.optimizer)
        for name, item in self.more.items():
            target, keywords = item if isinstance(item, tuple) else (item, {})
            manager.register(name, target, **keywords)

    def reshard(self) -> None:
        """Bring the parameters into the form that they have between phases, as the framework does
        it."""
        for module in self.model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()

    # --- what is compared

    def optimizers(self) -> Sequence[Any]:
        """The optimizers with a state of their own."""
        return (self.optimizer,)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What has to keep its identity and address: parameters and buffers, by name."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What has to keep its bytes, by name: parameters, gradients, buffers, optimizer state."""
        for name, tensor in self.tensors():
            yield name, tensor
            if tensor.grad is not None:
                yield f"{name}.grad", tensor.grad
        for number, optimizer in enumerate(self.optimizers()):
            for index, entry in enumerate(optimizer.state.values()):
                for key, value in entry.items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer.{number}.{index}.{key}", value

    def away(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What has to be off the device between phases, by name: all values but counters, which
        torch keeps on the CPU."""
        return ((name, tensor) for name, tensor in self.values() if tensor.dim())


@dataclass
class Wrapped(Program):
    """A model under a wrapper with `no_sync()`, DistributedDataParallel or FSDP1, and what may be
    done with its gradients."""

    phases: Sequence[tuple[str, str]] = (
        ("log_prob", "evaluate"),
        ("train", "backward"),
        ("train", "learn"),
    )
    accumulates: bool = False
    """The first backward pass of a step is not reduced: whole gradients of this rank's data cross a
    phase transition."""

    def backward(self, step: int) -> torch.Tensor:
        with self.model.no_sync() if self.accumulates else nullcontext():
            return super().backward(step)

    def learn_anew(self, step: int) -> torch.Tensor:
        """The gradients of the step are left to the next one, which does not want them."""
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def set_aside(self, step: int) -> torch.Tensor:
        """A backward pass that is not reduced: FSDP1 puts the shard of what was reduced before
        aside."""
        with self.model.no_sync():
            return super().backward(step)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        leaves = any(method == "learn_anew" for _, method in self.phases)
        return (
            (name, tensor)
            for name, tensor in super().values()
            if not (leaves and name.endswith(".grad"))
        )


@dataclass(frozen=True)
class Outcome:
    losses: tuple[float, ...]
    """Of every phase of every step."""
    resident_bytes: Mapping[str, int]
    """The most that each handle held on the device in any phase, without what had arrived early."""
    offloaded_bytes: Mapping[str, int]
    """What was copied to the host, by handle."""
    skipped_bytes: Mapping[str, int]
    """What was proved clean and not copied, by handle."""


def here(device: str) -> torch.device:
    """Where this rank computes: "cpu", or "cuda" for its GPU."""
    return (
        torch.device("cpu")
        if device == "cpu"
        else torch.device("cuda", torch.cuda.current_device())
    )


def device_of(name: str) -> Device:
    """This rank's, with chunks of which every shard fills several: "cpu" for a simulated one,
    "cuda" for its GPU."""
    if name == "cpu":
        return SimulatedDevice(CAPACITY, chunk_bytes=CHUNK_BYTES)
    return CudaDevice(torch.cuda.current_device(), chunk_bytes=2 << 20)


def compare(
    build: Callable[[], Program],
    steps: int = STEPS,
    *,
    device: str = "cpu",
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **manager: Any,
) -> Outcome:
    """Run what `build` makes plain, then under a manager, and compare. For `Ranks.run`.

    Args:
        build: called twice, each time from the same random state.
        device: of the manager, as `device_of` says.
        within: makes the context in which the program is built and computes; placement is outside
            of it.
        manager: keywords of `Manager` besides the device (a policy, a setting).

    Raises:
        AssertionError: what differs.
    """
    with within():
        losses, values = _run_plain(build, steps)
        seed(0)
        program = build()
    managed = Manager(device=device_of(device), **manager)
    program.reshard()
    ids = {name: id(tensor) for name, tensor in program.tensors()}
    program.register(managed)
    addresses = {name: _addresses(tensor) for name, tensor in program.tensors()}
    # what frameworks keep has tests of its own
    assert_nothing_resident(managed, allow_foreign=True)
    seen: list[bytes] = []
    shown: list[float] = []
    peaks = dict.fromkeys(managed.handles, 0)
    keys: list[set[int]] = []
    for step in range(steps):
        for phase, method in program.phases_of(step):
            seed(1 + step)
            with managed.phase(phase):
                with within():
                    loss = getattr(program, method)(step)
                seen.append(as_bytes(loss))
                shown.append(float(loss))
                peaks = {
                    name: max(peaks[name], handle.resident_bytes - handle.prefetched_bytes)
                    for name, handle in managed.handles.items()
                }
            assert managed.device.memory().chunk_bytes == 0
            assert_off(managed)
            assert_away(managed, program)
            assert seen[-1] == losses[len(seen) - 1], (
                f"step {step}, {phase}, {method}: loss {float(loss)} differs from the plain run's"
            )
            now = dict(program.tensors())
            assert {name: id(tensor) for name, tensor in now.items()} == ids, (
                f"tensors were replaced in {phase} of step {step}"
            )
            assert {name: _addresses(tensor) for name, tensor in now.items()} == addresses, (
                f"addresses changed in {phase} of step {step}"
            )
        # what frameworks keep has tests of its own
        assert_nothing_resident(managed, allow_foreign=True)
        keys.append({id(key) for optimizer in program.optimizers() for key in optimizer.state})
    assert all(each == keys[0] for each in keys), "an optimizer's keys changed"
    managed.check_integrity()
    moved = {
        name: (handle.counters.offloaded_bytes, handle.counters.skipped_bytes)
        for name, handle in managed.handles.items()
    }
    with managed.phase("restore"):
        program.reshard()
        assert_same(digest(program), values, "on the device")
    managed.close()
    assert_same(digest(program), values, "after close()")
    assert managed.device.memory().chunk_bytes == 0
    return Outcome(
        tuple(shown),
        peaks,
        {name: each[0] for name, each in moved.items()},
        {name: each[1] for name, each in moved.items()},
    )


def compare_dropping(build: Callable[..., Program]) -> Outcome:
    """Gradients die at the end of each phase with a step, where nobody needs them any more."""
    phases = (("log_prob", "evaluate"), ("train", "learn_anew"))
    return compare(functools.partial(build, phases=phases), policy=Colocated(drop_gradients=True))


def compare_zeroing(build: Callable[..., Program]) -> Outcome:
    """Gradients are zeroed in place while they are offloaded; nobody zeroes their padding, nor the
    rest of their buckets."""
    return compare(
        functools.partial(
            build, phases=(("train", "backward"), ("checkpoint", "zeroes"), ("train", "learn"))
        )
    )


def compare_setting_aside(build: Callable[..., Program]) -> Outcome:
    """Gradients that are reduced and, beside them, gradients that are not cross a phase
    transition."""
    return compare(
        functools.partial(
            build, phases=(("train", "backward"), ("train", "set_aside"), ("train", "learn"))
        )
    )


def managed(program: Program, **keywords: Any) -> Manager:
    manager = Manager(device=device_of("cpu"), **keywords)
    program.register(manager)
    return manager


def digest(program: Program) -> dict[str, str]:
    """A hash of the bytes of each value, by name; of a sharded one those of this rank."""
    return {
        f"{name}{path}": hashlib.sha1(as_bytes(part)).hexdigest()
        for name, tensor in program.values()
        for path, part in local_parts(tensor)
    }


def assert_off(manager: Manager) -> None:
    """Assert that what is offloaded can be seen to be: its ranges read nothing but poison."""
    for name, handle in manager.handles.items():
        for r in (
            handle.holding.ranges
            if handle.holding is not None and handle.resident_bytes == 0
            else ()
        ):
            view = manager.device.view(r.layout.addresses, 0, r.nbytes)
            assert reads_poison(view), (
                f"{name} is offloaded, and something other than poison lies behind its addresses"
            )


def assert_away(manager: Manager, program: Program) -> None:
    """Assert that none of the program's values was left behind: where everything is offloaded, all
    of them read poison."""
    if any(handle.external or handle.resident_bytes for handle in manager.handles.values()):
        return
    for name, tensor in program.away():
        for path, part in local_parts(tensor):
            assert as_bytes(part) == as_bytes(poison_like(part)), (
                f"{name}{path} was left on the device"
            )


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_of(tree: Any, path: str = "") -> dict[str, Any]:
    """Every tensor inside dicts and lists as the bytes that this rank has of it, and everything
    else as it is, by path."""
    if isinstance(tree, torch.Tensor):
        return {f"{path}{inner}": as_bytes(part) for inner, part in local_parts(tree)}
    if not isinstance(tree, (Mapping, list, tuple)):
        return {path: tree}
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {
        name: leaf
        for key, child in children
        for name, leaf in bytes_of(child, f"{path}.{key}" if path else str(key)).items()
    }


def local_parts(tensor: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold a tensor's bytes on this rank."""
    if not is_traceable_wrapper_subclass(tensor):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from local_parts(part, f"{path}.{name}")


def _addresses(tensor: torch.Tensor) -> list[int]:
    return [part.data_ptr() for _, part in local_parts(tensor)]


def _run_plain(build: Callable[[], Program], steps: int) -> tuple[list[bytes], dict[str, str]]:
    seed(0)
    program = build()
    losses: list[bytes] = []
    for step in range(steps):
        for _, method in program.phases_of(step):
            seed(1 + step)
            losses.append(as_bytes(getattr(program, method)(step)))
    assert len(set(losses)) > steps // 2, (
        "the program learns nothing, so nothing could be seen to go wrong"
    )
    program.reshard()
    return losses, digest(program)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    assert list(found) == list(wanted), f"{where}: {sorted({*found} ^ {*wanted})}"
    different = [name for name, value in wanted.items() if found[name] != value]
    assert not different, f"{where}: the bytes of {', '.join(different)} differ"
