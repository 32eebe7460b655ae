"""The storages of a model on one rank, without its values: from a transformers configuration, or from a module on the meta device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from placement.forecasting.layout import ALONE, Layout

Head = Literal["lm", "value"]
"""The end of a model that a configuration describes: a language model's head, or one number a token (a critic, a reward model)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One storage of a model, as the first rank holds it."""

    name: str
    """The name of its first tensor."""
    nbytes: int
    parameters: tuple[torch.nn.Parameter, ...]
    """The parameters in it on the meta device, in this rank's shapes; empty for a buffer."""


def module_of(source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | None, head: Head) -> torch.nn.Module:
    """The module, on the meta device if it is made here.

    Args:
        source: a module, which is returned as it is; a `config.json` of transformers, or a folder with one.
        dtype: of the weights; None: as the configuration says.

    Raises:
        ValueError: the file is no configuration of a model that transformers knows.
        FileNotFoundError: there is no such file.
        ImportError: transformers is not installed.
    """
    if isinstance(source, torch.nn.Module):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    _check(path)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"reading {path} needs transformers: pip install transformers, or give an nn.Module made on the meta device")
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
        if head == "value":
            config.num_labels = 1
            auto = transformers.AutoModelForTokenClassification
        else:
            auto = _class_of(transformers, config)
        dtype = dtype or getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
        with torch.device("meta"):
            module: torch.nn.Module = auto.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"transformers {transformers.__version__} cannot build a model from {path}: {error}") from error
    return module


def _check(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no model configuration {path}; give a config.json or a folder with one") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    missing = [key for key in ("model_type", "architectures") if not (isinstance(content, Mapping) and content.get(key))]
    if missing:
        raise ValueError(f"{path} names no {' and no '.join(missing)}, so it is no configuration of a transformers model")


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that builds the architecture: the auto class for text, else one for text and images."""
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"its architecture {', '.join(config.architectures)} generates no text; give an nn.Module on the meta device")


def parts_of(module: torch.nn.Module, layout: Layout = ALONE, dtype: torch.dtype | None = None) -> list[Part]:
    """The storages of a module as the first rank of a layout holds them, in the order in which a handle takes them in.

    Args:
        dtype: of the floating-point parameters; None: their own.

    Raises:
        ValueError: the layout does not divide the module, or the module has no tensor-parallel plan.
    """
    splits = _Splits(module, layout)
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(module):
        if tensor.numel():
            found.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    parts = []
    for named in found.values():
        held = [(name, each) for name, each in named if isinstance(each, torch.nn.Parameter)]
        own = {id(each): _own(name, each, layout, splits.dimension(name, each), dtype) for name, each in held}
        whole = named[0][1].untyped_storage().nbytes()
        is_as_it_is = all(own[id(each)].shape == each.shape and own[id(each)].dtype == each.dtype for _, each in held)
        nbytes = whole if is_as_it_is else sum(each.numel() * each.itemsize for each in own.values())
        parts.append(Part(named[0][0], nbytes, tuple(own.values())))
    return parts


def _own(name: str, parameter: torch.nn.Parameter, layout: Layout, split: int | None, dtype: torch.dtype | None) -> torch.nn.Parameter:
    shape = layout.part_of(name, tuple(parameter.shape), split)
    own = torch.empty(shape, dtype=dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype, device="meta")
    return torch.nn.Parameter(own, requires_grad=parameter.requires_grad)


def _tensors(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a module: parameters, buffers and plain attributes, submodule by submodule. A tensor comes once."""
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        fields = module.__dict__
        attributes = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        for name, tensor in (*fields["_parameters"].items(), *fields["_buffers"].items(), *attributes.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


class _Splits:
    """The dimension of each parameter that tensor parallelism divides, from the plan that transformers gives a model."""

    def __init__(self, module: torch.nn.Module, layout: Layout) -> None:
        self._styles: list[tuple[re.Pattern[str], str]] = []
        if layout.tensor_parallel == 1:
            return
        plan = getattr(module, "tp_plan", None)
        if not plan:
            raise ValueError(
                f"{type(module).__name__} has no tensor-parallel plan (`tp_plan`), so it is not known what tensor_parallel "
                f"{layout.tensor_parallel} divides; use tensor_parallel=1, or shards"
            )
        self._styles = [(re.compile(re.escape(path).replace(r"\*", r"\d+")), style) for path, style in plan.items()]
        config = getattr(module, "config", None)
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % layout.tensor_parallel:
                raise ValueError(f"tensor_parallel {layout.tensor_parallel} does not divide the model's {name}, {heads}; choose a divisor")

    def dimension(self, name: str, parameter: torch.nn.Parameter) -> int | None:
        module, _, own_name = name.rpartition(".")
        style = next((style for pattern, style in self._styles if pattern.fullmatch(module) or pattern.fullmatch(name)), None)
        if style is None or style.startswith(("replicate", "sequence")):
            return None
        if parameter.dim() <= 2 and style.startswith(("colwise", "packed_colwise", "local_colwise", "embedding_rowwise")):
            return 0
        if parameter.dim() <= 2 and style.startswith(("rowwise", "packed_rowwise", "local_rowwise")):
            return 1 if own_name != "bias" and parameter.dim() == 2 else None
        raise ValueError(f"it is not known how tensor parallelism of the style {style!r} divides {name!r}; use tensor_parallel=1")
