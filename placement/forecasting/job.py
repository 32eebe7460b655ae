"""Describe a job by its models, and forecast it: `placement.forecast`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from placement.core.settings import Settings, parse_bytes
from placement.core.states import KV_CACHE, ROLES, WEIGHTS, WORKER_ROLES, HandleView, OwnPhases, Policy, State
from placement.devices.adoption import Adopter, can_swap
from placement.devices.cuda.device import CHUNK_BYTES
from placement.devices.cuda.pool import plan as pool_plan
from placement.forecasting.cycles import cycle_of
from placement.forecasting.layout import ALONE, Layout
from placement.forecasting.link import Link
from placement.forecasting.models import Head, Part, module_of, parts_of, remarks, undivided
from placement.forecasting.optimizers import state_sizes
from placement.forecasting.outcome import Costs, in_the_steady_state
from placement.forecasting.ranges import RangedHandle, StorageSize
from placement.forecasting.report import Forecast
from placement.forecasting.streamed import StepCounts
from placement.planning.policy_lookup import resolve_policy
from placement.planning.simulated_handles import EngineHandle, SimulatedHandle
from placement.planning.simulation import SimulatedPhase
from placement.storage.range_layout import Sizing
from placement.tensors.dtypes import dtype_of

Gradients = Literal["cleared", "kept"]
"""Whether gradients are None when training ends (`zero_grad()` after `step()`), or alive: then they move with their model."""
_VALUE_ROLES = ("critic", "reward")
_HEADROOM = Settings().headroom
"""The part of free memory that a manager without a budget leaves to others at first."""
_GRANULARITY = 2 << 20
"""The granularity of the CUDA driver on every GPU so far."""


@dataclass(frozen=True, kw_only=True)
class _Cuda:
    """The sizes of a CUDA device, without the device."""

    chunk_bytes: int = CHUNK_BYTES
    granularity: int = _GRANULARITY

    @property
    def adopter(self) -> Adopter:
        return _CudaSizes(torch.device("cpu"))


class _CudaSizes(Adopter):
    def pooled_bytes(self, sizes: Sequence[int]) -> int:
        return 0 if can_swap() else pool_plan(sizes)[1]


@dataclass(frozen=True)
class Model:
    """One model of a job, as every rank registers it.

    Args:
        source: a `config.json` of transformers, a folder with one, or an `nn.Module`, best on the meta device.

    Raises:
        ValueError: the options contradict one another.
    """

    source: str | os.PathLike[str] | torch.nn.Module
    role: str | None = None
    """The handle's role; None: its name, where that is one."""
    dtype: torch.dtype | str | None = None
    """The dtype of the weights: torch.bfloat16, "bfloat16"; None: as the configuration or the module says."""
    optimizer: str | type[torch.optim.Optimizer] | None = None
    """A name of `forecasting.optimizers.OPTIMIZERS`, "package.module:Class", or a class; None: the model is not trained."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    gradients: Gradients = "cleared"
    gradient_dtype: torch.dtype | str | None = None
    """None: that of the weights."""
    readonly: bool = False
    replicated: bool = False
    """Registered with `replicated=True`: every rank holds it whole, and the ranks of a node share one host copy."""
    sharded: bool = True
    """Whether the job's layout divides it. A replicated model is never divided."""
    head: Head | None = None
    """None: "value" for the roles critic and reward, else "lm"."""

    def __post_init__(self) -> None:
        if self.readonly and self.optimizer is not None:
            raise ValueError("a readonly model has no optimizer; leave out one of the two")
        if self.replicated and not self.readonly:
            raise ValueError("a forecast knows replicated models that are not trained: give readonly=True")
        if self.gradients not in get_args(Gradients):
            raise ValueError(f"gradients must be one of {', '.join(get_args(Gradients))}, not {self.gradients!r}")
        if self.head is not None and self.head not in get_args(Head):
            raise ValueError(f"head must be one of {', '.join(get_args(Head))}, or None, not {self.head!r}")
        if not isinstance(self.optimizer, str | type | None):
            raise ValueError(f"optimizer is an object of {type(self.optimizer).__name__}; give its class, and optimizer_options")  # noqa: TRY004  # the value is wrong
        _check_role(self.role)


@dataclass(frozen=True)
class Rollout:
    """A rollout engine that places its own memory (vLLM, SGLang), with its bytes on one GPU. Sizes may be text, such as "30GiB".

    Raises:
        ValueError: a size is no number of bytes.
    """

    weights_bytes: int | str
    kv_cache_bytes: int | str
    keeps_weights: bool = True
    """Whether its sleep keeps the weights on the host (level 1). Else they are dropped, and the next weight sync fills them (level 2)."""
    role: str | None = "rollout"

    def __post_init__(self) -> None:
        _check_role(self.role)

    @property
    def tags(self) -> dict[str, int]:
        """Bytes of each part."""
        return {WEIGHTS: _bytes(self.weights_bytes), KV_CACHE: _bytes(self.kv_cache_bytes)}


