"""The state tensors of an optimizer, and of the optimizers that a wrapper holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.adapters.base import Adapter, Owned
from placement.adapters.detect import external_optimizer, refuse_optimizer
from placement.adapters.tensors import is_plain, nested_tensors, parts_of, plain_parts, problem_of, reference, with_index
from placement.adapters.twin import twin_sizes
from placement.errors import RegistrationError

_WRAPPING = ("optimizer", "chained_optimizers", "sub_optimizers", "optimizers_dict")
_ON_CPU_UNLESS_CAPTURED = frozenset({"step", "mu_product"})


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An optimizer with a state of its own."""

    path: str
    """How it is reached from the registered object: "" or "chained_optimizers.1."."""
    optimizer: Any
    wraps: bool
    """It holds further optimizers, so that one step of it steps them too."""


class OptimizerAdapter(Adapter):
    """The state of an optimizer: whatever tensors the optimizers found in it hold in `.state`, nested lists included.

    Optimizers inside a wrapper are found anew each time, in `.optimizer`, `.chained_optimizers`, `.sub_optimizers`, `.optimizers_dict`
    and in any attribute that is a torch optimizer. The registered object is held weakly.

    What stays on the CPU: tensors in `param_groups` (a learning rate), and the counters that torch keeps there (0-dimensional
    `step`, unless fused or capturable). For an optimizer with a step of its own, all state that it put on the CPU beside an accelerator.

    Args:
        optimizer: A `torch.optim.Optimizer`, or an object that holds such.
        name: How errors name the registration.
        compute_device: Where tensors over a range say they are (`cpu` on a simulated device).
        external: The caller says that a framework places the state; then nothing is refused.

    Raises:
        RegistrationError: no optimizer found, a framework shards or quantises the state, or a tensor of it cannot be moved.
    """

    kind = "optimizer"

    def __init__(self, optimizer: Any, *, name: str, compute_device: torch.device, external: bool = False) -> None:
        self._name = name
        self._device = with_index(compute_device)
        self._root: Callable[[], Any] = reference(optimizer)
        objects, leaves = _find(optimizer)
        if not leaves or not callable(getattr(optimizer, "step", None)) or isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
            raise RegistrationError(
                f"{name!r}: {type(optimizer).__module__}.{type(optimizer).__qualname__} is no optimizer and holds none that can be found, "
                "and it is no module and no engine. "
                f"Supported: torch.optim.Optimizer, objects that hold such in {', '.join('.' + attribute for attribute in _WRAPPING)}, "
                "torch.nn.Module, placement.Engine, and placement.Lazy. "
                "What to do: register the optimizer itself (a scheduler stays as it is)."
            )
        parameters = self.parameters()
        self._external = "the caller says so (external=True)" if external else external_optimizer(objects, parameters, self._device)
        if self._external is None:
            refuse_optimizer(name, objects)
            for index, parameter in enumerate(parameters):
                for _, part in parts_of(parameter, ""):
                    if (problem := problem_of(part, self._device)) is not None:
                        raise RegistrationError(f"{name!r}: parameter {index} {problem}.")
            for item in self.owned():
                if (problem := problem_of(item.tensor, self._device)) is not None:
                    raise RegistrationError(f"{name!r}: {item.name!r} {problem}.")

    def owned(self) -> Iterator[Owned]:
        """Every state tensor object once, by parameter index, then in the order of the state's keys. Creates no entry.

        Names are those of `state_dict()`: "state.3.exp_avg", behind the path of the optimizer in a wrapper. Tensors that share a
        storage with a parameter are the module's.

        Raises:
            RegistrationError: state that cannot be moved as bytes was born after registration.
        """
        leaves = self._leaves()
        parameters = _parameters(leaves)
        seen = {id(parameter) for parameter in parameters}
        storages = {part.untyped_storage()._cdata for each in parameters for _, part in plain_parts(each, "")}
        for leaf in leaves:
            for name, key, group, tensor in _state_of(leaf):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if self._external is not None:
                    yield from (Owned(path, part) for path, part in plain_parts(tensor, name))
                    continue
                for path, part in parts_of(tensor, name):
                    if part.is_cpu and self._stays_on_cpu(leaf.optimizer, key, group, part):
                        continue
                    if not is_plain(part, self._device):
                        raise RegistrationError(f"{self._name!r}: {path!r} {problem_of(part, self._device)}.")
                    if part.numel() and part.untyped_storage()._cdata not in storages:
                        yield Owned(path, part)

    def _stays_on_cpu(self, optimizer: Any, key: str, group: Mapping[str, Any], tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor of the state is there by right.

        torch's own step functions keep nothing but counters on the CPU: any other CPU state of theirs was born before the
        parameters came to the device, and has to follow them. What foreign step functions keep there is their affair.
        """
        is_counter = tensor.dim() == 0 and key in _ON_CPU_UNLESS_CAPTURED and not isinstance(optimizer, torch.optim.ASGD)
        if is_counter and not (group.get("fused") or group.get("capturable")):
            return True
        step = getattr(type(optimizer), "step", None)
        return self._device.type != "cpu" and not getattr(step, "__module__", "").startswith("torch.optim.")

    def key_objects(self) -> Sequence[Any]:
        """The registered object, then the optimizers found in it; nothing when it is gone."""
        root = self._root()
        if root is None:
            return []
        return [root, *(leaf.optimizer for leaf in self._leaves() if leaf.optimizer is not root)]

    @property
    def external(self) -> str | None:
        return self._external

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters that the optimizer steps, in the order of the optimizers and their groups."""
        return _parameters(self._leaves())

    def state_is_born(self) -> bool:
        """Whether any optimizer found in the object has state: true from the first step, or from the constructor (Adagrad)."""
        return any(_is_born(leaf.optimizer) for leaf in self._leaves())

    def expected_sizes(self) -> Sequence[int] | None:
        """Bytes of each storage that the first step will create, in parameter order; empty once the state is born.

        None when it cannot be told: LBFGS, ASGD, Adafactor, SparseAdam, and steps of users that need data.
        """
        if self._external is not None:
            return ()
        sizes: list[int] = []
        for leaf in self._leaves():
            if _is_born(leaf.optimizer):
                continue
            born = None if leaf.wraps else twin_sizes(leaf.optimizer, self._device)
            if born is None:
                return None
            sizes.extend(born)
        return sizes

    def _leaves(self) -> list[_Leaf]:
        root = self._root()
        return _find(root)[1] if root is not None else []


def _find(root: Any) -> tuple[list[Any], list[_Leaf]]:
    """Every object on the way and every optimizer with a state of its own, inner ones before what wraps them."""
    objects: list[Any] = []
    leaves: list[_Leaf] = []
    visited: set[int] = set()
    states: set[int] = set()

    def visit(obj: Any, path: str) -> None:
        if id(obj) in visited:
            return
        visited.add(id(obj))
        objects.append(obj)
        found_before = len(leaves)
        for name, inner in _wrapped(obj):
            visit(inner, f"{path}{name}.")
        fields = getattr(obj, "__dict__", {})
        state = fields.get("state")
        # A wrapper may hand through the state of what it wraps; then it is counted there, where a twin can be made of it.
        if isinstance(state, Mapping) and isinstance(fields.get("param_groups"), list) and id(state) not in states:
            states.add(id(state))
            leaves.append(_Leaf(path, obj, wraps=len(leaves) > found_before))

    visit(root, "")
    return objects, leaves


def _wrapped(obj: Any) -> Iterator[tuple[str, Any]]:
    fields = dict(getattr(obj, "__dict__", {}))
    for name in _WRAPPING:
        # Some wrappers offer what they wrap as a property.
        if name not in fields and isinstance(getattr(type(obj), name, None), property):
            fields[name] = getattr(obj, name, None)
    for name, value in fields.items():
        if name in _WRAPPING:
            yield from _objects_in(value, name)
        elif isinstance(value, torch.optim.Optimizer):
            yield name, value


def _objects_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _objects_in(part, f"{name}.{key}")
    elif value is not None:
        yield name, value


def _parameters(leaves: Sequence[_Leaf]) -> list[torch.Tensor]:
    distinct: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                distinct.setdefault(id(parameter), parameter)
    return list(distinct.values())


def _state_of(leaf: _Leaf) -> Iterator[tuple[str, str, Mapping[str, Any], torch.Tensor]]:
    """Name, key within the parameter's state, parameter group and tensor; by parameter, then what is not kept by parameter."""
    state: Mapping[Any, Any] = leaf.optimizer.state
    if not state:
        return
    order: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            order.setdefault(id(parameter), (len(order), group))
    last: tuple[int, Mapping[str, Any]] = (len(order), {})
    for owner, entry in sorted(state.items(), key=lambda item: order.get(id(item[0]), last)[0]):
        index, group = order.get(id(owner), last)
        label = f"{leaf.path}state.{index if id(owner) in order else _label(owner)}"
        if not isinstance(entry, Mapping):
            yield from ((name, str(owner), group, tensor) for name, tensor in nested_tensors(entry, label))
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield f"{label}.{key}", str(key), group, value
            elif isinstance(value, (list, tuple, Mapping)):
                yield from ((name, str(key), group, tensor) for name, tensor in nested_tensors(value, f"{label}.{key}"))


def _label(owner: Any) -> str:
    return "unlisted" if isinstance(owner, torch.Tensor) else str(owner)


def _is_born(optimizer: Any) -> bool:
    return any(entry if isinstance(entry, Mapping) else True for entry in optimizer.state.values())
