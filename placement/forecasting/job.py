"""Describe a job by its models, and forecast it: `placement.forecast`.

A model is one on the first rank of a layout, without its values: from a transformers configuration,
or from a module on the meta device.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from placement.core.settings import Settings, bytes_of, nearest
from placement.core.states import KV_CACHE, ROLES, WEIGHTS, WORKER_ROLES, OwnPhases, Policy
from placement.forecasting.description import ALONE, Forecast, Layout, Link, Phase, cycle_of
from placement.forecasting.device import (
    Object,
    SizedEngine,
    SizedModule,
    SizedOptimizer,
    SizesDevice,
    StateOf,
)
from placement.forecasting.run import Run
from placement.planning.policy_lookup import resolve_policy
from placement.storage.layout import Sizing
from placement.tensors.plain import dtype_of

Gradients = Literal["cleared", "kept"]
"""Whether gradients are None when training ends (`zero_grad()` after `step()`), or alive: then they
move with their model."""
Head = Literal["lm", "value"]
"""The end of a model that a configuration describes: a language model's head, or one number a token
(a critic, a reward model)."""
_AUTO_CLASSES: Mapping[Head, Sequence[str]] = {
    "lm": ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"),
    "value": ("AutoModelForTokenClassification", "AutoModelForSequenceClassification"),
}
"""The classes of transformers that build a model with such a head; the first one that knows the
architecture is taken."""
_VALUE_ROLES = ("critic", "reward")
# the part of free memory that a manager without a budget leaves to others at first
_HEADROOM = Settings().headroom
_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
"""Their state is in the dtype of the weights."""
_RULES = {
    "adamw-fp32": ("exp_avg", "exp_avg_sq"),
    "adamw-master": ("master", "exp_avg", "exp_avg_sq"),
}
"""The names of the state in fp32 that an optimizer keeps for a parameter of any dtype."""
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""Options that choose how a step is computed. The plain way makes the same state, and is the only
one that needs no values."""
OPTIMIZERS = tuple(sorted((*_CLASSES, *_RULES)))
"""Names of optimizers. A class of torch.optim's form, or "package.module:Class", works too."""


@dataclass(frozen=True)
class Model:
    """One model of a job, as every rank registers it.

    Args:
        source: a `config.json` of transformers, a folder with one, or an `nn.Module`, best on the
            meta device.

    Raises:
        ValueError: the options contradict one another.
    """

    source: str | os.PathLike[str] | torch.nn.Module
    role: str | None = None
    """The handle's role; None: its name, where that is one."""
    dtype: torch.dtype | str | None = None
    """The dtype of the weights: torch.bfloat16, "bfloat16"; None: as the configuration or the
    module says."""
    optimizer: str | type[torch.optim.Optimizer] | None = None
    """A name of `forecasting.job.OPTIMIZERS`, "package.module:Class", or a class; None: the model
    is not trained."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    gradients: Gradients = "cleared"
    readonly: bool = False
    replicated: bool = False
    """Registered with `replicated=True`: every rank holds it whole, and the ranks of a node share
    one host copy."""
    sharded: bool = True
    """Whether the job's layout divides it. A replicated model is never divided."""
    head: Head | None = None
    """None: "value" for the roles critic and reward, else "lm"."""

    def __post_init__(self) -> None:
        if self.readonly and self.optimizer is not None:
            raise ValueError("a readonly model has no optimizer; leave out one of the two")
        if self.replicated and not self.readonly:
            raise ValueError(
                "a forecast knows replicated models that are not trained: give readonly=True"
            )
        _one_of("gradients", self.gradients, get_args(Gradients))
        _one_of("head", self.head, (*get_args(Head), None))
        if not isinstance(self.optimizer, str | type | None):
            raise ValueError(  # noqa: TRY004
                f"optimizer is an object of {type(self.optimizer).__name__}; give its class, "
                "and optimizer_options"
            )
        _one_of("role", self.role, (*ROLES, None))


@dataclass(frozen=True)
class Rollout:
    """A rollout engine that places its own memory (vLLM, SGLang), with its bytes on one GPU. Sizes
    may be text, such as "30GiB".

    Raises:
        ValueError: a size is no number of bytes.
    """

    weights_bytes: int | str
    kv_cache_bytes: int | str
    keeps_weights: bool = True
    """Whether its sleep keeps the weights on the host (level 1). Else they are dropped, and the
    next weight sync fills them (level 2)."""
    role: str | None = "rollout"

    def __post_init__(self) -> None:
        _one_of("role", self.role, (*ROLES, None))

    @property
    def tags(self) -> dict[str, int]:
        return {
            WEIGHTS: _bytes("weights_bytes", self.weights_bytes),
            KV_CACHE: _bytes("kv_cache_bytes", self.kv_cache_bytes),
        }


