"""Publishing PEFT models: weights with the adapters merged in, the adapters alone, or the base
model alone.

Nothing is merged in the model itself. One layer at a time is copied with its full weights, and
PEFT's own `merge` computes in that copy. So nothing has to be unmerged, even after an error, and
every kind of adapter is merged by PEFT's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import copy as shallow
from itertools import pairwise
from typing import Any, Literal

import torch

from placement.frameworks.weights import Computation, ComputedWeight, Reader, Weight
from placement.publish.skeleton import Copier, Shown, Skeleton, key_of, named_places
from placement.tensors.plain import is_a, is_scaled

Adapters = Literal["merged", "separate", "base"]
"""The part of a PEFT model that is published: base with the adapters merged in, the adapters alone,
or the base without adapters."""


def _is_layer(module: object) -> bool:
    return is_a(module, "peft.tuners.tuners_utils", "BaseTunerLayer")


def has_adapters(module: object) -> bool:
    """Whether a module is one of PEFT's: a model, a layer with adapters, or a wrapper that holds a
    trained replacement."""
    return _is_layer(module) or _is_saved(module) or _is_model(module) or _is_around(module)


def _is_model(module: object) -> bool:
    is_mixed = is_a(module, "peft.mixed_model", "PeftMixedModel")
    return is_mixed or is_a(module, "peft.peft_model", "PeftModel")


def _is_around(module: object) -> bool:
    return any(is_a(module, f"peft.tuners.{path}", name) for path, name in _AROUND)


def _is_saved(module: object) -> bool:
    """Whether a module is PEFT's wrapper around a module and its trained replacement
    (modules_to_save, trainable tokens)."""
    return is_a(module, "peft.utils.other", "AuxiliaryTrainingWrapper")


def _layers(module: Any) -> list[Any]:
    """The layers with adapters at a place of the tree: the module and those nested in it, outermost
    first, or a wrapper's."""
    if _is_layer(module):
        return [module, *_layers(module._modules.get("base_layer"))]
    layers = []
    if _is_saved(module):
        for name, part in module.named_modules():
            if name.count(".") <= 1 and _is_layer(part):
                layers.append(part)
    return layers


def _unloaded(layer: Any, *, merge: bool) -> torch.nn.Module:
    """The base layer that PEFT leaves when it unloads the adapters of a copied layer, merged into
    it or not."""
    special = getattr(layer, "unload_and_optionally_merge_module", None)
    if special is not None:
        unloaded: torch.nn.Module = special(merge=merge, safe_merge=False, adapter_names=None)
        return unloaded
    if merge:
        for outer, inner in pairwise(_layers(layer)):  # in the order of PEFT's mixed model
            inner.merge(safe_merge=False, adapter_names=None)
            outer.base_layer = inner.base_layer
        layer.merge(safe_merge=False, adapter_names=None)
    base: torch.nn.Module = layer.get_base_layer()
    return base


_AROUND = (
    ("tuners_utils", "BaseTuner"),
    ("adaption_prompt.model", "AdaptionPromptModel"),
    ("adaption_prompt.layer", "_BaseAdaptedAttention"),
)
"""PEFT's tuners that have the module without adapters in `model`."""


