"""Models and optimizers for `placement plan`: a configuration file of transformers becomes a model
without values, and a name becomes an optimizer."""

from __future__ import annotations

import importlib
import importlib.util
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

    def state_of(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {}
        for name in names:
            state[name] = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
        return state

    return state_of


_Maker = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, _Maker] = {
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
    """The model of a `config.json` of transformers, or of a folder with one, on the meta device.

    Args:
        dtype: of the weights; None: as the configuration says.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: transformers is not installed.
        ValueError: transformers cannot build the model without code of its checkpoint, or the
            weights are quantized.
    """
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():  # transformers would look for it on a hub
        raise FileNotFoundError(
            f"there is no model configuration {path}; give a config.json or a folder with one "
            "(names of a hub are not fetched)"
        )
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            f"reading {path} needs transformers: pip install transformers, or build the model on "
            "the meta device and use placement.forecast"
        )
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        if head == "value":
            config.num_labels = 1
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            cls = _auto_class(transformers, config, head)
            model: torch.nn.Module
            model = cls.from_config(config, dtype=dtype, trust_remote_code=False)
    # wrong numbers fail anywhere in the model's code, with every kind of exception
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(
            f"transformers {transformers.__version__} cannot build a model from {path} "
            f"({type(error).__name__}: {reason}); build it on the meta device and use "
            "placement.forecast"
        ) from error
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{path} has a quantization_config, and the bytes of quantized weights are not known; "
            "leave it out to count the weights as if they were not quantized"
        )
    return model


def _auto_class(transformers: Any, config: Any, head: Head) -> Any:
    for name in _AUTO_CLASSES[head]:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    description = "that generates text" if head == "lm" else "with one number a token"
    raise ValueError(f"it has no class {description} for model_type {config.model_type!r}")
