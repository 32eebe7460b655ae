"""The state tensors of an optimizer, and of the optimizers that a wrapper holds."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core.errors import RegistrationError
from placement.frameworks.known import answering, holds_optimizers, optimizer_scalars, own_state, stepped_for
from placement.ownership.detect import external_optimizer, refuse_optimizer
from placement.ownership.leaves import WRAPPING, Leaf, find, is_all_born, is_born, parameters_of, state_of, wrapper_of
from placement.ownership.main_parameters import main_parameters, storages_of
from placement.ownership.twin import Unborn, unborn_state
from placement.tensors.owned import Adapter, Owned, Seen
from placement.tensors.plain import is_plain, parts_of, plain_parts, problem_of, reference, with_index
from placement.tensors.sparse import is_sparse, problem_of_sparse, sparse_parts
from placement.tensors.steady import SteadyState

_ON_CPU_UNLESS_CAPTURED = frozenset({"step", "mu_product"})


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
        self._steady: SteadyState | None = None
        self._borrowed: list[weakref.ref[torch.Tensor]] = []
        """Tensors of the last walk that lie in storages of the modules: a main parameter, a view of a parameter in the state."""
        self._sparse: list[weakref.ref[torch.Tensor]] = []
        """Sparse state, as of the last walk."""
        self._unborn: tuple[Unborn, ...] = ()
        """As far as it could be told at the last `expected_sizes`."""
        self._root: Callable[[], Any] = reference(optimizer)
        objects, leaves = find(optimizer)
        is_optimizer = bool(leaves) or any(map(holds_optimizers, objects))
        is_scheduler = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
        if not is_optimizer or is_scheduler or not callable(getattr(optimizer, "step", None)):
            raise RegistrationError(
                f"{name!r}: {type(optimizer).__module__}.{type(optimizer).__qualname__} is no optimizer and holds none that can be found, "
                "and it is no module and no engine. "
                f"Supported: torch.optim.Optimizer, objects that hold such in {', '.join('.' + attribute for attribute in WRAPPING)}, "
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
        found = list(self._walk())
        self._steady = self._as_steady(found)
        return iter(found)

    def unchanged(self) -> Seen | None:
        return None if self._steady is None else self._steady.look([leaf.optimizer for leaf in self._leaves()])

    def _as_steady(self, owned: Sequence[Owned]) -> SteadyState | None:
        """What is remembered of a walk; None where the next one must be a whole one again."""
        objects, leaves = self._look()
        optimizers = [leaf.optimizer for leaf in leaves]
        if self._external is not None or any(map(holds_optimizers, objects)) or not SteadyState.fits(optimizers):
            return None
        staying = {id(value): value for each in optimizers for entry in each.state.values() for value in entry.values()}
        if any(each.wrapper is not None or staying.pop(id(each.tensor), None) is None for each in owned):
            return None
        # What is not ours for another reason than that it is a counter may become so.
        if not all(value.is_cpu and value.dim() == 0 for value in staying.values() if isinstance(value, torch.Tensor)):
            return None
        return SteadyState(optimizers, [each.tensor for each in owned])

    def _walk(self) -> Iterator[Owned]:
        self._sparse, self._borrowed = [], []
        objects, leaves = self._look()
        parameters = parameters_of(leaves)
        models = stepped_for(objects)
        seen = {id(parameter) for parameter in parameters}
        theirs = {id(own): own for own in (models.get(id(each), each) for each in parameters)}.values()
        storages = {part.untyped_storage()._cdata for each in theirs for _, part in plain_parts(each, "")}
        if models and self._external is None:
            storages |= storages_of(models.values())
            for main in main_parameters(parameters, models):
                yield from self._plain(main, storages)
        for leaf in leaves:
            if (own := own_state(leaf.optimizer)) is not None:
                for held in own.tensors(leaf.path):
                    seen.add(id(held.tensor))
                    yield held
            for name, key, group, tensor in state_of(leaf):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if is_sparse(tensor):
                    yield from self._sparse_state(name, tensor)
                    continue
                if self._external is not None:
                    yield from (Owned(path, part, wrapper=wrapper_of(tensor, part)) for path, part in plain_parts(tensor, name))
                    continue
                for path, part in parts_of(tensor, name):
                    if not (part.is_cpu and self._stays_on_cpu(leaf.optimizer, key, group, part)):
                        yield from self._plain(Owned(path, part, wrapper=wrapper_of(tensor, part)), storages)

    def _sparse_state(self, name: str, tensor: torch.Tensor) -> Iterator[Owned]:
        """Momentum of sparse gradients: every step makes its storages anew, so it is as loose as these."""
        self._sparse.append(weakref.ref(tensor))
        for path, part in sparse_parts(tensor, name):
            if self._external is None and (problem := problem_of_sparse(part, self._device)) is not None:
                raise RegistrationError(f"{self._name!r}: {name!r} {problem}.")
            yield Owned(path, part, True, tensor)

    def sparse(self) -> Iterator[torch.Tensor]:
        return (tensor for tensor in (alive() for alive in self._sparse) if tensor is not None)

    def _plain(self, owned: Owned, storages: Container[int]) -> Iterator[Owned]:
        """A tensor that can be moved as bytes; nothing where it has none, or has them in one of these storages."""
        if not is_plain(owned.tensor, self._device):
            raise RegistrationError(f"{self._name!r}: {owned.name!r} {problem_of(owned.tensor, self._device)}.")
        if not owned.tensor.numel():
            return
        if owned.tensor.untyped_storage()._cdata in storages:
            self._borrowed.append(weakref.ref(owned.tensor))
        else:
            yield owned

    def borrowed(self) -> Iterator[torch.Tensor]:
        return (tensor for tensor in (alive() for alive in self._borrowed) if tensor is not None)

    def stepped(self) -> Iterator[torch.Tensor]:
        return (part for parameter in self.parameters() for _, part in plain_parts(parameter, ""))

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        return ((name, scalar.nbytes) for name, scalar in optimizer_scalars(self._look()[0]) if scalar.device == self._device)

    def _stays_on_cpu(self, optimizer: Any, key: str, group: Mapping[str, Any], tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor of the state is there by right.

        torch's own step functions keep nothing but counters on the CPU: any other CPU state of theirs was born before the
        parameters came to the device, and has to follow them. What foreign step functions keep there is their affair.
        """
        return self.is_counter(optimizer, key, group, tensor) or not self.follows(optimizer)

    def is_counter(self, optimizer: Any, key: str, group: Mapping[str, Any], value: object) -> bool:
        """Whether a value of the state is a counter that torch keeps on the CPU."""
        if not isinstance(value, torch.Tensor) or group.get("fused") or group.get("capturable"):
            return False
        return value.dim() == 0 and key in _ON_CPU_UNLESS_CAPTURED and not isinstance(optimizer, torch.optim.ASGD)

    def follows(self, optimizer: Any) -> bool:
        """Whether state of an optimizer that lies on the CPU goes where its parameters are, counters apart."""
        step = getattr(type(optimizer), "step", None)
        return self._device.type == "cpu" or getattr(step, "__module__", "").startswith("torch.optim.")

    def optimizers(self) -> list[Any]:
        """The optimizers with a state of their own, inner ones before what wraps them."""
        return [leaf.optimizer for leaf in self._leaves()]

    def key_objects(self) -> Sequence[Any]:
        """The registered object, then the optimizers found in it; nothing when it is gone."""
        root = self._root()
        if root is None:
            return []
        return [root, *(leaf.optimizer for leaf in self._leaves() if leaf.optimizer is not root)]

    @property
    def external(self) -> str | None:
        return self._external

    def follow(self, owners: Iterable[Adapter]) -> None:
        """Learn whose parameters are stepped: where a framework places these, their state may be its affair too.

        Raises:
            RegistrationError: for some of the modules it is, for others not.
        """
        reasons = [owner.external_state for owner in owners]
        if self._external is not None or not any(reasons):
            return
        if not all(reasons):
            raise RegistrationError(
                f"{self._name!r} steps parameters whose state a framework places ({next(filter(None, reasons))}) and others. What to do: "
                "an optimizer for each, or external=True to have it tracked and never moved."
            )
        self._external = reasons[0]

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters that the optimizer steps, in the order of the optimizers and their groups.

        Of a main parameter or a shard the module's own; of an optimizer that is sharded over ranks also those that other ranks step.
        """
        objects, leaves = self._look()
        flattened = [own for each in answering("flattened_parameters") for own in each.flattened_parameters(objects)]
        if flattened:
            return flattened
        models = stepped_for(objects)
        further = (own for each in answering("further_parameters") for own in each.further_parameters(objects))
        known = itertools.chain((models.get(id(each), each) for each in parameters_of(leaves)), further)
        return list({id(own): own for own in known}.values())

    def away(self) -> str | None:
        root = self._root()
        return next((reason for each in answering("optimizer_away") if (reason := each.optimizer_away(root)) is not None), None)

    def state_is_born(self) -> bool:
        """Whether any optimizer found in the object has state: true from the first step, or from the constructor (Adagrad)."""
        return any(is_born(leaf.optimizer) for leaf in self._leaves())

    def state_is_all_born(self) -> bool:
        """Whether every optimizer found in the object has state."""
        return all(is_born(leaf.optimizer) for leaf in self._leaves())

    def expected_sizes(self) -> Sequence[int] | None:
        """Bytes of each storage that steps have still to create, in parameter order; empty once all state is born.

        None when it cannot be told: LBFGS, ASGD, Adafactor, SparseAdam, and steps of users that need data.
        """
        self._unborn = ()
        if self._external is not None:
            return ()
        found: list[Unborn] = []
        objects, leaves = self._look()
        given = stepped_for(objects)
        for leaf in leaves:
            if is_all_born(leaf.optimizer, given):
                continue
            unborn = None if leaf.wraps else unborn_state(leaf.optimizer, self._device, given)
            if unborn is not None:
                found.append(unborn)
            elif not is_born(leaf.optimizer):
                return None
        self._unborn = tuple(found)
        return self.unborn_sizes()

    def unborn_sizes(self) -> Sequence[int]:
        return [size for unborn in self._unborn for size in unborn.sizes()]

    def num_entries(self) -> int:
        return sum(unborn.num_entries for unborn in self._unborn)

    def _leaves(self) -> list[Leaf]:
        return self._look()[1]

    def _look(self) -> tuple[list[Any], list[Leaf]]:
        root = self._root()
        return find(root) if root is not None else ([], [])
