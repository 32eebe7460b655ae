"""Publish the weights of a model of transformers as its checkpoint has them.

transformers 5 packs the experts of a layer into one parameter, and renames parameters.
`save_pretrained` undoes that. A sync must do the same if its receiver knows the names of
checkpoints. Loaders of rollout engines do, and some skip a name that they do not know.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from placement.frameworks.weights import Computation, ComputedWeight, Reader, Weight
from placement.tensors.plain import is_a

Names = Literal["module", "checkpoint"]
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_Tensors = dict[str, torch.Tensor]
_Revert = Callable[[_Tensors], _Tensors]
"""transformers' conversion of the tensors of a model, by name, to those of its checkpoint."""


def in_checkpoint(
    model: Any,
    weights: Sequence[tuple[str, Weight]],
) -> list[tuple[str, Weight]]:
    """Name and weight of everything that `save_pretrained` would write: the weights outside of
    layers, then layer by layer, as engines take them in.

    `model` is a copy of the model's structure without adapters, of the model's class; its list of
    conversions is filled in. `weights` are those published under the module's own names. Raises
    ValueError: the module is no model of transformers 5, or a quantised weight would have to be
    converted.
    """
    if not is_a(model, "transformers.modeling_utils", "PreTrainedModel"):
        raise ValueError(
            f"names='checkpoint' is for models of transformers, not for {type(model).__name__}; "
            "publish names='module'"
        )
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        conversions: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError as error:
        raise ValueError(
            "names='checkpoint' needs transformers 5; earlier versions pack no experts: publish "
            "names='module'"
        ) from error
    if getattr(model, "_weight_conversions", None) is None:
        # As `revert_weight_conversion` finds them for a model that was not loaded; here once, and
        # not in each call.
        mapping = conversions.get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [
            conversion for conversion in mapping if not isinstance(conversion, loading.PrefixChange)
        ]
    revert = partial(loading.revert_weight_conversion, model)
    renamed, converted = _by_conversion(loading, model, weights)
    pairs = [*zip(_placeholders(revert, renamed), renamed.values(), strict=True)]
    for parts in converted:
        pairs += _converted(revert, parts)

    def layer_key(pair: tuple[str, Weight]) -> Any:
        layer = _LAYER.match(pair[0])
        return loading.dot_natural_key(layer[0] if layer else "")

    return sorted(pairs, key=layer_key)


def _by_conversion(
    loading: Any, model: Any, weights: Sequence[tuple[str, Weight]]
) -> tuple[dict[str, Weight], list[dict[str, Weight]]]:
    """The weights that are renamed at most, and those that are converted together, by their own
    names."""
    converters = []
    for conversion in reversed(model._weight_conversions):
        if isinstance(conversion, loading.WeightConverter):
            converters.append(conversion.reverse_transform())
    left_out = set(model._keys_to_ignore_on_save or ())
    renamed: dict[str, Weight] = {}
    converted: dict[str, dict[str, Weight]] = {}
    for name, weight in sorted(weights, key=lambda pair: loading.dot_natural_key(pair[0])):
        if name in left_out:
            continue
        new_name, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            renamed[name] = weight
        else:
            converted.setdefault(new_name, {})[name] = weight
    return renamed, list(converted.values())


def _converted(revert: _Revert, parts: dict[str, Weight]) -> Iterator[tuple[str, Weight]]:
    """Name and weight in the checkpoint of weights that are converted together."""
    for name, weight in parts.items():
        if weight.is_wrapper:
            raise ValueError(
                f"names='checkpoint': {name!r} is quantised, and its values cannot be converted; "
                "publish names='module'"
            )
    conversion = _Conversion(revert, parts)
    for name, place in _placeholders(revert, parts).items():
        converted = ComputedWeight(conversion, name, place)
        converted.keeps_dtype = any(weight.keeps_dtype for weight in parts.values())
        yield name, converted


def _placeholders(revert: _Revert, parts: dict[str, Weight]) -> _Tensors:
    """The tensors of the checkpoint that these weights become, on the meta device; in the same
    order if they are only renamed."""
    places = {}
    for name, weight in parts.items():
        places[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return revert(places)


class _Conversion(Computation):
    """The conversion of weights that a checkpoint has in another form, such as the packed experts
    of a layer."""

    def __init__(self, revert: _Revert, parts: dict[str, Weight]) -> None:
        self._revert = revert
        self._parts = parts

    def inputs(self) -> Iterable[Weight]:
        return self._parts.values()

    def results(self, reader: Reader) -> _Tensors:
        whole = {}
        for name, weight in self._parts.items():
            whole[name] = weight.whole(reader, weight.dtype)
        return self._revert(whole)
