"""The optimizers inside a registered object, the tensors of their state, and the sizes of state
that steps will create."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
import random
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.core.weak import reference
from placement.frameworks.base import asked, own_state
from placement.tensors.plain import nested_tensors, parts_of

WRAPPING = ("optimizer", "chained_optimizers", "sub_optimizers", "optimizers_dict", "optim_dict")
"""Attributes whose objects are scanned, of any class. In other attributes, an optimizer is known by
its class."""
_OF_THE_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer. They have as many entries as there are parameters, and no
optimizers."""
_PARAMETERS = operator.itemgetter("params")
_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_NUMBERS = (int, float, str, type(None))  # most values in a state or a group that are no tensors


@dataclass(frozen=True, slots=True)
class Leaf:
    """An optimizer with a state of its own."""

    path: str  # the path from the registered object to the optimizer: "" or "chained_optimizers.1."
    optimizer: Any
    wraps: bool  # whether it holds further optimizers, so that its step steps them, too

    @property
    def is_hollow(self) -> bool:
        """Whether it has no state beside that of the optimizers that it holds. Its groups may then
        list stand-ins for parameters."""
        return self.wraps and not self.optimizer.state


def optimizers_in(root: Any) -> tuple[list[Any], list[Leaf]]:
    """All objects on the way to the optimizers in an object, and each optimizer with a state of its
    own, inner ones first. There are none in None, an object that was garbage-collected."""
    objects: dict[int, Any] = {}
    leaves: dict[int, Leaf] = {}
    if root is not None:
        _visit(root, "", objects, leaves)
    return list(objects.values()), list(leaves.values())


def _visit(
    obj: Any,
    path: str,
    objects: dict[int, Any],
    leaves: dict[int, Leaf],
) -> None:
    """Add an object, the optimizers in it, and the object's own leaf. `objects` are by identity,
    `leaves` by that of their state."""
    if id(obj) in objects:
        return
    objects[id(obj)] = obj
    num_before = len(leaves)
    inner = list(_wrapped(obj))
    if inner and own_state(obj) is None:  # else the inner ones are replaced at every load
        for name, wrapped in inner:
            _visit(wrapped, f"{path}{name}.", objects, leaves)
    state = getattr(obj, "__dict__", {}).get("state")
    # A wrapper may hand through the state of the optimizer inside; then it is counted there, where
    # a twin can be made of it.
    if not isinstance(state, Mapping) or id(state) in leaves:
        return
    if isinstance(getattr(obj, "param_groups", None), list):
        leaves[id(state)] = Leaf(path, obj, wraps=len(leaves) > num_before)


def _wrapped(obj: Any) -> Iterator[tuple[str, Any]]:
    """The objects in the attributes of an object that may be optimizers, with their names."""
    fields = dict(getattr(obj, "__dict__", {}))
    for name in WRAPPING:
        # Some wrappers offer the optimizer inside as a property.
        if name not in fields and isinstance(getattr(type(obj), name, None), property):
            # Megatron's property asserts that its chain has exactly one optimizer
            with contextlib.suppress(Exception):
                fields[name] = getattr(obj, name)
    for name, value in fields.items():
        if name not in _OF_THE_OPTIMIZER:
            yield from _objects_in(value, name, of_any_class=name in WRAPPING)


@functools.cache
def _is_optimizer(cls: Any) -> bool:
    """Whether objects of a class are optimizers, or wrap some: they step and drop gradients. A
    module is none, nor is an engine."""
    if issubclass(cls, torch.optim.Optimizer):
        return True
    if issubclass(cls, torch.nn.Module):
        return False
    return all(callable(getattr(cls, name, None)) for name in ("step", "zero_grad"))


@functools.cache
def _may_hold(cls: Any) -> bool:
    """Whether a container with objects of a class is scanned: they are optimizers, or containers
    that may have some."""
    return _is_optimizer(cls) or issubclass(cls, (list, tuple, Mapping))


def _objects_in(
    value: Any, name: str, *, of_any_class: bool, depth: int = 3
) -> Iterator[tuple[str, Any]]:
    """The optimizers in an attribute, through containers in containers."""
    if not isinstance(value, (list, tuple, Mapping)):
        kind: Any = type(value)
        if value is not None and (of_any_class or _is_optimizer(kind)):
            yield name, value
        return
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    parts: Collection[Any] = value.values() if isinstance(value, Mapping) else value
    # there may be a million numbers: C reads their types
    may_hold = of_any_class or any(map(_may_hold, {*map(type, parts)}))
    if not depth or not may_hold:
        return
    for index, (key, part) in enumerate(pairs):
        # A key may be a parameter, whose text shows all its values: it must not be read.
        label = key if isinstance(key, (str, int)) else index
        yield from _objects_in(part, f"{name}.{label}", of_any_class=of_any_class, depth=depth - 1)


