"""Stand-ins for the objects of a worker: they have their shapes and dtypes, and no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from placement.core.settings import bytes_of
from placement.core.states import KV_CACHE, WEIGHTS
from placement.forecasting.device import SizedModule, SizedOptimizer, StateOf
from placement.ownership.optimizer_state import stepped_twin


@dataclass(frozen=True)
class Rollout:
    """A rollout engine that places its own memory (vLLM, SGLang), with its bytes on one GPU. Sizes
    may be text, such as "30GiB".

    Raises:
        ValueError: a size is no number of bytes.

    Example:
        ::

            manager.register("rollout", Rollout("14GiB", "40GiB"), role="rollout")
    """

    weights_bytes: int | str
    kv_cache_bytes: int | str
    keeps_weights: bool = True
    """Whether its sleep keeps the weights on the host (level 1). Else they are dropped, and the
    next weight sync fills them (level 2)."""

    @property
    def tags(self) -> dict[str, int]:
        return {
            WEIGHTS: size_of("weights_bytes", self.weights_bytes),
            KV_CACHE: size_of("kv_cache_bytes", self.kv_cache_bytes),
        }


def size_of(name: str, size: int | str) -> int:
    """A number of bytes from 0 on. Raises ValueError, TypeError: the argument `name` is none."""
    nbytes = bytes_of(name, size)
    if nbytes < 0:
        raise ValueError(f"{name} must be 0 or more, not {nbytes}")
    return nbytes


# --- modules


class Part(NamedTuple):
    """One storage of a module, as one rank holds it."""

    nbytes: int
    sources: tuple[torch.nn.Parameter, ...]  # the module's parameters in it; empty for a buffer
    parameters: tuple[torch.nn.Parameter, ...]  # the rank's part of each, on the meta device


def module_without_bytes(
    name: str, module: torch.nn.Module, shards: int
) -> tuple[SizedModule, dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """A stand-in for the module that is called `name`, and its parameter for each of the module's.

    Raises ValueError: the module has no tensors, or cannot be sharded.
    """
    parts = parts_of(module, shards)
    if not parts:
        raise ValueError(f"{name!r} has no tensors")
    made = SizedModule([(part.nbytes, part.parameters) for part in parts])
    sources = [source for part in parts for source in part.sources]
    return made, dict(zip(sources, made.parameters(), strict=True))


def parts_of(module: torch.nn.Module, shards: int = 1) -> list[Part]:
    """The storages of a module as the first of so many ranks holds them, in the order in which a
    handle takes them in. No other rank holds more. Raises ValueError: a parameter has no dimension
    to shard."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in _tensors(module):
        if tensor.numel():
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    parts = []
    for tensors in storages.values():
        sources = tuple(tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter))
        nbytes = tensors[0].untyped_storage().nbytes()
        own = tuple(_shard_of(source, shards) for source in sources)
        if own and shards > 1:
            nbytes = sum(parameter.nbytes for parameter in own)
        parts.append(Part(nbytes, sources, own))
    return parts


def _shard_of(parameter: torch.nn.Parameter, shards: int) -> torch.nn.Parameter:
    """The first rank's part of a parameter, as FSDP2 divides it: a part of the first dimension."""
    shape = [*parameter.shape]
    if shards > 1:
        if not shape:
            raise ValueError("a parameter without a dimension cannot be sharded; use shards=1")
        shape[0] = -(-shape[0] // shards)
    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(part, requires_grad=parameter.requires_grad)


def _tensors(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor of a module: parameters, buffers and plain attributes, submodule by submodule. A
    tensor comes once."""
    seen = set()
    for module in root.modules():
        fields = module.__dict__
        tensors = [*fields["_parameters"].values(), *fields["_buffers"].values()]
        tensors += [value for value in fields.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


# --- optimizers


def optimizer_without_bytes(
    name: str,
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[torch.nn.Parameter, torch.nn.Parameter],
) -> SizedOptimizer:
    """A stand-in for the optimizer that is called `name`. Its parameters are the stand-ins of the
    optimizer's own. A step on the meta device tells the state that it creates.

    Raises ValueError: a parameter has no stand-in, or the step needs values.
    """
    chosen = []
    trained: set[int] = set()
    for group in optimizer.param_groups:
        if any(parameter not in stand_ins for parameter in group["params"]):
            raise ValueError(
                f"{name!r} steps parameters of no registered module; register the module first"
            )
        parameters = [stand_ins[parameter] for parameter in group["params"]]
        trained.update(id(parameter) for parameter in parameters if parameter.requires_grad)
        chosen.append(parameters)
    try:
        with torch.device("cpu"), torch.no_grad():
            twin = stepped_twin(optimizer, chosen, trained)
    except Exception as error:
        raise ValueError(
            f"the state of {name!r}, a {type(optimizer).__qualname__}, is not known without "
            f"values ({type(error).__name__}: {error}); register another optimizer with the same "
            "state"
        ) from error
    groups = []
    for group, parameters in zip(twin.param_groups, chosen, strict=True):
        states = [twin.state.get(parameter, {}) for parameter in group["params"]]
        groups.append({"params": parameters, "state_of": _copied(parameters, states)})
    return SizedOptimizer(groups)


def _copied(
    parameters: list[torch.nn.Parameter],
    states: list[Mapping[str, object]],
) -> StateOf:
    """The state that each parameter gets: that of the last one of its shape and dtype, because the
    first may hold state that all share."""
    by_form: dict[_Form, dict[str, torch.Tensor]] = {}
    for parameter, state in zip(parameters, states, strict=True):
        if parameter.requires_grad:
            by_form[_form(parameter)] = {
                name: value for name, value in state.items() if isinstance(value, torch.Tensor)
            }
    return lambda parameter: by_form[_form(parameter)]


_Form = tuple[torch.Size, torch.dtype]


def _form(parameter: torch.Tensor) -> _Form:
    # twins of scalars have a dimension
    return parameter.shape or torch.Size((1,)), parameter.dtype
