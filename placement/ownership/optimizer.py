"""The state tensors of an optimizer, or of the optimizers inside a wrapper."""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet, reference
from placement.frameworks.base import answering, asked, own_state, stepped_for
from placement.ownership.adapter import (
    HANDED_BACK,
    TRACK,
    Adapter,
    Noted,
    Seen,
    SteadyState,
    refusal,
)
from placement.ownership.optimizer_state import (
    Leaf,
    Unborn,
    is_all_born,
    is_born,
    optimizers_in,
    parameters_of,
    state_of,
    stepped_by,
    tensors_beside,
    tensors_in_groups,
    unborn_state,
)
from placement.tensors.plain import (
    LAZY_VIEW,
    OBJECT_LEVELS,
    PLAIN_TYPES,
    Owned,
    has_bytes,
    is_lazy_view,
    is_leaf,
    is_plain,
    is_plain_type,
    is_sparse,
    nested_tensors,
    owned_parts,
    parts_of,
    plain_parts,
    problem_of,
    problem_of_sparse,
    sparse_parts,
    with_index,
)

_CDATA = operator.attrgetter("_cdata")
_LAYOUT = operator.attrgetter("layout", "is_nested")
_STRIDED = (torch.strided, False)
_GRADIENTS = ("grad", "decoupled_grad")
_ON_CPU_UNLESS_CAPTURED = frozenset({"step", "mu_product"})


