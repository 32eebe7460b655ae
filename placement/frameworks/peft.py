"""PEFT: adapters, which it changes together with numbers and lists that Python code keeps about
them (scalings, merged adapters). While the tensors are offloaded, such a change is refused as a
whole: a write into poison would be lost, and the numbers would be changed."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from placement.frameworks.base import Framework, Named, Reading

_LAYER = Named("peft.tuners.tuners_utils", "BaseTunerLayer")
_TUNER = Named("peft.tuners.tuners_utils", "BaseTuner")
_MODELS = (Named("peft.peft_model", "PeftModel"), Named("peft.mixed_model", "PeftMixedModel"))
_OF_TRANSFORMERS = Named("transformers.integrations.peft", "PeftAdapterMixin")

_MERGED = "merged with its adapters"
_COMPUTED = "given an adapter that is computed from its weights"
_WRITTEN = "given the weights of an adapter"
_SAVED = "saved by PEFT, which reads tensors past the state dict"
_PROMPTED = "asked for its prompt"

_MERGING = ("merge_adapter", "unmerge_adapter", "merge_and_unload")
_FUNCTIONS = (
    (Named("peft.utils.hotswap", "hotswap_adapter_from_state_dict"), _WRITTEN),
    (Named("peft.utils.hotswap", "prepare_model_for_compiled_hotswap"), "padded"),
    (Named("peft.utils.loftq_utils", "replace_lora_weights_loftq"), _COMPUTED),
    (Named("peft.tuners.lora.eva", "initialize_lora_eva_weights"), _COMPUTED),
    (Named("peft.tuners.lora.intruders", "reduce_intruder_dimension"), _COMPUTED),
    (Named("peft.tuners.lora.conversion", "convert_to_lora"), "converted to LoRA"),
    *((Named(model.module, f"{model.name}.from_pretrained"), _WRITTEN) for model in _MODELS),
    *((Named(_TUNER.module, f"{_TUNER.name}.{name}"), _MERGED) for name in _MERGING),
    (Named("peft.tuners.lora.model", "LoraModel.add_weighted_adapter"), _COMPUTED),
)
"""Functions that change or convert adapters, and methods of tuners, which may be made after the
model was registered. Each reads all modules of the model before."""
_INJECT = Named(_TUNER.module, f"{_TUNER.name}.inject_adapter")

_COMPUTED_TYPES = frozenset(
    {"ADAMSS", "DEFT", "DELORA", "FROD", "LN_TUNING", "OSF", "PSOFT", "SUPERTUNING", "TINYLORA"}
    | {"TRAINABLE_TOKENS"}
)
_COMPUTED_INITS = ("pissa", "corda", "mica", "loftq", "lora_ga", "olora")
"""Types of adapters, and beginnings of values of `init_lora_weights`, that read weights."""


class PEFT(Framework):
    """PEFT's models, tuners and layers, also those that were put into a model without its own."""

    packages = ("peft",)

    @classmethod
    def reading_methods(cls, obj: object) -> Mapping[str, Reading]:
        if _LAYER.is_of(obj):
            return {
                **dict.fromkeys(("merge", "unmerge"), _MERGED),
                "get_delta_weight": _COMPUTED,
                **cls.reading_methods_of_root(),
            }
        if _TUNER.is_of(obj):
            return {
                **dict.fromkeys(_MERGING, _MERGED),
                "set_adapter": _change_by_set_adapter,
                "inject_adapter": _change_by_inject_adapter,
                "add_weighted_adapter": _COMPUTED,
                **dict.fromkeys(
                    ("update_and_allocate", "resize_modules_by_rank_pattern"), "pruned"
                ),
            }
        if any(named.is_of(obj) for named in _MODELS):
            return {
                "load_adapter": _WRITTEN,
                "save_pretrained": _read_by_saving,
                **dict.fromkeys(("get_prompt", "get_prompt_embedding_to_save"), _PROMPTED),
                **cls.reading_methods_of_root(),
            }
        return {"add_adapter": _change_by_add_adapter} if _OF_TRANSFORMERS.is_of(obj) else {}

    @classmethod
    def reading_methods_of_root(cls) -> Mapping[str, Reading]:
        return {"named_modules": _change_under_way}


def _code_of(function: Named) -> Any:
    value: Any = sys.modules.get(function.module)
    for name in function.name.split("."):
        value = getattr(value, name, None)
    # not a decorator's code: all functions under torch.no_grad() share that
    return None if value is None else inspect.unwrap(value).__code__


def _change_under_way(model: Any, *_: Any) -> str | None:
    """The change that PEFT is making where it asks for the modules, if it makes one."""
    running = {frame.f_code: frame for frame, _ in traceback.walk_stack(None)}
    for function, change in _FUNCTIONS:
        if _code_of(function) in running:
            return change
    injecting = running.get(_code_of(_INJECT))
    if injecting is not None:
        arguments = injecting.f_locals
        return _change_by_config(arguments["self"].peft_config[arguments["adapter_name"]])
    saving = Named("peft.utils.save_and_load", "get_peft_model_state_dict")
    return _read_by_saving(model) if _code_of(saving) in running else None


def _read_by_saving(model: Any, _: Any = (), kwargs: Any = None) -> str | None:
    """Prompts' embeddings and SHiRA's indices are in no state dict. Where PEFT converts an adapter,
    it loads the initial one into the model."""
    if kwargs and kwargs.get("path_initial_model_for_weight_conversion") is not None:
        return _WRITTEN
    configs = getattr(model, "peft_config", {}).values()
    reads_past = any(config.is_prompt_learning or config.peft_type == "SHIRA" for config in configs)
    return _SAVED if reads_past else None


def _change_by_set_adapter(tuner: Any, *_: Any) -> str | None:
    """Merged layers are unmerged before other adapters become active."""
    is_merged = any(part.merged for part in tuner.modules() if _LAYER.is_of(part))
    return _MERGED if is_merged else None


def _change_by_inject_adapter(
    tuner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    name = kwargs["adapter_name"] if "adapter_name" in kwargs else args[1]
    return _change_by_config(tuner.peft_config[name])


def _change_by_add_adapter(
    _: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    return _change_by_config(kwargs["adapter_config"] if "adapter_config" in kwargs else args[0])


def _change_by_config(config: Any) -> str | None:
    """The change that an adapter of this configuration makes of weights; None if none."""
    if getattr(config, "modules_to_save", None):
        return "copied or pickled, as modules_to_save does"
    reads_weights = (
        getattr(config, "peft_type", None) in _COMPUTED_TYPES
        or str(getattr(config, "init_lora_weights", "")).startswith(_COMPUTED_INITS)
        or getattr(config, "use_dora", False)
        or getattr(config, "kasa_config", None) is not None
        or getattr(config, "trainable_token_indices", None) is not None
    )
    return _COMPUTED if reads_weights else None
