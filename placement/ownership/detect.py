"""Refuse objects that cannot be registered, and detect optimizers whose state a framework moves. The frameworks say which these are.

Frameworks are recognised by their classes, which are looked up only if they are imported already. None is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from placement.core.errors import RegistrationError
from placement.frameworks.base import Advised
from placement.frameworks.known import answering

TRACK = "or register it with external=True to have it tracked and never moved"
_PLAIN_MODULES = "torch.nn.Module objects, also compiled, quantised, with adapters, under DDP, FSDP1, FSDP2, tensor parallel, DeepSpeed"
_PLAIN_OPTIMIZERS = "the optimizers of torch.optim and their like, and wrappers that hold them"


def _refusal(name: str, where: str, found: str, supported: str, advice: str) -> RegistrationError:
    return RegistrationError(f"{name!r}{where}: {found} is not supported now. Supported: {supported}. What to do: {advice}.")


def refuse_module(name: str, module: torch.nn.Module) -> None:
    """Refuse a module that a framework shards, wraps or moves in a way that placement does not support.

    Raises:
        RegistrationError: the module is refused; the message says what was found and where, what is supported, and what to do.
    """
    refused = [advised for each in answering("refused_modules") for advised in each.refused_modules]
    asked = answering("refuse_part")
    answers: dict[type, Advised | None] = {}
    for path, part in module.named_modules():
        where = f" (submodule {path!r})" if path else ""
        cls = type(part)
        if cls not in answers:
            answers[cls] = next((advised for advised in refused if advised.cls.is_of(part)), None)
        if (advised := answers[cls]) is not None:
            raise _refusal(name, where, f"{cls.__module__}.{cls.__qualname__}", _PLAIN_MODULES, advised.advice)
        for each in asked:
            if (reason := each.refuse_part(part)) is not None:
                found, advice = reason
                raise _refusal(name, where, found, _PLAIN_MODULES, f"{advice}, {TRACK}")


def captured_collectives() -> str | None:
    """A warning that CUDA graphs with collectives may hang after a handle has moved, and what to do; None if they cannot.

    NCCL registers the buffers of a captured collective by the physical memory behind them, unless NCCL_GRAPH_REGISTER is 0. placement
    cannot see what a graph has captured, so it warns whenever NCCL is in use.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    if "nccl" not in str(distributed.get_backend_config()).lower():
        return None
    return (
        "NCCL is in use and NCCL_GRAPH_REGISTER is not 0: a CUDA graph that captures a collective over registered memory may hang when "
        "it is replayed after that memory was offloaded and loaded. If you capture any, set NCCL_GRAPH_REGISTER=0 before NCCL starts."
    )


def refuse_optimizer(name: str, objects: Sequence[object]) -> None:
    """Refuse an optimizer if it, or one inside it, keeps state where placement cannot find it or must not move it.

    Raises:
        RegistrationError: the optimizer is refused; the message says what was found, what is supported, and what to do.
    """
    for obj in objects:
        for each in answering("refuse_optimizer"):
            if (reason := each.refuse_optimizer(obj)) is not None:
                found, advice = reason
                where = f"{type(obj).__module__}.{type(obj).__qualname__}{found}"
                raise _refusal(name, "", where, _PLAIN_OPTIMIZERS, f"{advice}, {TRACK}")


def external_optimizer(objects: Sequence[object], parameters: Sequence[torch.Tensor], compute_device: torch.device) -> str | None:
    """The reason why a framework itself moves an optimizer's state; None if it does not."""
    known = [advised for each in answering("external_optimizers") for advised in each.external_optimizers]
    for obj in objects:
        if (reason := next((advised.advice for advised in known if advised.cls.is_of(obj)), None)) is not None:
            return reason
    reasons = (each.places_state_of(parameters, compute_device) for each in answering("places_state_of"))
    return next((reason for reason in reasons if reason is not None), None)
