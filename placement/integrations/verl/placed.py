"""The manager that verl's engines of a process share, and `PlacedEngine`, under which placement
replaces verl's offloading."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from placement.core.errors import PhaseError, PlacementError
from placement.core.states import State
from placement.core.weak import WeakIdSet
from placement.frameworks.weights import Reader, weight_of
from placement.group import Group, StoreGroup
from placement.manager import Manager
from placement.phases.hold import Around, Hold
from placement.publish.ahead import ReadAhead, plainly
from placement.publish.skeleton import named_places
from placement.tensors.plain import plain_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle

    _Engine = Any
else:
    _Engine = object

logger = logging.getLogger("placement.integrations.verl")
# verl sets the root logger to WARNING
logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))

_lock = threading.Lock()
_made: list[Manager] = []
_numbers = itertools.count()
_joined: list[Group] = []
"""The group of the manager. It outlives a manager that could not be made: a rank joins once, and
the others wait for it in this group."""
_POLICY = "colocated(stream_sync=True)"
"""The policy where `PLACEMENT_POLICY` names none. verl exports one weight after the other, so that
a sync need not load the model first."""
# bytes of changes that are found together, and of weights that come from the host copy together
_BUCKET_BYTES = 64 << 20
# the rollouts that are handles: `ended()` of each is called when an engine begins a phase
rollouts: WeakIdSet[Any] = WeakIdSet()


def manager() -> Manager:
    """The manager that verl's engines in this process share, made at the first call with the
    settings in `PLACEMENT_*`.

    All ranks of the worker group change phase together. Without `PLACEMENT_POLICY` its policy is
    `colocated(stream_sync=True)`. With `PLACEMENT_DISCOVERY` set it serves its metrics, too.

    Raises:
        ValueError: a `PLACEMENT_*` variable is wrong.
        PlacementError: the device does not exist, there is no such policy, or the folder of
            `PLACEMENT_DISCOVERY` cannot be written.
    """
    with _lock:
        if not _made:
            made = Manager.from_settings(
                group=_group(), policy=os.environ.get("PLACEMENT_POLICY", _POLICY)
            )
            if made.settings.discovery is not None:
                try:
                    made.serve()
                except BaseException:
                    made.close()  # else the next call would give one without a server
                    raise
            _made.append(made)
        return _made[0]


def current_manager() -> Manager | None:
    return _made[0] if _made else None


def next_phase() -> None:
    """An engine of this process is about to begin a phase in which the rollout is not needed."""
    for rollout in rollouts:
        rollout.ended()


def use_manager(made: Manager) -> None:
    """Let verl's engines in this process use a manager of your own: with a policy object, or a
    device that no variable can name.

    Raises:
        PhaseError: this process has a manager already.
    """
    with _lock:
        if _made:
            raise PhaseError(
                "verl's engines in this process have a manager; call use_manager() before the "
                "first one is built"
            )
        _made.append(made)


def close_manager() -> None:
    """Close the manager of this process, so that the next call of `manager` makes a new one. Every
    rank does so, or none.

    Raises:
        PhaseError: a phase is open.
    """
    with _lock:
        if _made:
            next_phase()
            _made[0].close()
            _made.clear()
            rollouts.clear()
        _joined.clear()


def _group() -> Group | None:
    """The ranks of verl's worker group, over the store of their process group. A number keeps the
    keys of each manager apart."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not _joined:
        store = PrefixStore(f"verl/{next(_numbers)}", _get_default_store())
        _joined.append(StoreGroup(store, dist.get_rank(), dist.get_world_size()))
    return _joined[0]


class Publication(Around[tuple[Any, ...]]):
    """An engine's weights, from a generator, with the hold under which they are read. It ends like
    `Hold.around`, and if the sync fails."""

    _is_cut_off = False

    def __init__(self, hold: Hold, weights: Iterator[tuple[Any, ...]]) -> None:
        super().__init__(hold, weights)
        _publications.add(self)
        with suppress(RuntimeError):  # no loop runs in this thread
            task = asyncio.current_task()
            if task is not None:
                task.add_done_callback(partial(_task_ended, weakref.ref(self)))

    def __next__(self) -> tuple[Any, ...]:
        if self._is_cut_off:  # not StopIteration: half of the weights would be taken for all
            raise PlacementError(
                "these weights ended with the sync that failed: ask the engine for new ones"
            )
        return super().__next__()

    def cut_off(self, error: BaseException) -> None:
        """End it because the sync has failed with `error`. Failures of ending become notes on
        that."""
        if not self.hold.is_open:
            return
        self._is_cut_off = True
        with noted(error):
            self.close_items()  # first, as they may refer to the model's memory
        with noted(error):
            self.hold.release(error)


# the publications of all engines of this process
_publications: WeakIdSet[Publication] = WeakIdSet()


