"""Models and optimizers for `placement plan`: a configuration file of transformers becomes a model
without values, and a name becomes an optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from placement.forecasting.device import SizedOptimizer, StateOf

Head = Literal["lm", "value"]
"""The end of a model: a language model's head, or one number a token (a critic, a reward model)."""
_AUTO_CLASSES: Mapping[Head, Sequence[str]] = {
    "lm": ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"),
    "value": ("AutoModelForTokenClassification", "AutoModelForSequenceClassification"),
}
"""The classes of transformers that build a model with such a head; the first one that knows the
architecture is taken."""


def _kept_in_fp32(*names: str) -> StateOf:
    """The state of an optimizer that keeps these tensors in fp32 for a parameter of any dtype."""
    return lambda parameter: {
        name: torch.empty(parameter.shape, dtype=torch.float32, device="meta") for name in names
    }


OPTIMIZERS: Mapping[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fp32": lambda parameters: SizedOptimizer(
        parameters, _kept_in_fp32("exp_avg", "exp_avg_sq")
    ),
    "adamw-master": lambda parameters: SizedOptimizer(
        parameters, _kept_in_fp32("master", "exp_avg", "exp_avg_sq")
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
"""Optimizers by name. The state is in the dtype of the weights where the name does not say fp32 or
master; master: with fp32 main weights."""


def module_of(
    source: str | os.PathLike[str], dtype: torch.dtype | None, head: Head = "lm"
) -> torch.nn.Module:
    """The module of a `config.json` of transformers, or of a folder with one, on the meta device.

    The dtype is that of the weights; None: as the configuration says. Raises ValueError: it is no
    configuration that transformers knows; FileNotFoundError: there is no such file; ImportError:
    transformers is not installed.
    """
    path = _config_file(source)
    content = _content(path)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            f"reading {path} needs transformers: pip install transformers, or build the model on "
            "the meta device and use placement.forecast"
        )
    transformers = importlib.import_module("transformers")
    if content.get("auto_map") and content["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{path} describes a model whose code comes with its checkpoint (auto_map), and that "
            "code is not run; build the model on the meta device and use placement.forecast"
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


def remarks(source: str | os.PathLike[str], dtype: torch.dtype | None) -> list[str]:
    """Sentences on what a configuration says and the bytes of its model do not show."""
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
        "device and use placement.forecast"
    )
