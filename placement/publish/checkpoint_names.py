"""Publish the weights of a model of transformers as its checkpoint has them.

transformers 5 packs the experts of a layer into one parameter, and renames parameters.
`save_pretrained` undoes that. So must a sync whose receiver knows the names of checkpoints, as
loaders of rollout engines do: some skip a name that they do not know.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from placement.frameworks.weights import Computation, ComputedWeight, Reader, Weight
from placement.tensors.plain import is_a

Names = Literal["module", "checkpoint"]
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def in_checkpoint(model: Any, weights: Sequence[tuple[str, Weight]]) -> list[tuple[str, Weight]]:
    """Name and weight of everything that `save_pretrained` would write: what is in no layer, then
    layer by layer, as engines take it in. `model` is a copy of the model's structure without
    adapters, of the model's class; its list of conversions is filled in. `weights` are those
    published under the module's own names. Raises ValueError: the module is no model of
    transformers 5, or a quantised weight would have to be converted."""
    if not is_a(model, "transformers.modeling_utils", "PreTrainedModel"):
        raise ValueError(
            f"names='checkpoint' is for models of transformers, not for {type(model).__name__}; "
            "publish names='module'"
        )
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError as error:
        raise ValueError(
            "names='checkpoint' needs transformers 5; earlier versions pack no experts: publish "
            "names='module'"
        ) from error
    if getattr(model, "_weight_conversions", None) is None:
        # As `revert_weight_conversion` finds them for a model that was not loaded; found once here,
        # and not in each call.
        found = mapping.get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [
            each for each in found if not isinstance(each, loading.PrefixChange)
        ]
    converters = [
        each.reverse_transform()
        for each in reversed(model._weight_conversions)
        if isinstance(each, loading.WeightConverter)
    ]
    left_out = set(model._keys_to_ignore_on_save or ())
    # the weights that are converted together, and under "" those that are renamed at most
    together: dict[str, dict[str, Weight]] = {}
    for name, weight in sorted(weights, key=lambda each: loading.dot_natural_key(each[0])):
        if name not in left_out:
            renamed, pattern = loading.apply_converters(name, converters)
            together.setdefault("" if pattern is None else renamed, {})[name] = weight
    renamed_only = together.pop("", {})
    pairs = [*zip(_placeholders(loading, model, renamed_only), renamed_only.values(), strict=True)]
    for parts in together.values():
        if quantized := next((name for name, weight in parts.items() if weight.is_wrapper), None):
            raise ValueError(
                f"names='checkpoint': {quantized!r} is quantised, and its values cannot be "
                "converted; publish names='module'"
            )
        conversion = _Conversion(loading, model, parts)
        for name, place in _placeholders(loading, model, parts).items():
            converted = ComputedWeight(conversion, name, place)
            converted.keeps_dtype = any(weight.keeps_dtype for weight in parts.values())
            pairs.append((name, converted))
    layers = {name: found[0] if (found := _LAYER.match(name)) else "" for name, _ in pairs}
    return sorted(pairs, key=lambda pair: loading.dot_natural_key(layers[pair[0]]))


def _placeholders(loading: Any, model: Any, parts: dict[str, Weight]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that these weights become, on the meta device; in the same
    order if they are only renamed."""
    places = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for name, weight in parts.items()
    }
    found: dict[str, torch.Tensor] = loading.revert_weight_conversion(model, places)
    return found


class _Conversion(Computation):
    """The conversion of weights that a checkpoint has in another form, such as the packed experts
    of a layer."""

    def __init__(self, loading: Any, model: Any, parts: dict[str, Weight]) -> None:
        self._loading, self._model, self._parts = loading, model, parts

    def inputs(self) -> Iterable[Weight]:
        return self._parts.values()

    def results(self, reader: Reader) -> dict[str, torch.Tensor]:
        whole = {part: weight.whole(reader, weight.dtype) for part, weight in self._parts.items()}
        found: dict[str, torch.Tensor] = self._loading.revert_weight_conversion(self._model, whole)
        return found