def parameters_of(leaves: Sequence[Leaf]) -> list[torch.Tensor]:
    """The distinct parameters that the optimizers step, in the order of the optimizers and their
    groups."""
    distinct: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                distinct.setdefault(id(parameter), parameter)
    return list(distinct.values())


def state_of(
    leaf: Leaf, levels: int = 1
) -> Iterator[tuple[str, str, Mapping[str, Any], torch.Tensor]]:
    """The state's tensors, `levels` objects deep: name, key in an entry, group, tensor. Those
    without a parameter come last."""
    no_group: Mapping[str, Any] = {}
    order: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            order.setdefault(id(parameter), (len(order), group))
    last = len(order), no_group
    state: Mapping[Any, Any] = leaf.optimizer.state
    places = [(*order.get(id(owner), last), owner) for owner in state]
    places.sort(key=operator.itemgetter(0))
    for position, (index, group, owner) in enumerate(places):
        entry = state[owner]
        # several parameters may have left their groups: each name is given once
        unlisted = f"unlisted.{position}" if isinstance(owner, torch.Tensor) else owner
        label = f"{leaf.path}state.{index if id(owner) in order else unlisted}"
        if not isinstance(entry, (dict, Mapping)):
            for name, tensor in nested_tensors(entry, label, levels):
                yield name, str(unlisted), group, tensor
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield f"{label}.{key}", str(key), group, value
            elif not isinstance(value, _NUMBERS):
                for name, tensor in nested_tensors(value, f"{label}.{key}", levels):
                    yield name, str(key), group, tensor
    for table in asked("optimizer_tables", leaf.optimizer):
        for name, tensor in table:
            yield leaf.path + name, name, no_group, tensor


