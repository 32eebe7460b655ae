"""The state tensors of an optimizer, or of the optimizers inside a wrapper."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet, reference
from placement.frameworks.base import answering, asked, own_state, stepped_for
from placement.ownership.adapter import HANDED_BACK, TRACK, Adapter, Seen, SteadyState, refusal
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

_LAYOUT = operator.attrgetter("layout", "is_nested")
_GRADIENTS = ("grad", "decoupled_grad")
_ON_CPU_UNLESS_CAPTURED = frozenset({"step", "mu_product"})


class OptimizerAdapter(Adapter):
    """The state of an optimizer: all tensors that it, and the optimizers inside it, have in
    `.state`, also in containers and objects.

    Optimizers inside a wrapper are looked for each time. The registered object is held weakly.

    These tensors stay on the CPU: those in `param_groups` (a learning rate), and counters that
    torch keeps there (0-dimensional `step`, unless fused or capturable). If the optimizer's `step`
    is not torch's own, all state that it put on the CPU stays there. Raises RegistrationError: no
    optimizer was found, or its state or a tensor of it cannot be moved.
    """

    kind = "optimizer"
    steady: SteadyState | None = None

    def __init__(
        self, optimizer: Any, *, name: str, compute_device: torch.device, external: bool = False
    ) -> None:
        self._name = name
        self.compute_device = with_index(compute_device)
        self._borrowed: WeakIdSet[torch.Tensor] = WeakIdSet()
        """Tensors of the last walk that lie in storages of the modules: a main parameter, a view of
        a parameter in the state."""
        self._sparse: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._lent_gradients: WeakIdSet[torch.Tensor] = WeakIdSet()
        """State tensors of the last walk that are the modules' gradients, or lie in their
        storages."""
        # state still to be created, as far as the last `expected_sizes` could predict it
        self._unborn: tuple[Unborn, ...] = ()
        # stepped tensors that are no module's parameters (see `take_copies`)
        self._copies: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._copied: Callable[[], torch.Tensor | None] = lambda: None
        self._root: Callable[[], Any] = reference(optimizer)
        objects, leaves = optimizers_in(optimizer)
        is_scheduler = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
        if (
            is_scheduler
            or not (leaves or _holds_optimizers(objects))
            or not callable(getattr(optimizer, "step", None))
        ):
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
        self.external = (
            ("the caller says so (external=True)")
            if external
            else _external(objects, parameters, self.compute_device)
        )
        if self.external is None:
            _refuse(name, objects)
            for index, part in (
                (index, part)
                for index, each in enumerate(parameters)
                for _, part in parts_of(each, "")
            ):
                if (problem := problem_of(part, self.compute_device)) is not None:
                    raise RegistrationError(f"{name!r}: parameter {index} {problem}.")

    def owned(self) -> Iterator[Owned]:
        """Every state tensor once, by parameter and key, under its name in `state_dict()`
        ("state.3.exp_avg") after the optimizer's path. What shares a storage with a parameter is
        the module's. Raises RegistrationError: state that cannot be moved."""
        found = list(self._walk())
        self.steady = self._as_steady(found)
        return iter(found)

    def unchanged(self) -> Seen | None:
        return (
            None
            if self.steady is None
            else self.steady.look([leaf.optimizer for leaf in optimizers_in(self._root())[1]])
        )

    def _as_steady(self, owned: Sequence[Owned]) -> SteadyState | None:
        """A record of a walk, to see quickly that nothing has changed. None if the next walk must
        look at everything again."""
        objects, leaves = optimizers_in(self._root())
        optimizers = [leaf.optimizer for leaf in leaves]
        if (
            self.external is not None
            or self.hands_back
            or _holds_optimizers(objects)
            or not SteadyState.fits(optimizers)
        ):
            return None
        # it becomes the optimizer's own when the modules drop it
        is_lent = any(True for _ in self._lent_gradients)
        values = {
            *map(
                id,
                itertools.chain.from_iterable(
                    entry.values() for each in optimizers for entry in each.state.values()
                ),
            )
        }
        tensors = [each.tensor for each in owned]
        is_loose = (
            is_lent
            or any(each.wrapper is not None for each in owned)
            or not values.issuperset(map(id, tensors))
        )
        steady = None if is_loose else SteadyState(optimizers, tensors)
        return steady if steady is not None and steady.leaves_numbers_alone else None

    def _walk(self) -> Iterator[Owned]:
        for noted in (self._sparse, self._borrowed, self._lent_gradients):
            noted.clear()
        self._with_scalars = answering("optimizer_scalars")
        objects, leaves = optimizers_in(self._root())
        parameters = parameters_of(leaves)
        models = self._stepped_for(objects)
        theirs = {
            id(own): own
            for own in (*models.values(), *(models.get(id(each), each) for each in parameters))
        }.values()
        # main parameters hang there, too, where the modules' are not stepped themselves
        gradients = gradients_of(theirs, with_others=not models)
        seen = {*map(id, parameters), *gradients}
        of_gradients = _storages(gradients.values())
        storages = _storages(theirs) | of_gradients
        mains = main_parameters(parameters, models) if self.external is None else ()
        yield from (each for each in mains if self._moves(each, storages))
        in_groups = _storages(tensor for _, tensor in tensors_in_groups(leaves))
        for leaf in leaves:
            if (own := own_state(leaf.optimizer)) is not None:
                for held in own.tensors(leaf.path):
                    seen.add(id(held.tensor))
                    yield held
            for name, key, group, tensor in state_of(leaf):
                if of_gradients and not of_gradients.isdisjoint(_storages((tensor,))):
                    self._lent_gradients.add(tensor)
                if id(tensor) in seen or (
                    in_groups and not in_groups.isdisjoint(_storages((tensor,)))
                ):
                    continue
                seen.add(id(tensor))
                if is_sparse(tensor):
                    yield from self._sparse_state(name, tensor)
                    continue
                for each in owned_parts(tensor, name):
                    if not self._stays(leaf, key, group, each.tensor) and self._moves(
                        each, storages
                    ):
                        yield each

    def _stays(self, leaf: Leaf, key: str, group: Mapping[str, Any], part: torch.Tensor) -> bool:
        """Whether a part of a state tensor stays on the CPU. torch's own step functions keep only
        counters there. Any other CPU state of theirs was created before the parameters came to the
        device, and must follow them. Other step functions may keep state on the CPU on purpose."""
        may_stay = self.external is None and part.is_cpu
        return may_stay and (
            self.is_counter(leaf.optimizer, key, group, part)
            or not (self.follows(leaf.optimizer) or part in HANDED_BACK)
        )

    def _sparse_state(self, name: str, tensor: torch.Tensor) -> Iterator[Owned]:
        """Momentum of sparse gradients. It is transient like the gradients, because every step
        makes its storages anew."""
        self._sparse.add(tensor)
        for path, part in sparse_parts(tensor, name):
            if (
                self.external is None
                and not self.hands_back
                and (problem := problem_of_sparse(part, self.compute_device)) is not None
            ):
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
        storage, has_elements = owned.tensor.untyped_storage(), owned.tensor.numel() > 0
        # a rank without a part of a sharded parameter
        if storage._cdata in storages or (storage.nbytes() and not has_elements):
            self._borrowed.add(owned.tensor)
            return False
        return has_elements

    def borrowed(self) -> Iterator[torch.Tensor]:
        return iter(self._borrowed)

    def lent_gradients(self) -> set[int]:
        return _storages(self._lent_gradients)

    def stepped(self) -> Iterator[torch.Tensor]:
        return (part for parameter in self.parameters() for _, part in plain_parts(parameter, ""))

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        scalars = itertools.chain.from_iterable(
            each.optimizer_scalars(self.objects()) for each in self._with_scalars
        )
        return (
            (name, scalar.nbytes)
            for name, scalar in scalars
            if scalar.device == self.compute_device
        )

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        objects, leaves = optimizers_in(self._root())
        steps = {id(each) for each in parameters_of(leaves)}
        moved = {id(each.tensor) for each in self._walk()} if self.external is None else {}
        for name, tensor in tensors_beside(leaves, objects) if self.external is None else ():
            if id(tensor) not in steps:
                yield from (
                    (path, part)
                    for path, part in plain_parts(tensor, name)
                    if id(part) not in moved and part.numel() > 1
                )

    def is_counter(self, optimizer: Any, key: str, group: Mapping[str, Any], value: object) -> bool:
        """Whether a value of the state is a counter that torch keeps on the CPU."""
        is_number = (
            key in _ON_CPU_UNLESS_CAPTURED and isinstance(value, torch.Tensor) and not value.dim()
        )
        return is_number and not (
            group.get("fused") or group.get("capturable") or isinstance(optimizer, torch.optim.ASGD)
        )

    def follows(self, optimizer: Any) -> bool:
        """Whether state on the CPU, except counters, must move to where its parameters are."""
        step = getattr(type(optimizer), "step", None)
        return self.compute_device.type == "cpu" or getattr(step, "__module__", "").startswith(
            "torch.optim."
        )

    def objects(self) -> list[Any]:
        """The registered object, and all wrappers and optimizers found in it."""
        return optimizers_in(self._root())[0]

    def leaves(self) -> list[Leaf]:
        """The optimizers with a state of their own, inner ones first, with the path to each."""
        return optimizers_in(self._root())[1]

    def optimizers(self) -> list[Any]:
        """The optimizers of `leaves`."""
        return [leaf.optimizer for leaf in optimizers_in(self._root())[1]]

    def key_objects(self) -> Sequence[Any]:
        """The registered object, then the optimizers found in it; nothing if it was
        garbage-collected."""
        root = self._root()
        return (
            []
            if root is None
            else [root, *(each for each in self.optimizers() if each is not root)]
        )

    def follow(self, owners: Iterable[Adapter]) -> None:
        """Learn whose parameters are stepped. If a framework moves these modules and their state,
        the optimizer becomes external.
        Raises RegistrationError: it moves the state for some of them only."""
        reasons = [
            next(filter(None, (each.external for each in owner.frameworks)), None)
            for owner in owners
        ]
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
        `copied`: a parameter of their owner."""
        self._copied = reference(copied)
        for each in copies:
            self._copies.add(each)

    @property
    def steps_copies(self) -> bool:
        return any(True for _ in self._copies)

    def _stepped_for(self, objects: Sequence[Any]) -> Mapping[int, torch.Tensor]:
        """The model's parameter for each main parameter or copy, by identity of the latter."""
        own = self._copied()
        return {
            **stepped_for(objects),
            **({} if own is None else {id(each): own for each in self._copies}),
        }

    def is_stand_in(self, parameter: torch.Tensor) -> bool:
        """Whether only a wrapper without state of its own lists a parameter, and so none of the
        optimizers inside steps it."""
        return all(
            each is not parameter
            for each in parameters_of([leaf for leaf in self.leaves() if not leaf.is_hollow])
        )

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters that are stepped, in their order; the module's own for main
        parameters and shards, and other ranks'."""
        objects, leaves = optimizers_in(self._root())
        if flattened := list(itertools.chain.from_iterable(asked("flattened_parameters", objects))):
            return flattened
        models = self._stepped_for(objects)
        known = itertools.chain(
            (models.get(id(each), each) for each in parameters_of(leaves)),
            *asked("further_parameters", objects),
        )
        return list({id(own): own for own in known}.values())

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
        found: list[Unborn] = []
        objects, leaves = optimizers_in(self._root())
        given = self._stepped_for(objects)
        for leaf in leaves:
            if is_all_born(leaf.optimizer, given):
                if not leaf.wraps:  # more parameters may come
                    found.append(Unborn(leaf.optimizer, {}, stepped_by(leaf.optimizer, given)))
                continue
            unborn = (
                None if leaf.wraps else unborn_state(leaf.optimizer, self.compute_device, given)
            )
            if unborn is not None:
                found.append(unborn)
            elif not is_born(leaf.optimizer):
                return None
        self._unborn = tuple(found)
        return self.unborn_sizes()

    def unborn_sizes(self) -> Sequence[int]:
        return [*itertools.chain.from_iterable(map(Unborn.sizes, self._unborn))]

    def follow_param_groups(self) -> bool:
        def models() -> Mapping[int, torch.Tensor]:
            return self._stepped_for(self.objects())

        # a list: each must be asked
        return True in [unborn.follow(self.compute_device, models) for unborn in self._unborn]

    def unborn_bytes_of(self, parameter: torch.Tensor) -> int:
        """Bytes of state that the first step of one parameter will create, as far as they could be
        predicted."""
        return sum([unborn.bytes_of(parameter) for unborn in self._unborn])

    def num_entries(self) -> int:
        return sum(unborn.num_entries for unborn in self._unborn)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages (`_cdata`) of these tensors or, of wrappers, of their parts."""
    found = list(tensors)  # there may be tens of thousands, most of which are plain
    if {*map(type, found)} <= PLAIN_TYPES and {*map(_LAYOUT, found)} <= {(torch.strided, False)}:
        return {*map(operator.attrgetter("_cdata"), map(torch.Tensor.untyped_storage, found))}
    return {part.untyped_storage()._cdata for each in found for _, part in plain_parts(each, "")}


def _refuse(name: str, objects: Sequence[object]) -> None:
    """Refuse an optimizer if it, or one inside it, keeps state where placement cannot find it or
    must not move it."""
    for obj in objects:
        for reason in filter(None, asked("refuse_optimizer", obj)):
            found = f"{name!r}: {type(obj).__module__}.{type(obj).__qualname__}{reason[0]}"
            supported = "the optimizers of torch.optim and their like, and wrappers that hold them"
            raise refusal(found, supported, f"{reason[1]}, {TRACK}")


def _external(
    objects: Sequence[object], parameters: Sequence[torch.Tensor], compute_device: torch.device
) -> str | None:
    """The reason why a framework itself moves an optimizer's state; None if it does not."""
    known = [
        advised for each in answering("external_optimizers") for advised in each.external_optimizers
    ]
    for obj in objects:
        if (
            reason := next((advised.advice for advised in known if advised.is_about(obj)), None)
        ) is not None:
            return reason
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
        found = [
            (index, main, [(name, getattr(main, name, None)) for name in _GRADIENTS])
            for index, main in enumerate(stepped)
            if id(main) in models
        ]
    for index, main, gradients in found:
        yield from owned_parts(main, f"main.{index}")
        for name, gradient in gradients:
            if gradient is not None:
                yield from owned_parts(gradient, f"main.{index}.{name}", transient=True)


def gradients_of(
    parameters: Iterable[torch.Tensor], *, with_others: bool = False
) -> dict[int, torch.Tensor]:
    """The gradients of modules' parameters (`grad` and `main_grad`), and optionally all other
    tensors in their attributes, by identity."""
    found: list[Any] = []
    for each in parameters:
        found += (each.grad if is_leaf(each) else None, getattr(each, "main_grad", None))
        if with_others and is_plain_type(type(each)):
            found += (tensor for _, tensor in nested_tensors(vars(each), "", OBJECT_LEVELS))
    return {id(each): each for each in found if isinstance(each, torch.Tensor)}
