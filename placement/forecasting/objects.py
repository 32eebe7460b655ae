"""The objects of a worker of which only the sizes exist: modules, optimizers, rollout engines. A real manager registers them as any other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.core.states import WEIGHTS, HandleView
from placement.engines.base import Engine
from placement.engines.tagged import TaggedEngine
from placement.forecasting.device import SizesDevice, sized
from placement.ownership.independent import allow
from placement.storage.range_layout import ALIGNMENT

Like = Callable[[torch.Size, torch.dtype], Mapping[str, torch.Tensor]]
"""The state that an optimizer creates for a parameter of this shape and dtype, on the meta device."""
_PIECES = 32
"""The storages of a handle of which only the bytes are known."""


class SizedModule(torch.nn.Module):
    """A module of storages.

    Args:
        storages: the bytes of each, and the parameters that lie in it, on the meta device; none: it is a buffer.
    """

    def __init__(self, storages: Iterable[tuple[int, Sequence[torch.nn.Parameter]]]) -> None:
        super().__init__()
        place: torch.nn.Module = self
        for index, (nbytes, parameters) in enumerate(storages):
            whole = sized((nbytes,))
            if parameters and any(True for _ in place.buffers(recurse=False)):  # a module's buffers come after its parameters
                place = torch.nn.Module()
                self.add_module(f"part{index}", place)
            if not parameters:
                place.register_buffer(f"buffer{index}", whole)
            for number, each in enumerate(parameters):
                data = torch.empty(0, dtype=each.dtype, device="cpu").set_(whole.untyped_storage(), 0, each.shape)
                made = torch.nn.Parameter(data, requires_grad=each.requires_grad)
                place.register_parameter(f"parameter{index}_{number}", made)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that the module has."""
        yield from self.parameters()
        yield from self.buffers()

    def trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad]