class Unload:
    """Removes PEFT's models and layers from a skeleton, as PEFT does when it unloads adapters.
    ValueError: `adapters` is "base", but they were merged into the base weights; or "merged", but
    they are prompts, which cannot be."""

    def __init__(self, skeleton: Skeleton, adapters: Adapters) -> None:
        self._skeleton = skeleton
        self._adapters = adapters
        self._visited: dict[int, torch.nn.Module] = {}
        self._adapted: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        """The model's own layers that adapt each weight, and its name there, by the weight's key,
        in PEFT's order of merging."""

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module that the skeleton has copied, without adapters. Called before `merged`."""
        module = self._without_models(module)
        if id(module) not in self._visited:
            plain = self._without_layer(module)
            self._visited[id(module)] = plain
            self._visited[id(plain)] = plain
            for name, child in plain._modules.items():
                if child is not None:
                    plain._modules[name] = self.of(child)
        return self._visited[id(module)]

    def merged(self) -> dict[int, Weight]:
        """The weights into which adapters are merged, by the keys of their placeholders."""
        merges: dict[tuple[int, ...], _Merge] = {}
        weights: dict[int, Weight] = {}
        for key, adapted in self._adapted.items():
            layers = [layer for layer, _ in adapted]  # several for a tied weight
            identities = tuple(map(id, layers))
            if identities not in merges:
                merges[identities] = _Merge(self._skeleton.shown, layers)
            _, name = adapted[-1]
            base = self._skeleton.weights[key]
            weights[key] = MergedWeight(base, merges[identities], name)
        return weights

    def _without_models(self, module: torch.nn.Module) -> torch.nn.Module:
        part: Any = module
        while True:
            if _is_model(part):
                if self._adapters == "merged":
                    _refuse_prompts(part)
                part = part._modules["base_model"]
            elif _is_around(part):
                is_xlora = "lora_model" in part._modules
                part = part._modules["lora_model" if is_xlora else "model"]
            else:
                return part  # type: ignore[no-any-return]

    def _without_layer(self, module: Any) -> torch.nn.Module:
        layers = _layers(module)
        if self._adapters == "base":
            for layer in layers:
                for name in layer.merged_adapters:
                    raise ValueError(
                        f"adapters='base': {name!r} is merged into the base weights; call "
                        "unmerge_adapter() first"
                    )
            plain = module.original_module if _is_saved(module) else module
            return _unloaded(plain, merge=False) if _is_layer(plain) else plain
        if not layers and not _is_saved(module):
            return module  # type: ignore[no-any-return]
        base = _unloaded(module, merge=False)
        if layers:
            original = self._skeleton.originals[id(module)]
            for name, place in torch.nn.Module.named_parameters(base):
                self._adapted.setdefault(key_of(place), []).append((original, name))
        return base


def _refuse_prompts(model: Any) -> None:
    for config in model.peft_config.values():
        if config.is_prompt_learning or config.peft_type == "ADAPTION_PROMPT":
            raise ValueError(
                "adapters='merged': learned prompts cannot be merged into weights; publish "
                "adapters='base'"
            )


class _WholeCopier(Copier):
    """Copies a layer with the full value of every tensor, in new memory."""

    def __init__(self, shown: Shown, reader: Reader) -> None:
        super().__init__(shown)
        self._reader = reader
        self._whole: dict[int, torch.Tensor] = {}

    def stand_in(self, weight: Weight) -> torch.Tensor:
        if id(weight) not in self._whole:
            self._whole[id(weight)] = weight.whole(self._reader, weight.dtype)
        return self._whole[id(weight)]

    def attribute(self, value: Any) -> Any:
        """Copy containers, too, because PEFT notes the merged adapters in them. Tensors and modules
        in them are copied like the layer's."""
        if isinstance(value, torch.Tensor):
            return self.stand_in(self.shown.weight(value))
        if isinstance(value, torch.nn.Module):
            return self.copy(value)
        if type(value) in (list, tuple, set):
            return type(value)(map(self.attribute, value))
        if type(value) is dict:
            return {key: self.attribute(entry) for key, entry in value.items()}
        return value


class _Merge(Computation):
    """The merge of one layer, or of several layers that share a weight and so must be merged
    together."""

    def __init__(self, shown: Shown, layers: Sequence[torch.nn.Module]) -> None:
        self.shown = shown
        self.layers = layers
        self.wanted: list[str] = []  # names of the parameters to publish from the merged layer

    def inputs(self) -> Iterator[Weight]:
        for layer in self.layers:
            for part in layer.modules():
                for _, weight in self.shown.parameters(part):
                    if weight is not None:
                        yield weight

    def results(self, reader: Reader) -> dict[str, torch.Tensor]:
        copier = _WholeCopier(self.shown, reader)
        for copy in [copier.copy(layer) for layer in self.layers]:
            try:
                base = _unloaded(copy, merge=not _is_merged(copy))
            except NotImplementedError as error:
                kind = type(copy).__module__
                raise ValueError(
                    f"adapters='merged': PEFT cannot merge {kind}; publish adapters='separate' or "
                    "'base'"
                ) from error
        named = dict(base.named_parameters())
        return {name: named[name].data for name in self.wanted if name in named}