@torch.inference_mode(mode=False)
def forecast(
    handles: Mapping[str, Model | Rollout],
    *,
    layout: Layout = ALONE,
    policy: str | type[Policy] | Policy = "colocated",
    cycle: str | Sequence[str | Phase] = "grpo",
    budget_bytes: int | str | None = None,
    link: Link | float | str | os.PathLike[str] | None = None,
    work_seconds: Mapping[str, float] | None = None,
    steps: Mapping[str, int] | None = None,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
    device: Sizing | None = None,
) -> Forecast:
    """Tell what a job needs in each phase and what its moves cost, before it runs.

    Args:
        handles: the models and the rollout engine by the names of their handles, in registration
            order. The optimizer of "actor" becomes the handle "actor.optimizer".
        layout: how the models are divided among GPUs.
        policy: in any form that `Manager` takes.
        cycle: the phases of a step: "grpo", "ppo", or their names in order; "log_prob[ref]" for a
            phase with `only=["ref"]`. Between them the worker switches; where it leaves one phase
            before it enters the next, write "idle" in between.
        budget_bytes: device bytes that the handles may hold together. None: with a link that was
            measured, what a manager without a budget uses at first, 80 % of the free memory; else
            no limit.
        link: the file of `placement doctor --json`, a `Link`, or one rate for each way in bytes a
            second. None: no seconds are told.
        work_seconds: the duration of each phase without its moves. Needed only to tell what a
            prefetch saves.
        steps: the optimizer steps in each phase. Needed only where a policy streams optimizers'
            state, and one is taken where it is left out.
        worker_role: see `Manager`.
        phases: the user's own phases, see `Settings.phases`.
        device: whose chunks the bytes are counted in: a `Device`. None: a CUDA device.

    Raises:
        ValueError: a model's file, the layout, the cycle, a role or a number is wrong.
        TypeError: a handle is described by something else than a `Model` or a `Rollout`, or a
            number of bytes is none.
        OSError: a file cannot be read.
        ImportError: transformers is needed and not installed.
        PolicyError: the policy cannot be found or constructed.
        PhaseError: a phase's `only` names a handle that there is not.
    """
    _check(handles)
    _one_of("worker_role", worker_role, WORKER_ROLES)
    phases = Settings.from_any({"phases": phases}).phases if phases else None
    found = None if link is None else Link.of(link)
    entered = cycle_of(cycle, phases)
    names = [each.name for each in entered]
    _check_numbers("work seconds", work_seconds, names)
    _check_numbers("number of steps", steps, names)
    budget = None if budget_bytes is None else _bytes("budget_bytes", budget_bytes)
    notes: list[str] = []
    if budget is None and found is not None and found.free_bytes is not None:
        budget = int(found.free_bytes * (1 - _HEADROOM))
        notes.append(
            f"no budget was given: 80 % of the {found.free_bytes:,} free bytes of the device is "
            "used"
        )
    sizes = SizesDevice(found, device)
    objects: list[Object] = []
    for name, described in handles.items():
        made, remarked = _objects(name, described, layout, sizes)
        objects += made
        notes += [each for each in remarked if each not in notes]
    numbers: dict[str, Any] = {
        "budget_bytes": budget,
        "work_seconds": work_seconds,
        "steps": steps,
    }
    settings: dict[str, Any] = {"worker_role": worker_role, "phases": dict(phases or {})}
    with Run(resolve_policy(policy), sizes, objects, names, **numbers, **settings) as run:
        told = run.in_the_steady_state(entered, layout.ranks_per_node, notes)
    if found is None:
        return told
    available = found.host_available_bytes
    machine = {
        "over_host_bytes": 0 if available is None else max(0, told.node_host_bytes - available),
        "pageable_reason": found.pageable_reason,
    }
    return told.model_copy(update=machine)