def forecast(
    handles: Mapping[str, Model | Rollout],
    *,
    layout: Layout = ALONE,
    policy: str | type[Policy] | Policy = "colocated",
    cycle: str | Sequence[str | SimulatedPhase] = "grpo",
    budget_bytes: int | str | None = None,
    link: Link | float | str | os.PathLike[str] | None = None,
    work_seconds: Mapping[str, float] | None = None,
    steps: Mapping[str, int] | None = None,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
    host_limit_bytes: int | str | None = None,
    device: Sizing | None = None,
) -> Forecast:
    """Tell what a job needs in each phase and what its moves cost, before it runs.

    Args:
        handles: the models and the rollout engine by the names of their handles, in registration order. The optimizer of "actor"
            becomes the handle "actor.optimizer".
        layout: how the models are divided among GPUs.
        policy: in any form that `Manager` takes.
        cycle: the phases of a step: "grpo", "ppo", or their names in order; "log_prob[ref]" for a phase with `only=["ref"]`. Between
            them the worker switches; where it leaves one phase before it enters the next, write "idle" in between.
        budget_bytes: device bytes that the handles may hold together. None: with a link that was measured, what a manager without a
            budget uses at first, 80 % of the free memory; else no limit.
        link: the file of `placement doctor --json`, a `Link`, or one rate for each way in bytes a second. None: no seconds are told.
        work_seconds: the duration of each phase without its moves. Needed only to tell what a prefetch saves.
        steps: the optimizer steps in each phase. Needed only where a policy streams optimizers' state, and one is taken where it is left
            out.
        worker_role: see `Manager`.
        phases: the user's own phases, see `Settings.phases`.
        host_limit_bytes: the limit on host memory of each rank, as in `Settings`; the rest is on a disk that is taken to keep up with the
            phases: bytes that a policy prefetches count as early although they may have to be read first. None: all is in host memory.
        device: whose chunks the bytes are counted in: a `Device`. None: a CUDA device.

    Raises:
        ValueError: a model's file, the layout, the cycle, a role or a number is wrong.
        TypeError: a handle is described by something else than a `Model` or a `Rollout`.
        OSError: a file cannot be read.
        ImportError: transformers is needed and not installed.
        PolicyError: the policy cannot be found or constructed.
        PhaseError: a phase's `only` names a handle that there is not.
    """
    _check(handles, worker_role)
    phases = Settings.from_any({"phases": phases}).phases if phases else None
    found = None if link is None else Link.of(link)
    entered = cycle_of(cycle, phases)
    costs = Costs(found, work_seconds, StepCounts(steps, [each.name for each in entered]))
    if unknown := [name for name in costs.work_seconds if name not in {each.name for each in entered}]:
        raise ValueError(f"work seconds are given for {', '.join(map(repr, unknown))}, which the cycle does not have")
    budget = None if budget_bytes is None else _bytes(budget_bytes)
    notes: list[str] = []
    if budget is None and found is not None and found.free_bytes is not None:
        budget = int(found.free_bytes * (1 - _HEADROOM))
        notes.append(f"no budget was given: 80 % of the {found.free_bytes:,} free bytes of the device is used")
    sizing = device or (_Cuda() if found is None or found.chunk_bytes is None else _Cuda(chunk_bytes=found.chunk_bytes))
    simulated: list[SimulatedHandle] = []
    for name, given in handles.items():
        made, remarked = _handles(name, given, layout, sizing)
        simulated += made
        notes += [each for each in remarked if each not in notes]
    limit = None if host_limit_bytes is None else _bytes(host_limit_bytes)
    notes += _notes(handles, simulated, layout, found, limit)
    return in_the_steady_state(
        resolve_policy(policy),
        simulated,
        entered,
        budget_bytes=budget,
        costs=costs,
        worker_role=worker_role,
        own_phases=phases,
        ranks_per_node=layout.ranks_per_node,
        host_limit_bytes=limit,
        notes=notes,
    )