def _is_merged(module: Any) -> bool:
    """Whether the user has merged the adapters, so that the base weights contain them already."""
    for layer in _layers(module):
        if not set(layer.active_adapters) <= set(layer.merged_adapters):
            return False
    return True


class MergedWeight(ComputedWeight):
    """A weight of a base layer with the active adapters merged in, as PEFT merges them."""

    def __init__(self, base: Weight, merge: _Merge, name: str) -> None:
        super().__init__(merge, name, base)
        merge.wanted.append(name)

    @property
    def problem(self) -> str | None:
        if is_scaled(self.dtype):
            return (
                f"is stored as {self.dtype}, into which PEFT cannot merge; publish "
                "adapters='base', then adapters='separate'"
            )
        return super().problem


def separate(
    skeleton: Skeleton,
    root: torch.nn.Module,
) -> list[tuple[str, torch.Tensor]]:
    """Name and placeholder of each weight of the active adapter, under the names with which PEFT
    saves and loads them. `root` is the root as the skeleton has copied it. ValueError: there is no
    adapter, several are active, or PEFT saves a computed value instead of a weight."""
    model = _model_with_adapters(root)
    name = _active_adapter(model)
    config = shallow(model.peft_config[name])  # PEFT changes it on saving
    if config.is_prompt_learning:
        parameters = dict(model.prompt_encoder[name].named_parameters())
        if [*parameters] == ["embedding.weight"]:
            config.inference_mode = True  # the prompt is a weight, which PEFT then takes as it is
    model.peft_config = {**model.peft_config, name: config}
    export: Any = vars(sys.modules["peft.utils.save_and_load"])["get_peft_model_state_dict"]
    saved: dict[str, torch.Tensor] = {}
    computed = []
    try:
        # Embeddings of the base model are not part of the adapter, and PEFT would look for them on
        # a model hub.
        saved = export(
            model,
            state_dict=dict(named_places(model)),
            adapter_name=name,
            save_embedding_layers=False,
        )
        for saved_name, place in saved.items():
            if key_of(place) not in skeleton.weights:
                computed.append(saved_name)
    except (NotImplementedError, RuntimeError):  # placeholders have no values
        computed = ["all of it"]
    if computed:
        raise ValueError(
            f"adapters='separate': PEFT computes what it saves of {name!r} "
            f"({config.peft_type.value}: {computed[0]}), so it is not a weight; publish "
            "adapters='merged', or for prompts send what get_peft_model_state_dict() returns in a "
            "phase that loads the model"
        )
    return list(saved.items())


def _model_with_adapters(root: torch.nn.Module) -> Any:
    for part in root.modules():
        if isinstance(getattr(part, "peft_config", None), dict):
            return part
    raise ValueError(
        "adapters='separate' publishes the adapters of a PEFT model, but this module has none; "
        "publish adapters='merged'"
    )


def _active_adapter(model: Any) -> str:
    """The name of the one active adapter. ValueError: several are active."""
    active: dict[str, None] = {}
    for part in model.modules():
        if _is_layer(part) or _is_saved(part):
            active.update(dict.fromkeys(part.active_adapters))
    if not active:  # prompts have no layers
        # a name in a PEFT model, a method in a model of transformers
        name = getattr(model, "active_adapter", None)
        active = dict.fromkeys([name] if isinstance(name, str) else model.peft_config)
    if len(active) != 1:
        raise ValueError(
            f"adapters='separate' publishes one active adapter, but {len(active)} are active "
            f"({', '.join(active)}): call set_adapter()"
        )
    return next(iter(active))