def _check(handles: Mapping[str, Model | Rollout]) -> None:
    if not handles:
        raise ValueError("there is no handle to forecast; give at least one model")
    for name, given in handles.items():
        if not isinstance(given, Model | Rollout):
            raise TypeError(
                f"handle {name!r} is described by an object of {type(given).__name__}; give a "
                "Model(...) or a Rollout(...)"
            )
        if (
            isinstance(given, Model)
            and given.optimizer is not None
            and f"{name}.optimizer" in handles
        ):
            raise ValueError(
                f"the optimizer of {name!r} becomes the handle '{name}.optimizer'; give the other "
                "handle of this name another one"
            )


def _check_numbers(what: str, given: Mapping[str, float] | None, phases: Sequence[str]) -> None:
    if unknown := [name for name in given or {} if name not in phases]:
        raise ValueError(
            f"the {what} of {', '.join(map(repr, unknown))}, which the cycle does not have, cannot "
            "be used"
        )
    for name, number in (given or {}).items():
        if not 0 <= number < math.inf:
            raise ValueError(f"the {what} of phase {name!r} must be 0 or more, not {number}")


def _one_of(what: str, given: object, known: Sequence[object]) -> None:
    if given not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, not {given!r}")


def weights_bytes(
    source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | str | None = None
) -> int:
    """Bytes of a whole model's storages. Raises ValueError, OSError, ImportError: as `forecast`."""
    return sum(
        part.nbytes
        for part in parts_of(module_of(source, dtype_of(dtype), "lm"), ALONE, dtype_of(dtype))
    )


def _objects(
    name: str, given: Model | Rollout, layout: Layout, device: SizesDevice
) -> tuple[list[Object], list[str]]:
    """The objects of one model, its own and its optimizer's; and notes on what is not in their
    bytes."""
    if isinstance(given, Rollout):
        return [
            Object(
                name, SizedEngine(device, given.tags, keeps_weights=given.keeps_weights), given.role
            )
        ], []
    role = given.role or (name if name in ROLES else None)
    dtype = dtype_of(given.dtype)
    head = given.head or ("value" if role in _VALUE_ROLES else "lm")
    divided = ALONE if given.replicated or not given.sharded else layout
    built = module_of(given.source, dtype, head)
    parts, notes = (
        parts_of(built, divided, dtype),
        [*remarks(given.source, dtype), *undivided(built, divided)],
    )
    if not parts:
        raise ValueError(f"{name!r} has no tensors")
    module = SizedModule(parts)
    made = Object(name, module, role, given.readonly)
    if given.replicated:
        made.sharers = layout.ranks_per_node
    if given.optimizer is None:
        module.requires_grad_(requires_grad=False)
        return [made], notes
    made.keeps_gradients = given.gradients == "kept"
    optimizer = SizedOptimizer(module.trained, state_of(given.optimizer, given.optimizer_options))
    return [made, Object(f"{name}.optimizer", optimizer, role)], notes