@allow
class SizedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps create state, and compute nothing."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], like: Like = lambda shape, dtype: {}) -> None:
        super().__init__(parameters, {"like": like})

    def step(self, closure: Any = None) -> None:
        """Create the state of every parameter that has a gradient and no state yet."""
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: Mapping[str, Any]) -> None:
        for each in group["params"]:
            if each.grad is not None and each not in self.state:
                like = group["like"](each.shape, each.dtype)
                self.state[each] = {name: sized_like(tensor, each.device) for name, tensor in like.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """The state that exists, without counters."""
        return (each for state in self.state.values() for each in state.values() if each.dim())


def sized_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same form without bytes: on the CPU with an address, on the meta device without one."""
    return sized(tensor.shape, tensor.dtype) if device.type == "cpu" and tensor.dim() else torch.empty_like(tensor)


class SizedEngine(TaggedEngine):
    """A rollout engine that places its own memory. Its copies of the weights take the time of the link."""

    def __init__(self, device: SizesDevice, tag_bytes: Mapping[str, int], *, keeps_weights: bool) -> None:
        tags, kept = tuple(tag_bytes), "keep" if keeps_weights else "discard"
        super().__init__(tags=tags, tag_bytes=tag_bytes, weights=kept, offloaded=tags, verify="answer")  # type: ignore[arg-type]
        self._device = device
        self._copied_bytes = tag_bytes.get(WEIGHTS, 0) if keeps_weights else 0

    def offload(self, tags: Collection[str]) -> None:
        """Copy the weights to the host, if they leave and are kept."""
        self._device.transfer(self._copied_bytes * (WEIGHTS in tags), "to_host")

    def load(self, tags: Collection[str]) -> None:
        """Copy the weights to the device, if they come and were kept."""
        self._device.transfer(self._copied_bytes * (WEIGHTS in tags), "to_device")

    def drain(self) -> None:
        """Nothing is in flight."""

    def admit(self) -> None:
        """Nobody asks for anything."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """No bucket is ever sent."""


class _Generator(Engine):
    """A rollout engine in this process, which does not keep its module alive."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def modules(self) -> Sequence[torch.nn.Module]:
        """The module, as long as it lives."""
        module = self._module()
        return () if module is None else (module,)

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """No bucket is ever sent."""


@dataclass
class Object:
    """An object to register, and what a run has to know of it besides."""

    name: str
    target: SizedModule | SizedOptimizer | SizedEngine
    role: str | None = None
    readonly: bool = False
    external: bool = False
    part: tuple[int, int] = (1, 1)
    """The part of its bytes that goes over this rank's own link, as a fraction."""
    generates: bool = False
    """Whether a module is that of a rollout engine in this process."""
    is_shared: bool = False
    """Whether the ranks of a node share the host copy, of which each counts its part."""
    gradient_dtype: torch.dtype | None = None
    """None: that of the weights."""
    keeps_gradients: bool = False
    """Whether the gradients of a module are alive when training ends."""
    gradient_bytes: int = 0
    """Bytes of the gradients of a module that is trained, as far as they are to be told."""

    def to_register(self) -> Any:
        """What the manager registers. It is held by this object alone."""
        return _Generator(self.target) if self.generates else self.target

    def own(self, nbytes: int) -> int:
        """This rank's part of so many bytes."""
        return -(-nbytes * self.part[0] // self.part[1])

    def give_gradients(self) -> None:
        """Let every trained parameter of a module have a new gradient."""
        assert isinstance(self.target, SizedModule)
        for each in self.target.trained():
            if self.gradient_dtype is None or self.gradient_dtype == each.dtype:
                each.grad = sized(each.shape, each.dtype)
            else:  # only its bytes are another dtype's, because torch refuses such a gradient
                storage = sized((each.numel(),), self.gradient_dtype).untyped_storage()
                each.grad = torch.empty(0, dtype=each.dtype, device="cpu").set_(storage, 0, each.shape, (0,) * each.dim())

    def clear_gradients(self) -> None:
        """Drop the gradients when a training ends, unless they are kept."""
        assert isinstance(self.target, SizedModule)
        for each in [] if self.keeps_gradients else self.target.parameters():
            each.grad = None


def empty(objects: Iterable[Object]) -> None:
    """Take everything out of the objects, so that nobody tries to hand back values that do not exist."""
    for each in objects:
        if isinstance(each.target, SizedOptimizer):
            each.target.state.clear()
        elif isinstance(each.target, SizedModule):
            for tensor in each.target.tensors():
                tensor.grad = None
                tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")


def object_of(
    device: SizesDevice, facts: HandleView, owners: Mapping[str, Object], *, changed_bytes: int | None, is_born: bool, keeps_weights: bool
) -> Object:
    """The object of a handle of which only the facts are known.

    Args:
        owners: the objects before it, by name.
        changed_bytes: the part of its bytes that training changes; None: all.
        is_born: whether an optimizer's state exists already.
        keeps_weights: whether an engine's offload keeps the weights.
    """
    given: dict[str, Any] = {"role": facts.role, "readonly": facts.readonly, "external": facts.external}
    if facts.tags:
        return Object(facts.name, SizedEngine(device, facts.tags, keeps_weights=keeps_weights), **given)
    modules = [owners[name].target for name in facts.owners if name in owners]
    stepped = [each for module in modules if isinstance(module, SizedModule) for each in module.trained()]
    if not stepped:
        changed = facts.num_bytes if changed_bytes is None else round(changed_bytes / device.chunk_bytes) * device.chunk_bytes
        changed = min(changed, facts.num_bytes) or facts.num_bytes
        parts = [(nbytes, True) for nbytes in _cut(changed)] + [(nbytes, False) for nbytes in _cut(facts.num_bytes - changed)]
        module = SizedModule((nbytes, [_parameter(nbytes, is_trained=trained)]) for nbytes, trained in parts)
        return Object(facts.name, module, generates=facts.kind == "engine", **given)
    sizes = _cut(facts.num_bytes, len(stepped))
    states = {each.shape: torch.empty(nbytes, dtype=torch.uint8, device="meta") for each, nbytes in zip(stepped, sizes, strict=False)}
    optimizer = SizedOptimizer(stepped, lambda shape, dtype: {"state": states[shape]} if shape in states else {})
    if is_born:
        optimizer.state.update({each: {"state": sized((nbytes,))} for each, nbytes in zip(stepped, sizes, strict=False)})
    return Object(facts.name, optimizer, **given)


def _cut(nbytes: int, pieces: int = _PIECES) -> list[int]:
    """So many bytes in pieces that leave no room between them, the last with what is left over."""
    each = nbytes // pieces // ALIGNMENT * ALIGNMENT
    return [size for size in (*[each] * (pieces - 1), nbytes - each * (pieces - 1)) if size]


def _parameter(nbytes: int, *, is_trained: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(nbytes // 2, dtype=torch.float16, device="meta"), requires_grad=is_trained)
