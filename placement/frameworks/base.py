# ruff: noqa: ARG003 (default answers ignore their arguments)
"""The contract of a training framework. One class contains everything that placement knows about
one framework.

To support a new framework, write a subclass of `Framework` in a file of its own. placement finds it
in the list of this folder's `__init__`, in an entry point of the group `placement.frameworks`, or
after `add(cls)`.

placement moves the memory behind a module's tensors; tensor objects, addresses and aliases stay, so
that wrappers notice nothing. Therefore a framework class answers few questions: which tensors a
walk of the module does not find, and what must be undone before a move. Class attributes and class
methods describe the framework's classes, wherever they occur. An instance describes one module
tree.

Name the framework's classes with `Named`, and do not import them: `Named` finds a class only if its
package is imported already.
"""

from __future__ import annotations

import abc
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from inspect import getattr_static
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch

from placement.core.errors import RegistrationError
from placement.tensors import plain
from placement.tensors.plain import Owned, is_a, loaded_class

if TYPE_CHECKING:
    from placement.frameworks.weights import Weight


class Named(NamedTuple):
    """The module and the name of a framework's class, to find it without importing it."""

    module: str
    name: str

    def is_of(self, obj: object) -> bool:
        """Whether an object is an instance of the class. False while the framework is not
        imported."""
        return is_a(obj, self.module, self.name)


class Wrapper(NamedTuple):
    """A module class that only wraps another module, and so adds a level to its parameters'
    names."""

    cls: Named
    inner: str  # the attribute name of the wrapped submodule


class Advised(NamedTuple):
    """A class, and a text about its instances: a reason or advice, see the attribute that lists it.
    `when`: which instances are meant; None: all."""

    cls: Named
    advice: str
    when: Callable[[Any], bool] | None = None

    def is_about(self, obj: object) -> bool:
        return self.cls.is_of(obj) and (self.when is None or self.when(obj))


Reading = str | Callable[[Any, tuple[Any, ...], dict[str, Any]], str | None]
"""The end of an error about an offloaded object: it cannot be "merged with its adapters". Or a
function that returns this text for a call: it is given the object and the arguments, and returns
None for a call that needs no tensor."""
READ: Reading = "read by its framework"


class OwnState(abc.ABC):
    """Access to the state of an optimizer that does not keep all of it in `optimizer.state`, for
    moves and for checkpoints."""

    @abc.abstractmethod
    def tensors(self, path: str) -> Iterator[Owned]:
        """The tensors that the optimizer holds outside its `state`, under names that begin with
        `path`."""

    @abc.abstractmethod
    def exported(self) -> Mapping[Any, Mapping[str, Any]]:
        """The state by parameter, in the same order on every rank. Its tensors are the optimizer's
        own, not copies."""

    @abc.abstractmethod
    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a parameter group to save in a checkpoint."""

    @abc.abstractmethod
    def problems(
        self, states: Mapping[Any, Mapping[str, Any]]
    ) -> Iterator[tuple[torch.Tensor, str]]:
        """Each parameter whose state in `states` does not fit, with the reason."""

    @abc.abstractmethod
    def restore(
        self,
        states: Mapping[Any, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Load state in the form of `exported`, and the settings of each parameter group."""