def _check(handles: Mapping[str, Model | Rollout], worker_role: str) -> None:
    if not handles:
        raise ValueError("there is no handle to forecast; give at least one model")
    for name, given in handles.items():
        if not isinstance(given, Model | Rollout):
            raise TypeError(f"handle {name!r} is described by an object of {type(given).__name__}; give a Model(...) or a Rollout(...)")
        if isinstance(given, Model) and given.optimizer is not None and f"{name}.optimizer" in handles:
            raise ValueError(
                f"the optimizer of {name!r} becomes the handle '{name}.optimizer'; give the other handle of this name another one"
            )
    if worker_role not in WORKER_ROLES:
        raise ValueError(f"worker_role must be one of {', '.join(WORKER_ROLES)}, not {worker_role!r}")


def _check_role(role: str | None) -> None:
    if role is not None and role not in ROLES:
        raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")


def weights_bytes(source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | str | None = None) -> int:
    """Bytes of a whole model's storages.

    Raises:
        ValueError, OSError, ImportError: as `forecast`.
    """
    return sum(part.nbytes for part in parts_of(module_of(source, dtype_of(dtype), "lm"), ALONE, dtype_of(dtype)))


def _handles(name: str, given: Model | Rollout, layout: Layout, sizing: Sizing) -> tuple[list[SimulatedHandle], list[str]]:
    """The handles of one model, its own and its optimizer's; and notes on what is not in their bytes."""
    if isinstance(given, Rollout):
        return [EngineHandle(_facts(name, "engine", given.role, tags=given.tags), keeps_weights=given.keeps_weights)], []
    role = given.role or (name if name in ROLES else None)
    dtype = dtype_of(given.dtype)
    head = given.head or ("value" if role in _VALUE_ROLES else "lm")
    divided = ALONE if given.replicated or not given.sharded else layout
    built = module_of(given.source, dtype, head)
    parts, notes = parts_of(built, divided, dtype), [*remarks(given.source, dtype), *undivided(built, divided)]
    if not parts:
        raise ValueError(f"{name!r} has no tensors")
    module = RangedHandle(
        _facts(name, "module", role, readonly=given.readonly, can_prefetch=not given.replicated),
        sizing,
        [_storage(part, is_trained=given.optimizer is not None) for part in parts],
        gradients=_gradients(given, parts),
        keeps_gradients=given.gradients == "kept",
        shared_by=layout.ranks_per_node if given.replicated else 1,
    )
    if given.optimizer is None:
        return [module], notes
    state = state_sizes(given.optimizer, [each for part in parts for each in part.parameters], given.optimizer_options)
    facts = _facts(f"{name}.optimizer", "optimizer", role, owners=(name,))
    return [module, RangedHandle(facts, sizing, unborn=state)], notes


def _storage(part: Part, *, is_trained: bool) -> StorageSize:
    steps = is_trained and any(each.requires_grad for each in part.parameters)
    return StorageSize(part.nbytes, is_stepped=steps, is_published=bool(part.parameters))


def _gradients(given: Model, parts: Sequence[Part]) -> list[int]:
    if given.optimizer is None:
        return []
    dtype = dtype_of(given.gradient_dtype)
    trained = [each for part in parts for each in part.parameters if each.requires_grad]
    return [each.numel() * (each.itemsize if dtype is None else dtype.itemsize) for each in trained]


def _facts(name: str, kind: str, role: str | None, **more: Any) -> HandleView:
    return HandleView(name=name, kind=kind, role=role, state=State.CPU_OFFLOADED, num_bytes=0, **more)


def _notes(
    handles: Mapping[str, Model | Rollout], simulated: Sequence[SimulatedHandle], layout: Layout, link: Link | None, limit_bytes: int | None
) -> list[str]:
    notes = []
    for name, given in handles.items():
        if isinstance(given, Rollout) and given.keeps_weights:
            nbytes = given.tags[WEIGHTS]
            notes.append(f"{name} keeps {nbytes:,} bytes of weights a GPU on the host by itself; they are not in the host bytes")
    rank = sum(each.host_bytes for each in simulated)
    node = (rank if limit_bytes is None else min(rank, limit_bytes)) * layout.ranks_per_node
    if link is not None and link.host_available_bytes is not None and node > link.host_available_bytes and not _is_shared(handles):
        notes.append(f"the host has {link.host_available_bytes:,} bytes available, and the host copies of a node need {node:,}")
    return notes


def _is_shared(handles: Mapping[str, Model | Rollout]) -> bool:
    return any(isinstance(each, Model) and each.replicated for each in handles.values())


def _bytes(given: int | str) -> int:
    nbytes: object = parse_bytes(given) if isinstance(given, str) else given
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise ValueError(f'{nbytes!r} is no number of bytes; write a whole number, or text such as "12GiB"')  # noqa: TRY004  # the value is wrong
    if nbytes < 0:
        raise ValueError(f"a number of bytes must be 0 or more, not {nbytes}")
    return nbytes
