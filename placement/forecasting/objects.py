"""The objects of a worker of which only sizes exist: modules, optimizers, rollout engines. A real manager registers them as any other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from placement.core.states import WEIGHTS, HandleView
from placement.engines.base import Engine
from placement.engines.tagged import TaggedEngine
from placement.forecasting.device import SizesDevice, sized, within
from placement.ownership.partial_step import allow
from placement.storage.layout import ALIGNMENT

StateOf = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""The state that an optimizer creates for a parameter, on the meta device. Tensors without a dimension are counters, on the host."""
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
                made = torch.nn.Parameter(within(whole.untyped_storage(), each.shape, each.dtype), requires_grad=each.requires_grad)
                place.register_parameter(f"parameter{index}_{number}", made)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad]


def _nothing(_: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {}


@allow
class SizedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps create state, and compute nothing."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], state_of: StateOf = _nothing) -> None:
        super().__init__(parameters, {"state_of": state_of})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state of every parameter that has a gradient and no state yet."""
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: Mapping[str, Any]) -> None:
        for each in group["params"]:
            if each.grad is not None and each not in self.state:
                self.state[each] = {name: _like(tensor, each.is_meta) for name, tensor in group["state_of"](each).items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The state that exists, without counters."""
        return [each for state in self.state.values() for each in state.values() if each.dim()]


def _like(tensor: torch.Tensor, is_meta: bool) -> torch.Tensor:
    return sized(tensor.shape, tensor.dtype) if tensor.dim() and not is_meta else torch.empty_like(tensor)


class SizedEngine(TaggedEngine):
    """A rollout engine that places its own memory. Its copies of the weights take the time of the link."""

    def __init__(self, device: SizesDevice, tag_bytes: Mapping[str, int], *, keeps_weights: bool) -> None:
        given: dict[str, Any] = {"weights": "keep" if keeps_weights else "discard", "verify": "answer"}
        super().__init__(tags=tuple(tag_bytes), tag_bytes=tag_bytes, offloaded=tuple(tag_bytes), **given)
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
        return () if (module := self._module()) is None else (module,)

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
    generates: bool = False
    """Whether a module is that of a rollout engine in this process."""
    part: tuple[int, int] = (1, 1)
    """The part of its bytes that goes over this rank's own link, as a fraction."""
    is_shared: bool = False
    """Whether the ranks of a node share the host copy, of which each counts its part."""
    keeps_gradients: bool = False
    """Whether the gradients of a module are alive when training ends."""
    gradient_bytes: int = 0
    """Bytes of the gradients of a module that is trained, as far as they are to be told."""

    def to_register(self) -> Any:
        """The manager's object. The module or optimizer in it is held by this one alone."""
        return _Generator(self.target) if self.generates and isinstance(self.target, SizedModule) else self.target

    def own(self, nbytes: int) -> int:
        """This rank's part of so many bytes."""
        return -(-nbytes * self.part[0] // self.part[1])

    def empty(self) -> None:
        """Take everything out of the target, so that nobody tries to hand back values that do not exist."""
        if isinstance(self.target, SizedOptimizer):
            self.target.state.clear()
        elif isinstance(self.target, SizedModule):
            for each in self.target.tensors:
                each.grad = None
                each.data = torch.empty(0, dtype=each.dtype, device="cpu")


class Seen(NamedTuple):
    """The sizes of one handle that its moves have shown."""

    loaded_bytes: int = 0
    """The bytes that a load copies; 0: all."""
    changed_bytes: int = 0
    """The bytes that an offload copies once training has changed the values; 0: all."""
    is_born: bool = True
    """Whether an optimizer's state exists from the beginning on."""
    keeps_weights: bool = True
    """Whether an engine's offload keeps the weights."""


def objects_of(device: SizesDevice, facts: Iterable[HandleView], seen: Mapping[str, Seen]) -> Iterator[Object]:
    """The objects of handles of which only the facts are known."""
    made: dict[str, Object] = {}
    for each in facts:
        made[each.name] = _object_of(device, each, made, seen.get(each.name, Seen()))
        yield made[each.name]


def _object_of(device: SizesDevice, facts: HandleView, others: Mapping[str, Object], seen: Seen) -> Object:
    given: dict[str, Any] = {"role": facts.role, "readonly": facts.readonly, "external": facts.external}
    if facts.tags:
        return Object(facts.name, SizedEngine(device, facts.tags, keeps_weights=seen.keeps_weights), **given)
    if seen.loaded_bytes:  # padding is not copied, nor what other ranks bring
        given["part"] = min(seen.loaded_bytes, facts.num_bytes), facts.num_bytes
    modules = [others[name].target for name in facts.owners if name in others]
    stepped = [each for module in modules if isinstance(module, SizedModule) for each in module.trained]
    if not stepped:
        changed = min(round(seen.changed_bytes / device.chunk_bytes) * device.chunk_bytes, facts.num_bytes) or facts.num_bytes
        cut = [(nbytes, _parameter(nbytes)) for nbytes in _pieces(changed)]
        cut += [(nbytes, _parameter(nbytes, is_trained=False)) for nbytes in _pieces(facts.num_bytes - changed)]
        return Object(facts.name, SizedModule((nbytes, [each]) for nbytes, each in cut), generates=facts.kind == "engine", **given)
    sizes = _pieces(facts.num_bytes, len(stepped))
    states = {each.shape: torch.empty(nbytes, dtype=torch.uint8, device="meta") for each, nbytes in zip(stepped, sizes, strict=False)}
    optimizer = SizedOptimizer(stepped, lambda each: {"state": states[each.shape]} if each.shape in states else {})
    if seen.is_born:
        optimizer.state.update({each: {"state": sized((nbytes,))} for each, nbytes in zip(stepped, sizes, strict=False)})
    return Object(facts.name, optimizer, **given)


def _pieces(nbytes: int, count: int = _PIECES) -> list[int]:
    """So many bytes in pieces that leave no room between them; the last has what is left over."""
    each = nbytes // count // ALIGNMENT * ALIGNMENT
    return [size for size in (*[each] * (count - 1), nbytes - each * (count - 1)) if size]


def _parameter(nbytes: int, *, is_trained: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(nbytes // 2, dtype=torch.float16, device="meta"), requires_grad=is_trained)