class Framework:
    """One framework. An instance describes the framework's part in one module tree, which it refers
    to only weakly.

    Every method must read the module again, because a wrapper may change its tensors between two
    calls. After the module was garbage-collected, every method gives an empty answer.

    Example:
        ::

            class MyWrapper(Framework):
                packages = ("my_wrapper",)
                recognised_by = (Named("my_wrapper.module", "Wrapped"),)

                def tensors(self):
                    for path, module in self.parts(*self.recognised_by):
                        yield Owned(f"{path}flat_buffer", module.state.flat_buffer)
    """

    # --- about the framework's classes, wherever they occur

    packages: ClassVar[Sequence[str]] = ("torch",)
    """The framework is asked nothing while none of these packages or modules is imported."""
    recognised_by: ClassVar[Sequence[Named]] = ()
    """Module classes. The framework has a part in each module tree with one of them: see `find`."""
    wrappers: ClassVar[Sequence[Wrapper]] = ()
    """Wrapper modules. Their level is left out of published names."""
    refused_modules: ClassVar[Sequence[Advised]] = ()
    """Modules that cannot be registered, with advice."""
    external_optimizers: ClassVar[Sequence[Advised]] = ()
    """Optimizers whose state the framework itself moves, with the reason to show. They are tracked
    and never moved."""
    with_own_export: ClassVar[Sequence[Named]] = ()
    """Modules that are sharded in a way that torch cannot gather. Only the framework's own export
    can publish them."""
    carriers: ClassVar[Sequence[Named]] = ()
    """Tensor subclasses that keep their bytes in the tensor's own storage, like a plain tensor."""
    hangs_tensors: ClassVar[bool] = False
    """Whether the framework keeps tensors in attributes of parameters. Then only `tensors()` says
    which of them are the module's; else all of them are."""

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        """The reason why a module of a tree cannot be moved, as two texts: the problem, and the
        advice. None if it can be moved."""
        return None

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        """The reason why an optimizer's state cannot be moved, as two texts: the end of a phrase
        that begins with its class name, and the advice. None if it can be moved."""
        return None

    @classmethod
    def places_state_of(
        cls, parameters: Sequence[torch.Tensor], compute_device: torch.device
    ) -> str | None:
        """The reason why the framework itself moves the state of any optimizer of these parameters;
        None if it does not."""
        return None

    @classmethod
    def holds_optimizers(cls, obj: object) -> bool:
        """Whether an object is a wrapper for optimizers, even if it holds none now (on a rank with
        nothing to step)."""
        return False

    @classmethod
    def own_state(cls, optimizer: object) -> OwnState | None:
        """Access to the hidden state of an optimizer; None if all of it is in `optimizer.state`.

        placement does not look for further optimizers inside an optimizer that has an answer here.
        """
        return None

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        """The model's parameter for each main parameter (a shard or copy that an optimizer steps
        instead), by identity of the latter.

        Args:
            objects: the registered optimizer and every object found in it.
        """
        return {}

    @classmethod
    def flattened_parameters(cls, objects: Sequence[object]) -> Sequence[torch.Tensor]:
        """The model's parameters, if these optimizers step flattened copies of them; else empty."""
        return ()

    @classmethod
    def further_parameters(cls, objects: Sequence[object]) -> Iterator[torch.Tensor]:
        """The model's parameters that belong to these optimizers but are stepped on other ranks."""
        return iter(())

    @classmethod
    def optimizer_tables(cls, optimizer: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of tables that an optimizer shares among the state of its parameters and
        keeps outside `optimizer.state`."""
        return iter(())

    @classmethod
    def optimizer_scalars(cls, objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of small values that these optimizers always keep on the device (loss
        scales, overflow flags)."""
        return iter(())

    @classmethod
    def optimizer_away(cls, optimizer: object) -> str | None:
        """The reason why an optimizer cannot step now, because the framework itself offloaded its
        state, with advice. None if it can."""
        return None

    @classmethod
    def reading_methods(cls, obj: object) -> Sequence[str] | Mapping[str, Reading]:
        """Names of methods of a module or optimizer that read or write its tensors without calling
        any hook of torch. They are refused while it is offloaded. With each name may go a text for
        the error."""
        return ()

    @classmethod
    def reading_methods_of_root(cls) -> Mapping[str, Reading]:
        """The same for every registered module of any class: methods by which functions of the
        framework read a module before they change it."""
        return {}

    # --- about one module tree

    def __init__(self, root: torch.nn.Module) -> None:
        # returns the root of the module tree; None once it is gone
        self.root: Callable[[], torch.nn.Module | None] = weakref.ref(root)

    def parts(self, *classes: Named) -> Iterator[tuple[str, Any]]:
        """Path prefix ("" or "layer.") and module, for each part of the module tree that is of one
        of these classes."""
        named = (loaded_class(*cls) for cls in classes)
        loaded = tuple(cls for cls in named if cls is not None)
        root = self.root() if loaded else None
        if root is None:
            return
        for path, part in root.named_modules():
            if isinstance(part, loaded):
                yield (f"{path}." if path else ""), part

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        """An instance for a module tree; None if the framework has no part in it.

        By default, it has one if there is a module of `recognised_by`. Recognise it by instances of
        its classes (without importing them), never by the spelling of names.
        """
        return cls(root) if any(Framework(root).parts(*cls.recognised_by)) else None

    def refusal(self, compute_device: torch.device) -> str | None:
        """The reason why the module cannot be moved as the framework configured it, with advice;
        None if it can."""
        return None

    @property
    def external(self) -> str | None:
        """The reason why the framework itself moves the module's bytes, and the state of the
        optimizers that step it, so that placement must not; None if it does not."""
        return None

    def ready(self) -> None:
        """Free the tensors that were gathered for computing (reshard), before an offload.

        Called before tensors are listed for an offload, with the device synchronised, outside
        inference mode and under `no_grad`. Must be idempotent, and must not call a collective.
        """

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        """The module's permanent tensor for each tensor that it shows only for now (an unsharded
        parameter), by identity of the latter."""
        return {}

    def tensors(self) -> Iterator[Owned]:
        """Own tensors of the module that a scan of its parameters, buffers and attributes does not
        find."""
        return iter(())

    def replaced(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of tensors that the framework still computes with although the module has
        other tensors in their place.

        This happens if a parameter is replaced without telling the framework. `ready()` repairs
        this where possible.
        """
        return iter(())

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors among `tensors()` that are gradients not reduced yet, and so not in the
        `.grad` of a parameter."""
        return iter(())

    def drop_unreduced(self) -> None:
        """Drop the gradients of `unreduced_gradients()`."""

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Permanent tensors that contain only gradients (transient in `tensors()`). To drop the
        gradients, they are set to zero."""
        return iter(())

    @property
    def gathers(self) -> str | None:
        """The reason why the module's `state_dict()` gathers values on the device, so that it
        cannot read the host copy; None if not."""
        return None

    def caches(self) -> Iterator[torch.Tensor]:
        """Tensors that the framework rebuilds when it needs them (workspaces). A scan that finds
        them must not move them."""
        return iter(())

    def before_step(self) -> None:
        """Called before an optimizer steps the module's parameters. All gradients exist then; at
        the next phase transition they may not."""

    def away(self) -> str | None:
        """The reason why the module cannot be called now, because the framework itself offloaded
        it, with advice. None if it can."""
        return None

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that the framework keeps for the module and that cannot
        be moved (a reducer's buckets)."""
        return iter(())

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        """Weights that a module does not show as parameters, by identity of the module and name
        there. None: a parameter is no weight."""
        return {}

    def drop_caches(self) -> None:
        """Drop tensors that the framework rebuilds when it needs them (workspaces). Called after
        the module was offloaded."""


# --- the frameworks that are known: those of placement itself, of entry points, and those that a
# program has added

GROUP = "placement.frameworks"  # the group of entry points. Each names a subclass of `Framework`.

SHIPPED: list[type[Framework]] = []
"""The frameworks of placement itself, which the `__init__` of this folder lists: their files import
this one."""
_added: list[type[Framework]] = []


def add(framework: type[Framework]) -> None:
    """Make a framework known to this process, for objects that are registered from now on.

    Raises:
        TypeError: `framework` is not a subclass of `Framework`.
    """
    cls: object = framework
    if not isinstance(cls, type) or not issubclass(cls, Framework):
        raise TypeError(
            f"a framework is a subclass of placement.frameworks.base.Framework, not {framework!r}"
        )
    if framework not in _added:
        _added.append(framework)
        _forget()


def remove(framework: type[Framework]) -> None:
    """Undo `add`. Nothing changes for objects that are registered already."""
    _added.remove(framework)
    _forget()


def _forget() -> None:
    for cached in (frameworks, _overriding):
        cached.cache_clear()
    frameworks()


@functools.cache
def frameworks() -> tuple[type[Framework], ...]:
    """All known frameworks. If several answer a question that takes one answer, the first is used.

    Raises:
        RegistrationError: an entry point cannot be imported, or does not name a subclass of
            `Framework`.
    """
    classes = [*SHIPPED, *_added]
    for point in entry_points(group=GROUP):
        try:
            framework = point.load()
            if not issubclass(framework, Framework):
                raise TypeError(
                    f"{framework!r} is no subclass of placement.frameworks.base.Framework"
                )
        except Exception as error:
            raise RegistrationError(
                f"entry point {point.name!r} of the group {GROUP!r} ({point.value}) cannot be "
                f"used: {error}"
            ) from error
        classes.append(framework)
    carriers = itertools.chain.from_iterable(framework.carriers for framework in classes)
    plain.set_carriers((named.module, named.name) for named in carriers)
    return tuple(dict.fromkeys(classes))


def answering(*questions: str) -> list[type[Framework]]:
    """The frameworks in use that override any of these questions (names of class attributes and
    class methods of `Framework`).

    The others are not asked, which saves time: most questions are asked for every object at every
    phase transition, and most frameworks answer few of them.
    """
    in_use = []
    for framework in _overriding(*questions):
        if not sys.modules.keys().isdisjoint(framework.packages):
            in_use.append(framework)
    return in_use


@functools.cache
def _overriding(*questions: str) -> tuple[type[Framework], ...]:
    defaults = [getattr_static(Framework, name) for name in questions]
    overriding = []
    for framework in frameworks():
        if [getattr_static(framework, name) for name in questions] != defaults:
            overriding.append(framework)
    return tuple(overriding)


def asked(question: str, *about: Any) -> list[Any]:
    """The answers of the frameworks in use to a question (a class method of `Framework`)."""
    return [*map(methodcaller(question, *about), answering(question))]


def frameworks_of(root: torch.nn.Module) -> list[Framework]:
    """An instance for each framework that has a part in a module tree."""
    instances = [framework.find(root) for framework in answering("find", "recognised_by")]
    return [instance for instance in instances if instance is not None]


def wrappers() -> list[tuple[type, str]]:
    """The wrapper classes that are imported, and the attribute name of the wrapped submodule in
    each."""
    imported = []
    for framework in frameworks():
        for wrapper in framework.wrappers:
            cls = loaded_class(*wrapper.cls)
            if cls is not None:
                imported.append((cls, wrapper.inner))
    return imported


def reading_methods(obj: object, *, is_root: bool) -> dict[str, Reading]:
    """The answers of all frameworks, as far as the object has the methods. `is_root`: it is a
    registered module, not a part of one."""
    answers = asked("reading_methods", obj)
    if is_root:
        answers += asked("reading_methods_of_root")
    readings: dict[str, Reading] = {}
    for names in answers:
        readings |= names if isinstance(names, Mapping) else dict.fromkeys(names, READ)
    for name in [*readings]:
        if not callable(getattr(type(obj), name, None)):
            del readings[name]
    return readings


def own_state(optimizer: object) -> OwnState | None:
    for state in asked("own_state", optimizer):
        if state is not None:
            return cast("OwnState", state)
    return None


def stepped_for(objects: Sequence[object]) -> dict[int, torch.Tensor]:
    models: dict[int, torch.Tensor] = {}
    for answer in asked("stepped_for", objects):
        models.update(answer)
    return models