def state_of(
    optimizer: str | type[torch.optim.Optimizer], options: Mapping[str, Any] | None = None
) -> StateOf:
    """The state that an optimizer (one of `OPTIMIZERS`, a class, or "package.module:Class") creates
    for a parameter.

    A step of its own on the meta device makes it. Raises ValueError: there is no such optimizer, or
    its state needs values.
    """
    if isinstance(optimizer, str) and optimizer in _RULES:
        if options:
            raise ValueError(f"optimizer {optimizer!r} takes no options; give a class for them")
        kept = _RULES[optimizer]
        return lambda each: {
            name: torch.empty(each.shape, dtype=torch.float32, device="meta") for name in kept
        }
    cls, given = _class_of(optimizer)
    given = {
        name: value
        for name, value in {**given, **(options or {})}.items()
        if name not in _IMPLEMENTATIONS
    }

    @functools.cache
    def state(shape: torch.Size, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        # a default device of the caller would move the counters, whose values a step reads
        with torch.device("cpu"):
            try:
                made = cls([parameter], **given)
            except Exception as error:
                raise ValueError(
                    f"optimizer {cls.__qualname__} cannot be made with options {given}: {error}"
                ) from error
            try:
                made.step()
            except Exception as error:
                known = ", ".join(OPTIMIZERS)
                raise ValueError(
                    f"the state of {cls.__qualname__} cannot be told without values; choose one of "
                    f"{known}"
                ) from error
        return {
            name: value
            for name, value in made.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }

    state(torch.Size((8, 8)), torch.float32)  # whoever cannot be stepped is refused now
    return lambda each: state(each.shape, each.dtype)


def _class_of(
    optimizer: str | type[torch.optim.Optimizer],
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if isinstance(optimizer, type):
        return optimizer, {}
    if optimizer in _CLASSES:
        return _CLASSES[optimizer]
    if ":" not in optimizer:
        hint = nearest(optimizer, OPTIMIZERS) or "."
        raise ValueError(
            f"no optimizer {optimizer!r}{hint} Known: {', '.join(OPTIMIZERS)}; or write "
            "'package.module:Class'"
        )
    try:
        found = pkgutil.resolve_name(optimizer)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer {optimizer!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"optimizer {optimizer!r} is a {type(found).__name__}, not a class")  # noqa: TRY004  # the text is wrong
    return found, {}


def _bytes(name: str, given: int | str) -> int:
    nbytes = bytes_of(name, given)
    if nbytes < 0:
        raise ValueError(f"{name} must be 0 or more, not {nbytes}")
    return nbytes


# --- the storages of a model


class Part(NamedTuple):
    """One storage of a model, as the first rank holds it."""

    nbytes: int
    # the parameters in it on the meta device, in this rank's shapes; empty for a buffer
    parameters: tuple[torch.nn.Parameter, ...]


def module_of(
    source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | None, head: Head
) -> torch.nn.Module:
    """A module as it is, or the one of a `config.json` of transformers (or of a folder with one),
    on the meta device.

    The dtype is that of the weights; None: as the configuration says. Raises ValueError: it is no
    configuration that transformers knows; FileNotFoundError: there is no such file; ImportError:
    transformers is not installed.
    """
    if isinstance(source, torch.nn.Module):
        return source
    path = _config_file(source)
    content = _content(path)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            f"reading {path} needs transformers: pip install transformers, or give an nn.Module "
            "made on the meta device"
        )
    transformers = importlib.import_module("transformers")
    if content.get("auto_map") and content["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{path} describes a model whose code comes with its checkpoint (auto_map), and that "
            "code is not run; build the model on the meta device and give it to placement.forecast"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        if head == "value":
            config.num_labels = 1
        auto = _auto_class(transformers, config, head)
        dtype = (
            dtype
            or getattr(config, "dtype", None)
            or getattr(config, "torch_dtype", None)
            or torch.float32
        )
        with torch.device("meta"):
            module: torch.nn.Module = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    # wrong numbers fail anywhere in the model's code, with every kind of exception
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot build a model from {path}: "
            f"{_reason(error)}"
        ) from error
    return module


def remarks(
    source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | None
) -> list[str]:
    """Sentences on what a configuration says and the bytes of its model do not show; none for a
    module."""
    if isinstance(source, torch.nn.Module):
        return []
    path = _config_file(source)
    content, found = _content(path), []
    if quantization := content.get("quantization_config"):
        method = (
            quantization.get("quant_method", "quantized")
            if isinstance(quantization, Mapping)
            else quantization
        )
        found.append(
            f"{path} has a quantization_config ({method}); the weights are counted as if they were "
            "not quantized"
        )
    if dtype is None and not (content.get("dtype") or content.get("torch_dtype")):
        found.append(
            f"{path} has no dtype; the weights of models that keep its dtype are counted in float32"
        )
    return found


def _config_file(source: str | os.PathLike[str]) -> Path:
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no model configuration {path}; give a config.json or a folder with one "
            "(names of a hub are not fetched)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("model_type"), str):
        raise ValueError(  # noqa: TRY004
            f"{path} names no model_type, so it is no configuration of a transformers model"
        )
    return content


def _reason(error: Exception) -> str:
    """The first paragraph of an error in one line, with the error's class where that says
    something."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return (
        text
        if isinstance(error, (OSError, ValueError)) and text
        else (f"{type(error).__name__}: {text}").rstrip(": ")
    )


def _auto_class(transformers: Any, config: Any, head: Head) -> Any:
    for name in _AUTO_CLASSES[head]:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    what = (
        "that generates text"
        if head == "lm"
        else ("with one number a token (a critic, a reward model)")
    )
    raise ValueError(
        f"it has no class {what} for model_type {config.model_type!r}; build the model on the meta "
        "device and give it to placement.forecast"
    )


def parts_of(
    module: torch.nn.Module, layout: Layout = ALONE, dtype: torch.dtype | None = None
) -> list[Part]:
    """The storages of a module as the first rank of a layout holds them, in the order in which a
    handle takes them in.

    The floating-point parameters have the dtype; None: their own. Raises ValueError: the layout
    does not divide the module.
    """
    splits = _Splits(module, layout)
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(module):
        if tensor.numel():
            found.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    parts = []
    for named in found.values():
        held = [(name, each) for name, each in named if isinstance(each, torch.nn.Parameter)]
        own = []
        for name, each in held:
            shape = layout.part_of(name, tuple(each.shape), splits.dimension(name, each))
            part = torch.empty(
                shape,
                dtype=dtype if dtype is not None and each.is_floating_point() else each.dtype,
                device="meta",
            )
            own.append(torch.nn.Parameter(part, requires_grad=each.requires_grad))
        is_whole = all(
            (mine.shape, mine.dtype) == (each.shape, each.dtype)
            for mine, (_, each) in zip(own, held, strict=True)
        )
        nbytes = (
            named[0][1].untyped_storage().nbytes() if is_whole else sum(each.nbytes for each in own)
        )
        parts.append(Part(nbytes, tuple(own)))
    return parts


def _tensors(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a module: parameters, buffers and plain attributes, submodule by submodule. A
    tensor comes once."""
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        fields = module.__dict__
        attributes = {
            name: value for name, value in fields.items() if isinstance(value, torch.Tensor)
        }
        for name, tensor in (
            *fields["_parameters"].items(),
            *fields["_buffers"].items(),
            *attributes.items(),
        ):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


_WHOLE = (
    "replicate",
    "sequence",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
)
"""The beginnings of the styles of transformers that divide no parameter."""


def undivided(module: torch.nn.Module, layout: Layout) -> list[str]:
    """A sentence where tensor parallelism leaves most of a model whole on every rank, because the
    model's plan does not name it."""
    if layout.tensor_parallel == 1:
        return []
    splits, whole, total = _Splits(module, layout), 0, 0
    for path, parameter in module.named_parameters():
        total += parameter.nbytes
        whole += parameter.nbytes if splits.dimension(path, parameter) is None else 0
    if 2 * whole <= total:
        return []
    divided, model = f"{1 - whole / total:.0%}", type(module).__name__
    return [
        (
            f"tensor parallelism divides {divided} of the weights of {model}, as its plan in "
            "transformers says; every rank has the others whole"
        )
    ]


class _Splits:
    """The dimension of each parameter that tensor parallelism divides, from the plan that
    transformers gives a model."""

    def __init__(self, module: torch.nn.Module, layout: Layout) -> None:
        self._styles: list[tuple[re.Pattern[str], str]] = []
        if layout.tensor_parallel == 1:
            return
        plan = getattr(module, "tp_plan", None)
        if not plan:
            raise ValueError(
                f"{type(module).__name__} has no tensor-parallel plan (`tp_plan`), so it is not "
                f"known what tensor_parallel {layout.tensor_parallel} divides; use "
                "tensor_parallel=1, or shards"
            )
        self._styles = [
            (re.compile(re.escape(path).replace(r"\*", r"\d+")), style)
            for path, style in plan.items()
        ]
        config = getattr(module, "config", None)
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % layout.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel {layout.tensor_parallel} does not divide the model's {name}, "
                    f"{heads}; choose a divisor"
                )

    def dimension(self, name: str, parameter: torch.nn.Parameter) -> int | None:
        """The dimension that is divided; None: every rank holds the whole parameter. A style of the
        parameter's own comes first."""
        module, _, own_name = name.rpartition(".")
        style = next(
            (
                style
                for each in (name, module)
                for pattern, style in self._styles
                if pattern.fullmatch(each)
            ),
            None,
        )
        if style is None or style.startswith(_WHOLE):
            return None
        style, dimensions = style.removeprefix("local_").removeprefix("packed_"), parameter.dim()
        if style.startswith("colwise"):
            # the second dimension of fused experts: (experts, out, in)
            return max(dimensions - 2, 0)
        if style.startswith("rowwise"):
            return None if own_name == "bias" or dimensions < 2 else dimensions - 1
        if style in ("embedding_rowwise", "embedding_colwise"):
            return int(style == "embedding_colwise")
        raise ValueError(
            f"it is not known how tensor parallelism of the style {style!r} divides {name!r}; use "
            "tensor_parallel=1"
        )