def tensors_in_groups(leaves: Sequence[Leaf]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the settings of parameter groups (a learning rate), which never move:
    schedulers use them outside phases."""
    for leaf in leaves:
        for index, group in enumerate(leaf.optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and not isinstance(value, _NUMBERS):
                    name = f"{leaf.path}param_groups.{index}.{key}"
                    yield from nested_tensors(value, name, levels=1)


def tensors_beside(
    leaves: Sequence[Leaf], objects: Sequence[Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that no scan of the state finds: deeper in its objects, in other attributes of these
    objects, in parameter groups."""
    for leaf in leaves:
        in_state = {id(tensor) for *_, tensor in state_of(leaf)}
        for name, *_, tensor in state_of(leaf, levels=4):
            if id(tensor) not in in_state:
                yield name, tensor
    for obj in objects:
        fields = dict(getattr(obj, "__dict__", {}))
        for name in _OF_THE_OPTIMIZER:
            fields.pop(name, None)
        yield from nested_tensors(fields, type(obj).__name__, levels=1)
    yield from tensors_in_groups(leaves)


def is_born(optimizer: Any) -> bool:
    return any(map(has_state, optimizer.state.values()))


def is_all_born(optimizer: Any, given_gradients: Container[int]) -> bool:
    """Whether an optimizer has state for every parameter that may get a gradient.
    `given_gradients`: identities of those that get one without autograd."""
    for parameter in _in_groups(optimizer):
        is_stepped = parameter.requires_grad or id(parameter) in given_gradients
        if is_stepped and not has_state(optimizer.state.get(parameter, {})):
            return False
    return True


def has_state(entry: Any) -> bool:
    return bool(entry) if isinstance(entry, (dict, Mapping)) else True


Form = tuple[int, torch.Size, torch.dtype]
"""The identity of a parameter, and the facts that decide the size of its state. A parameter may get
other data, and when one is freed, another one may get its identity."""


class Unborn:
    """State that later steps of one optimizer will create, parameter by parameter: an expert's
    comes with its first token. `sizes` are the bytes of each storage of it; for `stepped` see
    `stepped_by`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sizes: Mapping[Form, Sequence[int]],
        stepped: Sequence[int],
    ) -> None:
        self._optimizer = reference(optimizer)
        # the sizes for each parameter in the groups that had no state when it was scanned
        self._by_parameter = dict(sizes)
        self._stepped = stepped
        self._missing = list(sizes)  # the stepped parameters that had no state at the last scan
        self._num_entries = self._num_parameters = -1
        """How many entries the state had at the last scan, and how many parameters the groups, if
        all of these had state."""

    def follow(
        self,
        compute_device: torch.device,
        given_gradients: Callable[[], Collection[int]],
    ) -> bool:
        """Learn which parameters are stepped now: groups come and go, layers are replaced, frozen
        and unfrozen. Returns whether others have no state than at the last scan.
        `given_gradients`: see `stepped_by`; it is called only where parameters or state have come
        or gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        num_parameters = sum(map(len, map(_PARAMETERS, optimizer.param_groups)))
        if self._had_all(optimizer) and num_parameters == self._num_parameters:
            return False
        stepped = stepped_by(optimizer, given_gradients())
        # where state was taken away, its place counts until the next offload takes note of that
        is_as_before = self._had_all(optimizer) or len(optimizer.state) < self._num_entries
        if stepped == self._stepped and is_as_before:
            return False
        self._stepped = stepped
        before = self._missing
        missing = self._scan(optimizer)
        if self._missing == before:
            return False
        self._predict(optimizer, compute_device, missing)
        return True

    def _predict(
        self,
        optimizer: torch.optim.Optimizer,
        compute_device: torch.device,
        missing: Sequence[torch.Tensor],
    ) -> None:
        """Predict the sizes for parameters that are new, and forget those that are gone."""
        added = []
        for form, parameter in zip(self._missing, missing, strict=True):
            if form not in self._by_parameter:
                added.append(parameter)
        if added:
            predicted = _predicted(optimizer, compute_device, added)
            self._by_parameter |= predicted or dict.fromkeys(_forms(added), ())
        present: set[int] = set()
        for group in optimizer.param_groups:
            present.update(map(id, group["params"]))
        for form in [*self._by_parameter]:
            if form[0] not in present:
                del self._by_parameter[form]

    @property
    def num_entries(self) -> int:
        """The number of entries in the optimizer's state. If it grows, state was created. Costs
        nothing."""
        optimizer = self._optimizer()
        return 0 if optimizer is None else len(optimizer.state)

    def bytes_of(self, parameter: torch.Tensor) -> int:
        """Bytes of state that the first step of one parameter will create; 0 if it has state."""
        optimizer = self._optimizer()
        if optimizer is None or has_state(optimizer.state.get(parameter, {})):
            return 0
        form = id(parameter), parameter.shape, parameter.dtype
        return sum(self._by_parameter.get(form, ()))

    def sizes(self) -> list[int]:
        """Bytes of each storage that does not exist yet."""
        optimizer = self._optimizer()
        if optimizer is None or self._had_all(optimizer):
            return []
        self._scan(optimizer)
        sizes: list[int] = []
        for form in self._missing:
            sizes += self._by_parameter.get(form, ())
        return sizes

    def _had_all(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether every stepped parameter had state at the last scan, and no entry has come or gone
        since. Costs nothing."""
        return not self._missing and len(optimizer.state) == self._num_entries

    def _scan(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Find the stepped parameters that have no state, in the order of the groups."""
        born = {id(parameter) for parameter, entry in optimizer.state.items() if has_state(entry)}
        awaited = {*self._stepped} - born
        parameters = _in_groups(optimizer)
        identities = list(map(id, parameters))
        have_all_state = not awaited and born.issuperset(identities)
        self._num_parameters = len(parameters) if have_all_state else -1
        are_awaited = map(awaited.__contains__, identities)
        without_state = list(itertools.compress(parameters, are_awaited))
        missing = dict(zip(_forms(without_state), without_state, strict=True))
        self._num_entries = len(optimizer.state)
        self._missing = list(missing)
        return list(missing.values())


def unborn_state(
    optimizer: torch.optim.Optimizer,
    compute_device: torch.device,
    given_gradients: Collection[int] = (),
) -> Unborn | None:
    """The state that an optimizer's steps will create on the device, without 0-dimensional CPU
    tensors. None if it cannot be predicted: a twin of the same class is stepped on meta tensors,
    which touches no memory, value, hook or random state of the user."""
    stepped = stepped_by(optimizer, given_gradients)
    identities = {*stepped}
    parameters = [parameter for parameter in _in_groups(optimizer) if id(parameter) in identities]
    sizes = _predicted(optimizer, compute_device, parameters)
    return None if sizes is None else Unborn(optimizer, sizes, stepped)


def stepped_by(
    optimizer: torch.optim.Optimizer,
    given_gradients: Collection[int],
) -> list[int]:
    """Identities of the parameters that may get a gradient, in the order of the groups.
    `given_gradients`: those that get one without autograd."""
    # there may be tens of thousands
    parameters = _in_groups(optimizer)
    identities = list(map(id, parameters))
    are_stepped: Iterator[bool] = map(_REQUIRES_GRAD, parameters)
    if given_gradients:
        are_given = map(given_gradients.__contains__, identities)
        are_stepped = map(operator.or_, are_stepped, are_given)
    return list(itertools.compress(identities, are_stepped))


def _in_groups(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(itertools.chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))


def _forms(parameters: Sequence[torch.Tensor]) -> Iterator[Form]:
    shapes = map(_SHAPE, parameters)
    dtypes = map(_DTYPE, parameters)
    return zip(map(id, parameters), shapes, dtypes, strict=True)


def _predicted(
    optimizer: torch.optim.Optimizer,
    compute_device: torch.device,
    parameters: Sequence[torch.Tensor],
) -> dict[Form, Sequence[int]] | None:
    """Bytes of each storage of the state of these parameters. None if they cannot be told."""
    python_state = random.getstate()
    devices = [compute_device] if compute_device.type == "cuda" else []
    try:
        # Under torch.device, so that a default device of the user does not put the twin's counters
        # on the accelerator.
        with torch.random.fork_rng(devices=devices), torch.device("cpu"), torch.no_grad():
            sizes = _step_twin(optimizer, frozenset(map(id, parameters)))
    # a user's class may do anything in a step; its state is then measured once it exists
    except Exception:
        return None
    finally:
        random.setstate(python_state)
    return {form: sizes.get(form[0], ()) for form in _forms(parameters)}


def _step_twin(
    optimizer: torch.optim.Optimizer,
    stepped: Container[int],
) -> dict[int, list[int]]:
    """Bytes of each storage of the state, by identity of the optimizer's parameter. Two parameters
    of each form are stepped in a group: the first may carry state that all of them share, so the
    others are like the second."""
    forms = [_by_form(group["params"], stepped) for group in optimizer.param_groups]
    chosen = []
    for by_form in forms:
        chosen.append([parameter for alike in by_form for parameter in alike[:2]])
    twin = stepped_twin(optimizer, chosen, stepped)
    sizes = _sizes_in(twin, optimizer, chosen)
    for alike in itertools.chain.from_iterable(forms):
        second = alike[min(1, len(alike) - 1)]
        if id(second) in sizes:
            for parameter in alike[2:]:
                sizes[id(parameter)] = sizes[id(second)]
    return sizes


def stepped_twin(
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[Sequence[torch.Tensor]],
    stepped: Container[int],
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options after one step, on the meta device. `chosen`: the
    parameters of each group that it gets twins of; `stepped`: the identities of those that have a
    gradient. Raises the errors of the class."""
    cls: Any = type(optimizer)
    twin: torch.optim.Optimizer = cls(list(map(_twin_group, optimizer.param_groups, chosen)))
    for group, parameters in zip(twin.param_groups, chosen, strict=True):
        for parameter, source in zip(group["params"], parameters, strict=True):
            if id(source) in stepped:
                parameter.grad = torch.empty_like(parameter)
    # options of the constructor that are not in the groups (a block size)
    for name, value in vars(optimizer).items():
        is_option = type(value) in (bool, int, float, str)
        if is_option and type(vars(twin).get(name)) is type(value):
            setattr(twin, name, value)
    # Call the innermost function, because the wrappers that torch's constructor puts around `step`
    # run the user's global hooks.
    inspect.unwrap(cls.step)(twin)
    return twin


def _sizes_in(
    twin: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[Sequence[torch.Tensor]],
) -> dict[int, list[int]]:
    """Bytes of each storage of the twin's state, by identity of the parameter of each group that
    was chosen in the optimizer."""
    sizes: dict[int, list[int]] = {}
    # state that is a parameter or its gradient takes no memory of its own
    seen = set()
    for parameter in _in_groups(twin):
        seen.add(parameter.untyped_storage()._cdata)
        if parameter.grad is not None:
            seen.add(parameter.grad.untyped_storage()._cdata)
    groups = zip(twin.param_groups, chosen, optimizer.param_groups, strict=True)
    for group, parameters, original in groups:
        is_fused = bool(original.get("fused"))
        on_device = is_fused or bool(original.get("capturable"))
        for parameter, source in zip(group["params"], parameters, strict=True):
            for tensor in _state_parts(twin, parameter):
                storage = tensor.untyped_storage()
                if storage._cdata in seen or not (tensor.is_meta or on_device):
                    continue
                seen.add(storage._cdata)
                # A fused step keeps its counter in float32. The default dtype of the process does
                # not count.
                size = 4 if tensor.is_cpu and is_fused else storage.nbytes()
                if size:
                    sizes.setdefault(id(source), []).append(size)
    return sizes


def _state_parts(optimizer: torch.optim.Optimizer, parameter: Any) -> Iterator[torch.Tensor]:
    for _, tensor in nested_tensors(optimizer.state.get(parameter, {}), ""):
        for _, part in parts_of(tensor, ""):
            yield part


def _by_form(
    parameters: Sequence[torch.Tensor], stepped: Container[int]
) -> list[list[torch.Tensor]]:
    """The parameters of one group in lists of those whose state has the same form."""
    by_form: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        part = _own_part(parameter)
        is_stepped = id(parameter) in stepped
        form = part.shape, part.dtype, part.stride(), type(parameter), is_stepped
        by_form.setdefault(form, []).append(parameter)
    return list(by_form.values())


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter, whose state has the same form: a step on DTensors
    may call collectives (a norm, a mean)."""
    parts = list(parts_of(parameter, ""))
    return parts[0][1] if len(parts) == 1 else parameter


def _twin_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter like this one on the meta device. A scalar gets a dimension: meta tensors without
    one have no index by a mask (Rprop)."""
    twin = torch.empty_like(parameter, device="meta")
    return torch.nn.Parameter(twin if twin.dim() else twin.reshape(1))


def _twin_group(
    group: dict[str, Any],
    parameters: Sequence[torch.Tensor],
) -> dict[str, Any]:
    twins = [_twin_of(_own_part(parameter)) for parameter in parameters]
    twin: dict[str, Any] = {"params": twins}
    for key, value in group.items():
        if key in ("fused", "foreach", "capturable", "differentiable"):
            # The plain implementation makes the same state, and is the only one that runs on meta
            # tensors.
            twin[key] = False
        elif isinstance(value, torch.Tensor):
            # the state's layout does not depend on a learning rate, and reading it could wait for
            # the device
            twin[key] = 0.5
        elif key not in ("params", "param_names"):
            twin[key] = copy.deepcopy(value)
    return twin


# --- the step that torch makes to create state
#
# torch steps an optimizer without state to create its state, when it is asked for the optimizer's
# state dict. `torch.distributed.checkpoint.state_dict` makes this step, and so does code built on
# it (VeOmni's `MultiOptimizer`). It gives every parameter a gradient of zeros, sets every learning
# rate to 0, steps, and sets the rates back. Adam's step counters are 1 afterwards, so training goes
# on otherwise than without the state dict. If a guard refuses the step, the rates stay at 0.

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"
_INITIAL_STEP = "_init_optim_state"


def undo_initial_step() -> bool:
    """Put back the learning rates and drop the gradients if the step that is being refused is such
    a step. Returns whether it is."""
    initial_step = getattr(sys.modules.get(_STATE_DICTS), _INITIAL_STEP, None)
    code = getattr(initial_step, "__code__", None)
    frame = sys._getframe()
    while code is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            optimizer = frame.f_locals["optim"]
            rates = list(frame.f_locals["lrs"])
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = rates.pop(0)
            optimizer.zero_grad(set_to_none=True)
            return True
    return False


@contextlib.contextmanager
def no_initial_step() -> Iterator[None]:
    """Keep torch from making the step. A state dict that is made inside shows the state that
    exists, and none where there is none."""
    module: Any = sys.modules.get(_STATE_DICTS)
    plain = getattr(module, _INITIAL_STEP, None)
    if plain is None:
        yield
        return
    setattr(module, _INITIAL_STEP, lambda _: None)
    try:
        yield
    finally:
        setattr(module, _INITIAL_STEP, plain)