def cut_off_all(weights: Any, error: BaseException) -> None:
    """End all publications of this process because a sync of these weights (a publication, or a
    generator around one) has failed."""
    if not isinstance(weights, Publication) and hasattr(weights, "close"):
        with noted(error):
            weights.close()
    for publication in _publications:
        publication.cut_off(error)


@contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """Make an error of the block a note on `error`, which is on its way and says more."""
    try:
        yield
    except Exception as failure:
        with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
            error.add_note(f"placement: {type(failure).__name__}: {failure}")


def _task_ended(reference: weakref.ref[Publication], task: asyncio.Task[Any]) -> None:
    """End a publication whose task has ended by an error: no code reads on."""
    publication = reference()
    if publication is None or not publication.hold.is_open:
        return
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        # Said here, too, because asyncio now counts the exception as retrieved.
        logger.warning(
            "a sync of weights has failed, so the phase of its model ends: %s: %s",
            type(error).__name__,
            error,
        )
        publication.cut_off(error)


class PlacedEngine(_Engine):  # type: ignore[misc] # verl has no types
    """Registers the module and the optimizer that verl builds, and holds a phase wherever verl
    would load and offload them.

    verl's own flags `_is_offload_param` and `_is_offload_optimizer` are off, so that no line of
    verl moves anything. Every public method here overrides one of
    `verl.workers.engine.fsdp.transformer_impl.FSDPEngine` (0.9.1) and has its arguments and its
    result.

    An engine whose configuration has neither `param_offload` nor `optimizer_offload` stays verl's
    own. With `offload_policy=True` FSDP2 places module and optimizer, and both are external.
    """

    _manager: Manager | None = None
    _model_handle: Handle | None = None  # the module's handle; None while the engine is verl's own
    _manual: Any = None  # the hold that `to` opened
    # the parts that `to` was asked to bring to the device: "model", "optimizer"
    _manual_parts: frozenset[str] = frozenset()
    _mini_batch = 0  # the number of the mini-batch in a step of verl's actor or critic, from 1 on

    def initialize(self) -> None:
        self._end_manual()
        if self._is_left_to_verl:
            super().initialize()
            logger.info(
                "verl places its own %s engine: param_offload and optimizer_offload are off",
                type(self).__name__,
            )
            return
        self._is_offload_param = self._is_offload_optimizer = False
        replaced = vars(self).get("module"), vars(self).get("optimizer")
        # `reset()` calls it again: the registered objects live until their successors are there
        super().initialize()
        self._register()
        del replaced

    @property
    def _is_left_to_verl(self) -> bool:
        config = self.engine_config
        if self._is_left_to_fsdp2 or config.param_offload:
            return False
        return bool(config.forward_only or not config.optimizer_offload)

    @property
    def _is_left_to_fsdp2(self) -> bool:
        """Whether FSDP2's CPUOffloadPolicy places the parameters and, with them, the optimizer's
        state."""
        return bool(self.engine_config.strategy == "fsdp2" and self.engine_config.offload_policy)

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """verl puts a `forward_only` model under a CPU offload policy, which copies each layer for
        each micro-batch: not a placed one."""
        if self._is_left_to_verl:
            return super()._build_fsdp_module(module)  # type: ignore[no-any-return]
        config = self.engine_config
        forward_only = config.forward_only
        config.forward_only = False
        try:
            return super()._build_fsdp_module(module)  # type: ignore[no-any-return]
        finally:
            config.forward_only = forward_only

    def _register(self) -> None:
        """Register the module and the optimizer. A part that is not offloaded, or by FSDP2's
        policy, is external: tracked, never moved."""
        config = self.engine_config
        is_left = self._is_left_to_fsdp2
        self._manager = shared = manager()
        if self._model_handle is not None:
            name = self._model_handle.name
        else:
            name = _free_name(shared, self._role)
        # else `to` would move the buffers to where the parameters are
        if config.strategy == "fsdp2" and not is_left:
            # Nothing moves, but FSDP2 makes its references to the shards anew. verl calls `to`
            # later, and the audit would find them stray.
            self.module.to(next(self.module.parameters()).device)
        model = shared.register(
            name,
            self.module,
            role=self._role,
            readonly=self.optimizer is None,
            external=not (config.param_offload or is_left),
            replace=True,
        )
        try:
            if self.optimizer is not None:
                shared.register(
                    f"{name}.optimizer",
                    self.optimizer,
                    owner=model,
                    external=not (config.optimizer_offload or is_left),
                    replace=True,
                )
        except BaseException:
            self._model_handle = None
            shared.unregister(model)
            raise
        self._model_handle = model
        self._log_registration(name)

    def _log_registration(self, name: str) -> None:
        kind = type(self).__name__
        if self._is_left_to_fsdp2:
            logger.info(
                "placement tracks %r, which FSDP2's CPUOffloadPolicy places: offload_policy=True "
                "(%s)",
                name,
                kind,
            )
            return
        moved = []
        if self.engine_config.param_offload:
            moved.append("parameters")
        if self.engine_config.optimizer_offload and (self.optimizer is not None or not moved):
            moved.append("optimizer")
        logger.info("placement places the %s of %r (%s)", " and the ".join(moved), name, kind)

    @property
    def _role(self) -> str:
        if self.model_config.model_type == "value_model":
            return "critic"
        return "ref" if self.optimizer is None else "actor"

    @property
    def _reading_phase(self) -> str:
        """The phase in which the model computes without being trained."""
        return {"critic": "values", "ref": "ref_log_prob", "actor": "log_prob"}[self._role]

    def _hold(self, phase: str) -> AbstractContextManager[Any]:
        if self._manager is None or self._model_handle is None:
            return nullcontext()
        next_phase()
        return self._manager.hold(phase, only=[self._model_handle])

    def train_mode(
        self, disable_auto_offload: bool = False, **kwargs: Any
    ) -> AbstractContextManager[None]:
        return self._mode("train", super().train_mode, disable_auto_offload, kwargs)

    def eval_mode(
        self, disable_auto_offload: bool = False, **kwargs: Any
    ) -> AbstractContextManager[None]:
        return self._mode(self._reading_phase, super().eval_mode, disable_auto_offload, kwargs)

    @contextmanager
    def _mode(
        self,
        phase: str,
        mode: Callable[..., Any],
        stays: bool,
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """One of verl's modes inside a phase. `stays`: the caller has brought everything to the
        device by `to`, or by a mode around."""
        is_placed = self._model_handle is not None
        self._mini_batch = 0 if self.mode is None else self._mini_batch + 1
        with (
            nullcontext() if stays else self._hold(phase),
            mode(disable_auto_offload=stays or is_placed, **kwargs),
        ):
            yield

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """verl's own, with the figures of `Manager.metrics` in the metrics of a step's first
        mini-batch: verl takes the mean over mini-batches that have a key."""
        from verl.utils.metric import Metric

        outputs = super().train_batch(*args, **kwargs)
        manager = self._manager
        logs = self._mini_batch == 1 and self.is_mp_src_rank_with_outputs()
        if logs and manager is not None and manager.settings.trainer_log:
            for name, value in manager.metrics().items():
                over_ranks = "max" if "peak" in name else "mean"
                outputs["metrics"][name] = Metric(over_ranks, value)
        return outputs

    def optimizer_step(self) -> float:
        # for policies that load the optimizer no earlier; in others nothing moves here
        with self._hold("optimizer_step"):
            return super().optimizer_step()  # type: ignore[no-any-return]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._hold("checkpoint"):
            super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._hold("restore"):
            super().load_checkpoint(*args, **kwargs)

    def get_per_tensor_param(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any] | None]:
        return self._published(partial(super().get_per_tensor_param, *args, **kwargs))

    def get_per_tensor_param_shard(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """verl's own, from the host copy while the model is offloaded: a rank reads its own shards
        alone, so nothing is loaded."""
        return self._published(
            partial(super().get_per_tensor_param_shard, *args, **kwargs), of_shards=True
        )

    def _named(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that verl exports, under its names."""
        from verl.utils.model import convert_weight_keys

        return dict(convert_weight_keys(dict(named_places(self.module)), self.module))

    def _published(
        self, export: Callable[[], tuple[Any, Any]], *, of_shards: bool = False
    ) -> tuple[Any, Any]:
        """The export's weights, with the model held until the last one was read, the iterator is
        given up, or the sync fails."""
        handle = self._model_handle
        if self._manager is None or handle is None:
            return export()
        computes = self._computes_to_publish
        phase = "weight_sync" if self._role == "actor" else self._reading_phase
        is_off = handle.state is State.CPU_OFFLOADED and not handle.external
        if of_shards and is_off and not computes:
            phase = "checkpoint"  # reads the host copy, and moves nothing by any policy
        hold = self._manager.hold(phase, only=[handle])
        try:
            if computes and not handle.external and not handle.resident_bytes:
                # A policy that publishes from the host copy: verl computes with the parameters
                # themselves.
                hold.switch(self._reading_phase, only=[handle])
            is_exported_by_verl = of_shards or computes or getattr(self, "_qat_enabled", False)
            if handle.is_streaming and not is_exported_by_verl:
                return Publication(hold, self._streamed(handle)), None
            weights, peft_config = export()
            if phase == "checkpoint":
                weights = _unmoved(weights, handle)
            return Publication(hold, self._in_own_memory(weights)), peft_config
        except BaseException as error:
            hold.release(error)
            raise

    def _streamed(self, handle: Handle) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of verl's `get_per_tensor_param`, read from the host copy while those before
        are sent."""
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        weights = {name: weight_of(tensor) for name, tensor in self._named().items()}
        reader = Reader(_device_of(handle), handle.storage.read_host)
        wanted = [(weight, weight.dtype) for weight in weights.values()]
        ahead = ReadAhead(reader, wanted, _BUCKET_BYTES)

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights.items():
                with plainly():
                    ahead.fetch()
                    value = weight.whole(reader, weight.dtype)
                ahead.used(value.nbytes)
                yield name, value

        try:
            yield from unfuse_moe_params(read(), self.model_config.hf_config.model_type)
        finally:
            ahead.end()

    @property
    def _computes_to_publish(self) -> bool:
        """Whether verl needs the model on the device to publish it: FSDP1 gathers it there, and
        LoRA is merged or gathered there."""
        return bool(self.engine_config.strategy == "fsdp" or self._is_lora)

    def _in_own_memory(self, weights: Any) -> Iterator[tuple[Any, ...]]:
        """These weights, of which aliases of the model's own memory are copied: it cannot go
        through CUDA IPC, and goes with the phase."""
        own = set()
        for tensor in itertools.chain(self.module.parameters(), self.module.buffers()):
            own |= _addresses(tensor)
        try:
            for name, weight, *details in weights:
                is_alias = not own.isdisjoint(_addresses(weight))
                yield (name, weight.clone() if is_alias else weight, *details)
        finally:
            if hasattr(weights, "close"):
                # verl undoes a LoRA merge at the end of its generator: while the model is still
                # held
                weights.close()

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Hold the named parts on the device until `to("cpu")`, for callers that then pass
        `disable_auto_offload=True`."""
        if self._manager is None or self._model_handle is None:
            super().to(device, model=model, optimizer=optimizer, grad=grad)
            return
        # Moves nothing. verl checks that the device is its own or "cpu" (not of a reference), and
        # that gradients go with their model only.
        super().to(device, model=False, optimizer=False, grad=grad and not model)
        named = {"model"} if model else set()
        if optimizer and self.optimizer is not None:
            named.add("optimizer")
        parts = self._manual_parts - named if device == "cpu" else self._manual_parts | named
        has_model = "model" in parts or self._model_handle.external
        phase = self._reading_phase if "model" in parts else None
        if has_model and "optimizer" in parts:
            phase = "train"
        following = None
        if phase is not None:
            next_phase()
            following = self._manager.hold(phase, only=[self._model_handle])
        self._end_manual()
        self._manual = following
        self._manual_parts = parts

    def _end_manual(self) -> None:
        hold = self._manual
        self._manual = None
        self._manual_parts = frozenset()
        if hold is not None:
            hold.release()


def _addresses(tensor: torch.Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for _, part in plain_parts(tensor, "")}


def _unmoved(
    weights: Iterator[tuple[Any, ...]],
    handle: Handle,
) -> Iterator[tuple[Any, ...]]:
    """Weights as they are read from the host copy of a handle. Another phase that has loaded it
    meanwhile may have trained it."""
    before = sum(handle.counters.transitions.values())
    for weight in weights:
        if sum(handle.counters.transitions.values()) != before:
            raise PlacementError(
                f"{handle.name!r} was loaded while its shards were read from the host copy: begin "
                "this sync again"
            )
        yield weight


def _device_of(handle: Handle) -> torch.device:
    assert handle.modules_adapter is not None
    return handle.modules_adapter.compute_device


def _free_name(manager: Manager, role: str) -> str:
    """The role as a handle's name, with a number if another engine of the process has the name."""
    name = role
    for number in itertools.count(2):
        if name not in manager.handles:
            break
        name = f"{role}-{number}"
    return name


_NEEDED = ("_build_fsdp_module", *(name for name in vars(PlacedEngine) if not name.startswith("_")))
"""The methods that are overridden here: verl's engines must have them."""


def register(vendor: str) -> None:
    """Register the engines under a vendor's name. PlacementError if this verl lacks something."""
    import verl
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import (
        FSDPEngineWithLMHead,
        FSDPEngineWithValueHead,
    )

    engines = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
    missing = []
    for base in engines.values():
        missing += [f"{base.__name__}.{name}" for name in _NEEDED if not hasattr(base, name)]
    if "vendor" not in inspect.signature(EngineRegistry.register).parameters:
        missing.append("EngineRegistry.register(vendor=...)")
    if missing:
        raise PlacementError(
            f"verl {verl.__version__} lacks {', '.join(missing)}; verl 0.9.1 has them"
        )
    for model_type, base in engines.items():
        placed = type(
            f"Placed{base.__name__}",
            (PlacedEngine, base),
            {"__doc__": (f"{base.__name__}, placed by placement.")},
        )
        EngineRegistry.register(model_type, ["fsdp", "fsdp2"], ["cuda", "npu"], vendor)(placed)
