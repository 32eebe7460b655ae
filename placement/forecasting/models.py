"""A model on one rank of a parallel layout, without its values: from a transformers configuration, or from a module on the meta device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from placement.forecasting.description import ALONE, Layout

Head = Literal["lm", "value"]
"""The end of a model that a configuration describes: a language model's head, or one number a token (a critic, a reward model)."""
_AUTO_CLASSES: Mapping[Head, Sequence[str]] = {
    "lm": ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"),
    "value": ("AutoModelForTokenClassification", "AutoModelForSequenceClassification"),
}
"""The classes of transformers that build a model with such a head; the first one that knows the architecture is taken."""


class Part(NamedTuple):
    """One storage of a model, as the first rank holds it, with the name of its first tensor."""

    name: str
    nbytes: int
    parameters: tuple[torch.nn.Parameter, ...]  # the parameters in it on the meta device, in this rank's shapes; empty for a buffer


def module_of(source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | None, head: Head) -> torch.nn.Module:
    """A module as it is, or the one of a `config.json` of transformers (or of a folder with one), on the meta device.

    The dtype is that of the weights; None: as the configuration says. Raises ValueError: it is no configuration that transformers knows;
    FileNotFoundError: there is no such file; ImportError: transformers is not installed.
    """
    if isinstance(source, torch.nn.Module):
        return source
    path = _config_file(source)
    content = _content(path)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"reading {path} needs transformers: pip install transformers, or give an nn.Module made on the meta device")
    transformers = importlib.import_module("transformers")
    if content.get("auto_map") and content["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{path} describes a model whose code comes with its checkpoint (auto_map), and that code is not run; "
            "build the model on the meta device and give it to placement.forecast"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        if head == "value":
            config.num_labels = 1
        auto = _class_of(transformers, config, head)
        dtype = dtype or getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
        with torch.device("meta"):
            module: torch.nn.Module = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # wrong numbers fail anywhere in the model's code, with every kind of exception
        raise ValueError(f"transformers {transformers.__version__} cannot build a model from {path}: {_reason(error)}") from error
    return module


def remarks(source: str | os.PathLike[str] | torch.nn.Module, dtype: torch.dtype | None) -> list[str]:
    """Sentences on what a configuration says and the bytes of its model do not show; none for a module."""
    if isinstance(source, torch.nn.Module):
        return []
    path = _config_file(source)
    content, found = _content(path), []
    if quantization := content.get("quantization_config"):
        method = quantization.get("quant_method", "quantized") if isinstance(quantization, Mapping) else quantization
        found.append(f"{path} has a quantization_config ({method}); the weights are counted as if they were not quantized")
    if dtype is None and not (content.get("dtype") or content.get("torch_dtype")):
        found.append(f"{path} has no dtype; the weights of models that keep its dtype are counted in float32")
    return found


def _config_file(source: str | os.PathLike[str]) -> Path:
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no model configuration {path}; give a config.json or a folder with one (names of a hub are not fetched)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("model_type"), str):
        raise ValueError(f"{path} names no model_type, so it is no configuration of a transformers model")  # noqa: TRY004  # the file is wrong
    return content


def _reason(error: Exception) -> str:
    """The first paragraph of an error in one line, with the error's class where that says something."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _class_of(transformers: Any, config: Any, head: Head) -> Any:
    for name in _AUTO_CLASSES[head]:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    what = "that generates text" if head == "lm" else "with one number a token (a critic, a reward model)"
    raise ValueError(
        f"it has no class {what} for model_type {config.model_type!r}; build the model on the meta device and give it to placement.forecast"
    )


def parts_of(module: torch.nn.Module, layout: Layout = ALONE, dtype: torch.dtype | None = None) -> list[Part]:
    """The storages of a module as the first rank of a layout holds them, in the order in which a handle takes them in.

    The floating-point parameters have the dtype; None: their own. Raises ValueError: the layout does not divide the module.
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
            part = torch.empty(shape, dtype=dtype if dtype is not None and each.is_floating_point() else each.dtype, device="meta")
            own.append(torch.nn.Parameter(part, requires_grad=each.requires_grad))
        is_whole = all((mine.shape, mine.dtype) == (each.shape, each.dtype) for mine, (_, each) in zip(own, held, strict=True))
        nbytes = named[0][1].untyped_storage().nbytes() if is_whole else sum(each.nbytes for each in own)
        parts.append(Part(named[0][0], nbytes, tuple(own)))
    return parts


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


_WHOLE = ("replicate", "sequence", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert", "local_params")
"""The beginnings of the styles of transformers that divide no parameter."""


def undivided(module: torch.nn.Module, layout: Layout) -> list[str]:
    """A sentence where tensor parallelism leaves most of a model whole on every rank, because the model's plan does not name it."""
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
        f"tensor parallelism divides {divided} of the weights of {model}, as its plan in transformers says; every rank has the others whole"
    ]


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
        """The dimension that is divided; None: every rank holds the whole parameter. A style of the parameter's own comes first."""
        module, _, own_name = name.rpartition(".")
        style = next((style for each in (name, module) for pattern, style in self._styles if pattern.fullmatch(each)), None)
        if style is None or style.startswith(_WHOLE):
            return None
        style, dimensions = style.removeprefix("local_").removeprefix("packed_"), parameter.dim()
        if style.startswith("colwise"):
            return max(dimensions - 2, 0)  # of fused experts, (experts, out, in), the second one
        if style.startswith("rowwise"):
            return None if own_name == "bias" or dimensions < 2 else dimensions - 1
        if style in ("embedding_rowwise", "embedding_colwise"):
            return int(style == "embedding_colwise")
        raise ValueError(f"it is not known how tensor parallelism of the style {style!r} divides {name!r}; use tensor_parallel=1")