class OptimizerAdapter(Adapter):
    """The state of an optimizer: all tensors that it, and the optimizers inside it, have in
    `.state`, also in containers and objects.

    Optimizers inside a wrapper are searched each time. The registered object is held weakly.

    These tensors stay on the CPU: those in `param_groups` (a learning rate), and counters that
    torch keeps there (0-dimensional `step`, unless fused or capturable). If the optimizer's `step`
    is not torch's own, all state that it put on the CPU stays there. Raises RegistrationError: no
    optimizer was found, or its state or a tensor of it cannot be moved.
    """

    kind = "optimizer"
    steady: SteadyState | None = None

    def __init__(
        self,
        optimizer: Any,
        *,
        name: str,
        compute_device: torch.device,
        external: bool = False,
    ) -> None:
        self._name = name
        self.compute_device = with_index(compute_device)
        self._borrowed: WeakIdSet[torch.Tensor] = WeakIdSet()
        """Tensors of the last scan that lie in storages of the modules: a main parameter, a view of
        a parameter in the state."""
        self._sparse: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._empty: list[Noted] = []
        self._lent_gradients: WeakIdSet[torch.Tensor] = WeakIdSet()
        """State tensors of the last scan that are the modules' gradients, or lie in their
        storages."""
        # state still to be created, as far as the last `expected_sizes` could predict it
        self._unborn: tuple[Unborn, ...] = ()
        # stepped tensors that are no module's parameters (see `take_copies`)
        self._copies: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._copied: Callable[[], torch.Tensor | None] = lambda: None
        self._root: Callable[[], Any] = reference(optimizer)
        objects, leaves = optimizers_in(optimizer)
        is_scheduler = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
        is_optimizer = bool(leaves) or _holds_optimizers(objects)
        has_step = callable(getattr(optimizer, "step", None))
        if is_scheduler or not is_optimizer or not has_step:
            raise RegistrationError(
                f"{name!r}: {type(optimizer).__module__}.{type(optimizer).__qualname__} is no "
                "optimizer and holds none that can be found, and it is no module and no engine. "
                "Supported: torch.optim.Optimizer, objects that hold some in attributes, also in "
                "lists, tuples and dicts there, torch.nn.Module, placement.Engine, and "
                "placement.Lazy. What to do: register the module or the optimizer itself, not its "
                "tensors or a scheduler; of a function or a class what it returns, or "
                "placement.Lazy(function), which calls it when a phase needs that; for vLLM and "
                "SGLang an engine of placement.engines, such as VllmInProcess(llm)."
            )
        parameters = self.parameters()
        if external:
            self.external = "the caller says so (external=True)"
        else:
            self.external = _external(objects, parameters, self.compute_device)
        if self.external is None:
            _refuse(name, objects)
            self._refuse_parameters(parameters)

    def _refuse_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        for index, parameter in enumerate(parameters):
            for _, part in parts_of(parameter, ""):
                problem = problem_of(part, self.compute_device)
                if problem is not None:
                    raise RegistrationError(f"{self._name!r}: parameter {index} {problem}.")

    def owned(self) -> Iterator[Owned]:
        """Every state tensor once, by parameter and key, under its name in `state_dict()`
        ("state.3.exp_avg") after the optimizer's path. A tensor that shares a storage with a
        parameter is the module's. Raises RegistrationError: state that cannot be moved."""
        owned = list(self._scan())
        self.steady = self._as_steady(owned)
        return iter(owned)

    def unchanged(self) -> Seen | None:
        return None if self.steady is None else self.steady.unchanged(self.optimizers())

    def _as_steady(self, owned: Sequence[Owned]) -> SteadyState | None:
        """A record of a scan, to see quickly that nothing has changed. None if the next scan must
        be complete again."""
        if self.external is not None or self.hands_back:
            return None
        objects, leaves = optimizers_in(self._root())
        optimizers = [leaf.optimizer for leaf in leaves]
        if _holds_optimizers(objects) or not SteadyState.fits(optimizers):
            return None
        # such state becomes the optimizer's own when the modules drop the gradients
        has_lent_gradients = any(True for _ in self._lent_gradients)
        if has_lent_gradients or any(each_owned.wrapper is not None for each_owned in owned):
            return None
        in_state: set[int] = set()
        for optimizer in optimizers:
            for entry in optimizer.state.values():
                in_state.update(map(id, entry.values()))
        tensors = [each_owned.tensor for each_owned in owned]
        if not in_state.issuperset(map(id, tensors)):
            return None
        steady = SteadyState(optimizers, tensors)
        return steady if steady.leaves_numbers_alone else None

    def _scan(self) -> Iterator[Owned]:
        for noted in (self._sparse, self._borrowed, self._lent_gradients):
            noted.clear()
        self._empty.clear()
        objects, leaves = optimizers_in(self._root())
        parameters = parameters_of(leaves)
        models = self._stepped_for(objects)
        own_parameters = {id(parameter): parameter for parameter in models.values()}
        for parameter in parameters:
            own = models.get(id(parameter), parameter)
            own_parameters[id(own)] = own
        # main parameters hang there, too, where the modules' are not stepped themselves
        gradients = gradients_of(own_parameters.values(), with_others=not models)
        of_gradients = _storages(gradients.values())
        of_modules = _storages(own_parameters.values()) | of_gradients
        if self.external is None:
            mains = main_parameters(parameters, models)
            yield from (owned for owned in mains if self._moves(owned, of_modules))
        seen = {*map(id, parameters), *gradients}
        in_groups = _storages(tensor for _, tensor in tensors_in_groups(leaves))
        for leaf in leaves:
            for owned in _state_of_framework(leaf):
                seen.add(id(owned.tensor))
                yield owned
            for name, key, group, tensor in state_of(leaf):
                if _shares_storage(tensor, of_gradients):
                    self._lent_gradients.add(tensor)
                if id(tensor) in seen or _shares_storage(tensor, in_groups):
                    continue
                seen.add(id(tensor))
                if is_sparse(tensor):
                    yield from self._sparse_state(name, tensor)
                    continue
                for owned in owned_parts(tensor, name):
                    stays = self._stays(leaf, key, group, owned.tensor)
                    if not stays and self._moves(owned, of_modules):
                        yield owned

    def _stays(
        self,
        leaf: Leaf,
        key: str,
        group: Mapping[str, Any],
        part: torch.Tensor,
    ) -> bool:
        """Whether a part of a state tensor stays on the CPU. torch's own step functions keep only
        counters there. Any other CPU state of theirs was created before the parameters came to the
        device, and must follow them. Other step functions may keep state on the CPU on purpose."""
        if self.external is not None or not part.is_cpu:
            return False
        if self.is_counter(leaf.optimizer, key, group, part):
            return True
        return not self.follows(leaf.optimizer) and part not in HANDED_BACK

    def _sparse_state(self, name: str, tensor: torch.Tensor) -> Iterator[Owned]:
        """Momentum of sparse gradients. It is transient like the gradients, because every step
        makes its storages anew."""
        self._sparse.add(tensor)
        for path, part in sparse_parts(tensor, name):
            if self.external is None and not self.hands_back:
                problem = problem_of_sparse(part, self.compute_device)
                if problem is not None:
                    raise RegistrationError(f"{self._name!r}: {name!r} {problem}.")
            yield Owned(path, part, True, tensor)

    def _moves(self, owned: Owned, storages: Container[int]) -> bool:
        """Whether a tensor is to be moved: it has bytes, and they are in none of these storages.
        Refuses one that cannot be moved. Of an external optimizer, whether it has bytes."""
        if self.external is not None:
            return has_bytes(owned.tensor)
        if not is_plain(owned.tensor, self.compute_device):
            if self.hands_back:
                return False
            raise RegistrationError(
                f"{self._name!r}: {owned.name!r} {problem_of(owned.tensor, self.compute_device)}."
            )
        if is_lazy_view(owned.tensor) and not self.hands_back:
            raise RegistrationError(f"{self._name!r}: {owned.name!r} {LAZY_VIEW}.")
        storage = owned.tensor.untyped_storage()
        has_elements = owned.tensor.numel() > 0
        # a rank without a part of a sharded parameter
        if storage._cdata in storages or (storage.nbytes() and not has_elements):
            self._borrowed.add(owned.tensor)
            return False
        if not has_elements:
            self._empty.append((owned.name, weakref.ref(owned.tensor)))
        return has_elements

    def borrowed(self) -> Iterator[torch.Tensor]:
        return iter(self._borrowed)

    def lent_gradients(self) -> set[int]:
        return _storages(self._lent_gradients)

    def stepped(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters():
            for _, part in plain_parts(parameter, ""):
                yield part

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        for framework in answering("optimizer_scalars"):
            for name, scalar in framework.optimizer_scalars(self.objects()):
                if scalar.device == self.compute_device:
                    yield name, scalar.nbytes

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.external is not None:
            return
        objects, leaves = optimizers_in(self._root())
        parameters = {id(parameter) for parameter in parameters_of(leaves)}
        moved = {id(owned.tensor) for owned in self._scan()}
        for name, tensor in tensors_beside(leaves, objects):
            if id(tensor) in parameters:
                continue
            for path, part in plain_parts(tensor, name):
                if id(part) not in moved and part.numel() > 1:
                    yield path, part

    def is_counter(
        self,
        optimizer: Any,
        key: str,
        group: Mapping[str, Any],
        value: object,
    ) -> bool:
        """Whether a value of the state is a counter that torch keeps on the CPU."""
        if key not in _ON_CPU_UNLESS_CAPTURED:
            return False
        if not isinstance(value, torch.Tensor) or value.dim():
            return False
        is_captured = group.get("fused") or group.get("capturable")
        return not is_captured and not isinstance(optimizer, torch.optim.ASGD)

    def follows(self, optimizer: Any) -> bool:
        """Whether state on the CPU, except counters, must move to where its parameters are."""
        step = getattr(type(optimizer), "step", None)
        is_of_torch = getattr(step, "__module__", "").startswith("torch.optim.")
        return is_of_torch or self.compute_device.type == "cpu"

    def objects(self) -> list[Any]:
        """The registered object, and all wrappers and optimizers found in it."""
        return optimizers_in(self._root())[0]

    def leaves(self) -> list[Leaf]:
        """The optimizers with a state of their own, inner ones first, with the path to each."""
        return optimizers_in(self._root())[1]

    def optimizers(self) -> list[Any]:
        """The optimizers of `leaves`."""
        return [leaf.optimizer for leaf in self.leaves()]

    def key_objects(self) -> Sequence[Any]:
        """The registered object, then the optimizers found in it; nothing if it was
        garbage-collected."""
        root = self._root()
        if root is None:
            return []
        return [root, *(optimizer for optimizer in self.optimizers() if optimizer is not root)]

    def follow(self, owners: Iterable[Adapter]) -> None:
        """Learn whose parameters are stepped. If a framework moves these modules and their state,
        the optimizer becomes external.

        Raises RegistrationError: it moves the state for some of them only.
        """
        reasons = []
        for owner in owners:
            by_framework = (framework.external for framework in owner.frameworks)
            reasons.append(next(filter(None, by_framework), None))
        if self.external is not None or not any(reasons):
            return
        if not all(reasons):
            raise RegistrationError(
                f"{self._name!r} steps parameters whose state a framework moves itself "
                f"({next(filter(None, reasons))}), and others. What to do: use an optimizer for "
                "each of the two, or register it with external=True to have it tracked and never "
                "moved."
            )
        self.external = reasons[0]

    def take_copies(self, copies: Iterable[torch.Tensor], copied: torch.Tensor) -> None:
        """Move stepped tensors that are no module's parameters (float32 copies) like state.
        `copied`: a parameter of their owner, any of them, which `parameters` lists in their place.
        """
        self._copied = reference(copied)
        self._copies.update(copies)

    @property
    def steps_copies(self) -> bool:
        return bool(self._copies)

    def _stepped_for(self, objects: Sequence[Any]) -> Mapping[int, torch.Tensor]:
        """The model's parameter for each main parameter or copy, by identity of the latter."""
        models = dict(stepped_for(objects))
        copied = self._copied()
        if copied is not None:
            for tensor in self._copies:
                models[id(tensor)] = copied
        return models

    def is_stand_in(self, parameter: torch.Tensor) -> bool:
        """Whether only a wrapper without state of its own lists a parameter, and so none of the
        optimizers inside steps it."""
        stepping = [leaf for leaf in self.leaves() if not leaf.is_hollow]
        return all(parameter is not stepped for stepped in parameters_of(stepping))

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters that are stepped, in their order; the module's own for main
        parameters and shards, and other ranks'."""
        objects, leaves = optimizers_in(self._root())
        flattened = list(itertools.chain.from_iterable(asked("flattened_parameters", objects)))
        if flattened:
            return flattened
        models = self._stepped_for(objects)
        parameters = [models.get(id(parameter), parameter) for parameter in parameters_of(leaves)]
        for further in asked("further_parameters", objects):
            parameters += further
        return list({id(parameter): parameter for parameter in parameters}.values())

    def away(self) -> str | None:
        return next(filter(None, asked("optimizer_away", self._root())), None)

    def state_is_all_born(self) -> bool:
        """Whether every optimizer found in the object has state, but for wrappers without a state
        of their own."""
        return all(is_born(leaf.optimizer) for leaf in self.leaves() if not leaf.is_hollow)

    def expected_sizes(self) -> Sequence[int] | None:
        """See `Adapter.expected_sizes`. None: LBFGS, ASGD, Adafactor, SparseAdam, and users' steps
        that need data."""
        self._unborn = ()
        if self.external is not None:
            return ()
        all_unborn = []
        objects, leaves = optimizers_in(self._root())
        models = self._stepped_for(objects)
        for leaf in leaves:
            optimizer = leaf.optimizer
            if is_all_born(optimizer, models):
                if not leaf.wraps:  # more parameters may come
                    all_unborn.append(Unborn(optimizer, {}, stepped_by(optimizer, models)))
                continue
            unborn = None
            if not leaf.wraps:
                unborn = unborn_state(optimizer, self.compute_device, models)
            if unborn is not None:
                all_unborn.append(unborn)
            elif not is_born(optimizer):
                return None
        self._unborn = tuple(all_unborn)
        return self.unborn_sizes()

    def unborn_sizes(self) -> Sequence[int]:
        return [*itertools.chain.from_iterable(map(Unborn.sizes, self._unborn))]

    def follow_param_groups(self) -> bool:
        def models() -> Mapping[int, torch.Tensor]:
            return self._stepped_for(self.objects())

        has_any = False
        for unborn in self._unborn:
            has_any |= unborn.follow(self.compute_device, models)
        return has_any

    def unborn_bytes_of(self, parameter: torch.Tensor) -> int:
        """Bytes of state that the first step of one parameter will create, as far as they could be
        predicted."""
        return sum([unborn.bytes_of(parameter) for unborn in self._unborn])

    def num_entries(self) -> int:
        return sum(unborn.num_entries for unborn in self._unborn)


def _state_of_framework(leaf: Leaf) -> Iterator[Owned]:
    """The state that a framework keeps for an optimizer in a form of its own."""
    state = own_state(leaf.optimizer)
    if state is not None:
        yield from state.tensors(leaf.path)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages (`_cdata`) of these tensors or, of wrappers, of their parts."""
    tensors = list(tensors)  # there may be tens of thousands, most of which are plain
    are_plain = {*map(type, tensors)} <= PLAIN_TYPES
    if are_plain and {*map(_LAYOUT, tensors)} <= {_STRIDED}:
        return {*map(_CDATA, map(torch.Tensor.untyped_storage, tensors))}
    storages = set()
    for tensor in tensors:
        for _, part in plain_parts(tensor, ""):
            storages.add(part.untyped_storage()._cdata)
    return storages


def _shares_storage(tensor: torch.Tensor, storages: set[int]) -> bool:
    return bool(storages) and not storages.isdisjoint(_storages((tensor,)))


def _refuse(name: str, objects: Sequence[object]) -> None:
    """Refuse an optimizer if it, or one inside it, keeps state where placement cannot find it or
    must not move it."""
    for obj in objects:
        for problem, advice in filter(None, asked("refuse_optimizer", obj)):
            raise refusal(
                f"{name!r}: {type(obj).__module__}.{type(obj).__qualname__}{problem}",
                "the optimizers of torch.optim and their like, and wrappers that hold them",
                f"{advice}, {TRACK}",
            )


def _external(
    objects: Sequence[object], parameters: Sequence[torch.Tensor], compute_device: torch.device
) -> str | None:
    """The reason why a framework itself moves an optimizer's state; None if it does not."""
    frameworks = answering("external_optimizers")
    for obj in objects:
        for framework in frameworks:
            for advised in framework.external_optimizers:
                if advised.is_about(obj):
                    return advised.advice
    return next(filter(None, asked("places_state_of", parameters, compute_device)), None)


def _holds_optimizers(objects: Sequence[object]) -> bool:
    return any(itertools.chain.from_iterable(map(partial(asked, "holds_optimizers"), objects)))


def main_parameters(
    stepped: Iterable[torch.Tensor], models: Mapping[int, torch.Tensor]
) -> Iterator[Owned]:
    """The main parameters (those in `models`, by identity) among the stepped tensors, named by
    their index, and their gradients."""
    if not models:
        return
    # A shard of a float32 parameter is a view, not a leaf of autograd; torch warns about reading
    # its `.grad` before the first step.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        mains = []
        for index, main in enumerate(stepped):
            if id(main) in models:
                gradients = [(name, getattr(main, name, None)) for name in _GRADIENTS]
                mains.append((index, main, gradients))
    for index, main, gradients in mains:
        yield from owned_parts(main, f"main.{index}")
        for name, gradient in gradients:
            if gradient is not None:
                yield from owned_parts(gradient, f"main.{index}.{name}", transient=True)


def gradients_of(
    parameters: Iterable[torch.Tensor], *, with_others: bool = False
) -> dict[int, torch.Tensor]:
    """The gradients of modules' parameters (`grad` and `main_grad`), and optionally all other
    tensors in their attributes, by identity."""
    candidates = []
    for parameter in parameters:
        if is_leaf(parameter):
            candidates.append(parameter.grad)
        candidates.append(getattr(parameter, "main_grad", None))
        if with_others and is_plain_type(type(parameter)):
            for _, tensor in nested_tensors(vars(parameter), "", OBJECT_LEVELS):
                candidates.append(tensor)
    return {id(tensor): tensor for tensor in candidates if isinstance(tensor, torch.Tensor)}
