"""Publishing PEFT models: with adapters merged in, adapters alone, base alone. The reference is
what PEFT itself merges and saves."""

from __future__ import annotations

import collections
import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from placement import RegistrationError
from placement.testing import assert_nothing_resident
from tests.sharded import publish_worker as worker
from tests.sharded.publish_worker import assert_same, manager_of, placed, read, wanted_of
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks
from tests.support.sweeps import few

peft = needs("peft")
transformers = needs("transformers")


class Experts(torch.nn.Module):
    """Weights of several experts in one parameter, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(3, 8, 8))
        self.down = torch.nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up @ self.down).sum(0)


class Zoo(torch.nn.Module):
    """A layer of each kind that adapters know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 8)
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.turned = transformers.pytorch_utils.Conv1D(8, 8)
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.experts = Experts()
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(tokens))))


def randomize(model: torch.nn.Module, fixed: Collection[torch.Tensor] = ()) -> Any:
    """Adapters start as nothing: give them values."""
    generator = torch.Generator().manual_seed(7)
    known = {tensor.data_ptr() for tensor in fixed}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.data_ptr() not in known:
            parameter.data.add_(
                torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
            )
    return model


def lora(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 2, "lora_alpha": 3, "target_modules": ["first", "second"], **options}
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "bias": lambda: lora(target_modules=["first"], lora_bias=True),
    "bias of the base": lambda: lora(bias="lora_only"),
    "turned": lambda: lora(target_modules=["turned"], fan_in_fan_out=True),
    "conv": lambda: lora(target_modules=["conv"]),
    "attention": lambda: lora(target_modules=["attention"]),
    "embed": lambda: lora(target_modules=["embed", "first"]),
    "tied": lambda: lora(target_modules=["embed", "head"]),
    "experts": lambda: lora(target_modules=[], target_parameters=["experts.up", "experts.down"]),
    "saved": lambda: lora(modules_to_save=["norm", "second"], target_modules=["first"]),
    "tokens": lambda: lora(trainable_token_indices={"embed": [1, 4]}),
    "ia3": lambda: peft.IA3Config(
        target_modules=["first", "second"], feedforward_modules=["second"]
    ),
    "lokr": lambda: peft.LoKrConfig(target_modules=["first"], r=2),
    "vera": lambda: peft.VeraConfig(target_modules=["first", "second"], r=2),
    "adalora": lambda: peft.AdaLoraConfig(
        target_modules=["first"], init_r=4, target_r=2, total_step=9
    ),
    # the layers share a weight
    "randlora": lambda: peft.RandLoraConfig(target_modules=["first", "second"], r=2),
}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without PEFT's warnings about what the reference does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    base = Zoo().to(dtype)
    fixed = list(base.parameters())
    with quietly():
        return randomize(peft.get_peft_model(base, CONFIGS[name]()), fixed=fixed)


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    with quietly():
        return wanted_of(copy.deepcopy(model).merge_and_unload())


def saved_by_peft(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    with quietly():
        found = peft.get_peft_model_state_dict(
            model, adapter_name=adapter, save_embedding_layers=False
        )
    return {name: value.clone() for name, value in found.items()}


def base_values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return wanted_of(Zoo().to(dtype))


@pytest.mark.parametrize(
    "name",
    few(CONFIGS, "lora", "conv", "tied", "experts", "ia3"),
)
def test_each_kind_of_adapter_as_peft_merges_and_saves_it(name: str) -> None:
    for streams in (False, True):
        model = make(name)
        wanted = {"merged": merged_by_peft(model), "separate": saved_by_peft(model)}
        before = wanted_of(model)
        manager, actor = placed(model, streams=streams)
        with manager.phase("weight_sync"):
            for adapters, values in wanted.items():
                found = read(actor, adapters=adapters, bucket_bytes=300)
                assert_same(dict(sorted(found.items())), dict(sorted(values.items())))
            base = read(actor, adapters="base")
            assert set(wanted["merged"]) == set(base)
            # else it would compare nothing
            assert any(not value.equal(base[key]) for key, value in wanted["merged"].items())
        assert_same(dict(sorted(base.items())), dict(sorted(base_values().items())))
        assert_nothing_resident(manager)
        with manager.phase("log_prob"):
            assert_same(wanted_of(model), before)
            assert not any(
                layer.merged_adapters
                for layer in model.modules()
                if hasattr(layer, "merged_adapters")
            )


def with_two() -> Any:
    model = make("lora")
    fixed = list(model.parameters())
    model.add_adapter("other", lora(target_modules=["second", "turned"], r=3, fan_in_fan_out=True))
    with quietly():
        return randomize(model, fixed=fixed)


def test_the_active_adapters_are_merged_whichever_they_are_between_two_syncs() -> None:
    model = with_two()
    manager, actor = placed(model)

    def check(wanted: dict[str, torch.Tensor], **options: Any) -> None:
        with manager.phase("weight_sync"):
            assert_same(read(actor, **options), wanted)
        assert_nothing_resident(manager)

    def resident(function: Callable[[Any], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        with manager.phase("log_prob"):
            return function(copy.deepcopy(model))

    check(resident(merged_by_peft))
    model.set_adapter("other")
    check(resident(merged_by_peft))
    check(resident(lambda each: saved_by_peft(each, "other")), adapters="separate")
    model.base_model.set_adapter(["default", "other"])
    both = resident(merged_by_peft)
    check(both)
    with (
        manager.phase("weight_sync"),
        pytest.raises(ValueError, match=r"2 are active \(default, other\): call set_adapter"),
    ):
        actor.weights(adapters="separate")
    with pytest.raises(ValueError, match="set_adapter"):
        actor.weights_info(adapters="separate")
    # what computes without them is another question than what is published
    with model.disable_adapter():
        check(both)
    model.delete_adapter("default")
    check(resident(merged_by_peft))


def test_what_the_user_has_merged_is_published_as_it_is_and_its_base_is_not_made_up() -> None:
    model = with_two()
    wanted = merged_by_peft(model)
    manager, actor = placed(model)
    sgd = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    manager.register("sgd", sgd)
    with manager.phase("train") as phase:
        model.merge_adapter()
        phase.switch("weight_sync")
        assert_same(read(actor), wanted)
        with pytest.raises(
            ValueError,
            match=r"'default' is merged into the "
            r"base "
            r"weights; "
            r"call "
            r"unmerge_adapter\(\)",
        ):
            actor.weights(adapters="base")
        phase.switch("train")
        assert model.base_model.model.first.merged
        with quietly():
            model.unmerge_adapter()
    assert_nothing_resident(manager)


def test_a_merge_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("lora")
    wanted, before = merged_by_peft(model), wanted_of(model)
    manager, actor = placed(model)
    layer = type(model.base_model.model.second)
    real = layer.get_delta_weight

    def fail(self: Any, adapter: str) -> torch.Tensor:
        if not self.lora_A[adapter].weight.equal(
            model.base_model.model.first.lora_A[adapter].weight
        ):
            raise RuntimeError("out of memory")
        delta: torch.Tensor = real(self, adapter)
        return delta

    with monkeypatch.context() as patch:
        patch.setattr(layer, "get_delta_weight", fail)
        with manager.phase("weight_sync"), pytest.raises(RuntimeError, match="out of memory"):
            read(actor, bucket_bytes=1)
        assert_nothing_resident(manager)
    with manager.phase("weight_sync"):
        assert_same(read(actor), wanted)
        assert_same(wanted_of(model), before)


def test_models_without_adapters_and_adapters_without_weights() -> None:
    plain = torch.nn.Linear(4, 4)
    wanted = wanted_of(plain)
    manager, actor = placed(plain)
    config = peft.PromptTuningConfig(
        num_virtual_tokens=2, token_dim=4, num_layers=1, num_attention_heads=1
    )
    prompted = peft.PeftModel(Lm(), config)
    prompts = manager.register("prompts", prompted, role="actor")
    with manager.phase("weight_sync"):
        for adapters in ("merged", "base"):
            assert_same(read(actor, adapters=adapters), wanted)
        with pytest.raises(ValueError, match="this module has none"):
            actor.weights(adapters="separate")
        with pytest.raises(ValueError, match="prompts cannot be merged into weights"):
            prompts.weights()
        assert list(read(prompts, adapters="base")) == ["word_embeddings.weight"]
        with pytest.raises(ValueError, match="'all' must be one of merged, separate, base"):
            actor.weights(adapters="all")


MIXED: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(target_modules=["first", "second"], r=2),
    "dora": lambda: peft.LoraConfig(target_modules=["first"], r=2, use_dora=True),
    "loha": lambda: peft.LoHaConfig(target_modules=["first"], r=2),
    "lokr": lambda: peft.LoKrConfig(target_modules=["first", "second"], r=2),
    "oft": lambda: peft.OFTConfig(target_modules=["first"], oft_block_size=4),
    "adalora": lambda: peft.AdaLoraConfig(
        target_modules=["first"], init_r=2, target_r=1, total_step=9
    ),
}


@pytest.mark.parametrize(
    "kinds",
    few(
        [("lora", "lokr"), ("loha", "dora"), ("lora", "adalora"), ("oft", "lora", "lokr")],
        ("loha", "dora"),
        ("oft", "lora", "lokr"),
    ),
    ids="-".join,
)
def test_adapters_of_several_kinds_on_one_layer_as_peft_merges_them(kinds: Sequence[str]) -> None:
    base = Zoo()
    fixed, plain = list(base.parameters()), wanted_of(base)
    with quietly():
        model = peft.get_peft_model(base, MIXED[kinds[0]](), adapter_name=kinds[0], mixed=True)
        for kind in kinds[1:]:
            model.add_adapter(kind, MIXED[kind]())
        randomize(model, fixed=fixed)
    for active in (kinds, kinds[::-1], kinds[-1:]):
        model.set_adapter(list(active))
        wanted = merged_by_peft(model)
        for streams in (False, True):
            own = copy.deepcopy(model)
            manager, actor = placed(own, streams=streams)
            with manager.phase("weight_sync"):
                assert_same(read(actor), wanted)
                assert_same(
                    dict(sorted(read(actor, adapters="base").items())), dict(sorted(plain.items()))
                )
    model.set_adapter(list(kinds))
    with quietly():
        model.base_model.model.first.base_layer.merge()  # the adapter that is nested, alone
    wanted = merged_by_peft(model)
    manager, actor = placed(model)
    with manager.phase("weight_sync"), quietly():
        assert_same(read(actor), wanted)
        with pytest.raises(
            ValueError,
            match=r"is merged into the base weights; call unmerge_adapter\(\)",
        ):
            actor.weights(adapters="base")


PROMPT = {
    "num_virtual_tokens": 3,
    "token_dim": 4,
    "num_layers": 1,
    "num_attention_heads": 1,
    "task_type": "CAUSAL_LM",
}
PROMPTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "prompt": (lambda: peft.PromptTuningConfig(**PROMPT), True),
    "prefix": (lambda: peft.PrefixTuningConfig(**PROMPT), True),
    "multitask": (
        lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, num_ranks=1, **PROMPT),
        True,
    ),
    "projected prefix": (
        lambda: peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=4, **PROMPT),
        False,
    ),
    "p-tuning": (lambda: peft.PromptEncoderConfig(encoder_hidden_size=4, **PROMPT), False),
    "cpt": (
        lambda: peft.CPTConfig(
            cpt_token_ids=[1, 2, 3], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1, 2, 3], **PROMPT
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_published_alone_where_it_is_a_weight_and_refused_where_peft_computes_it(
    name: str,
) -> None:
    make_config, is_weight = PROMPTS[name]
    with quietly():
        model = randomize(peft.PeftModel(Lm(), make_config()))
    wanted, base = saved_by_peft(model), wanted_of(model.base_model)
    for streams in (False, True):
        own = copy.deepcopy(model)
        manager, actor = placed(own, streams=streams)
        with manager.phase("weight_sync"):
            if is_weight:
                assert_same(read(actor, adapters="separate"), wanted)
            else:
                for ask in (actor.weights, actor.weights_info):
                    with pytest.raises(
                        ValueError,
                        match=r"PEFT computes what it saves of 'default' "
                        rf"\({own.peft_config['default'].peft_type.value}",
                    ):
                        ask(adapters="separate")
            assert_same(read(actor, adapters="base"), base)


def test_ranks_that_adalora_has_pruned_are_refused_alone_and_merged_as_peft_merges_them() -> None:
    model = make("adalora")
    layer = model.base_model.model.first
    layer.lora_E["default"].data[1:3] = 0
    model.peft_config["default"].rank_pattern = pattern = {
        "first.lora_E.default": [True, False, False, True]
    }
    wanted = merged_by_peft(model)
    manager, actor = placed(model)
    with manager.phase("weight_sync"):
        with pytest.raises(
            ValueError,
            match=r"PEFT computes what it saves "
            r"of "
            r"'default' "
            r"\(ADALORA: "
            r"all of it\).*adapters='merged'",
        ):
            actor.weights(adapters="separate")
        assert_same(read(actor), wanted)
    assert model.peft_config["default"].rank_pattern is pattern


@quietly()
def test_a_tuner_that_has_unloaded_its_layers_is_in_no_name() -> None:
    zoos, config = (Zoo(), Zoo()), lora(target_modules=["first"])
    wanted = [wanted_of(zoo) for zoo in zoos]
    manager = manager_of()
    for index, model in enumerate(
        (
            peft.LoraModel(zoos[0], config, "default"),
            peft.get_peft_model(zoos[1], config, mixed=True),
        )
    ):
        model.unload()
        actor = manager.register(f"actor{index}", model, role="actor")
        with manager.phase("weight_sync"):
            assert_same(read(actor, adapters="base"), wanted[index])


def test_what_peft_cannot_merge_is_refused_by_its_name() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    plain = wanted_of(base)
    with quietly():
        adapted = peft.get_peft_model(
            base, peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=2, task_type="CAUSAL_LM")
        )
        saved = saved_by_peft(adapted)
        poly = peft.get_peft_model(
            Zoo(), peft.PolyConfig(target_modules=["first"], r=2, n_tasks=2, n_splits=1)
        )
        scaled = torch.nn.Sequential(collections.OrderedDict(first=torch.nn.Linear(8, 8)))
        scaled.first.weight = torch.nn.Parameter(
            scaled.first.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
        )
        float8 = peft.get_peft_model(scaled, lora(target_modules=["first"]))
    manager = manager_of()
    actors = [
        manager.register(name, each, role="actor")
        for name, each in (("adapted", adapted), ("poly", poly), ("float8", float8))
    ]
    with manager.phase("weight_sync"):
        told = (
            "prompts cannot be merged",
            r"PEFT cannot merge peft\.tuners\.poly\.layer",
            r"'first\.weight' is stored as torch\.float8_e4m3fn",
        )
        for actor, said in zip(actors, told, strict=True):
            with pytest.raises(RegistrationError if "float8" in said else ValueError, match=said):
                deque(actor.weights(), maxlen=0)
            assert all("base_layer" not in name for name in read(actor, adapters="base"))
            assert read(actor, adapters="separate")
        assert_same(read(actors[0], adapters="separate"), saved)
        assert_same(
            dict(sorted(read(actors[0], adapters="base").items())), dict(sorted(plain.items()))
        )


class Lm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(8, 4)
        self.config = transformers.PretrainedConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1
        )
        self.device = torch.device("cpu")


def test_a_model_with_adapters_inside_another_and_one_without_pefts_model_around() -> None:
    model = make("lora")
    wanted = merged_by_peft(model)
    inside = torch.nn.ModuleDict({"policy": model, "value": torch.nn.Linear(8, 1)})
    injected = peft.inject_adapter_in_model(lora(), Zoo())
    manager, actor = placed(inside)
    other = manager.register("other", injected, role="actor")
    with manager.phase("weight_sync"):
        found = read(actor)
        assert {
            name.removeprefix("policy."): value
            for name, value in found.items()
            if name.startswith("policy.")
        }.keys() == wanted.keys()
        assert all(found[f"policy.{name}"].equal(value) for name, value in wanted.items())
        assert list(read(actor, adapters="separate")) == list(saved_by_peft(copy.deepcopy(model)))
        assert list(read(other)) == list(base_values())


def test_merging_takes_one_layer_beside_the_bucket() -> None:
    """What PEFT computes a layer with, and no second layer."""
    base = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)])
    model = peft.get_peft_model(base, lora(target_modules=[str(index) for index in range(6)]))
    largest = 64 * 64 * 4
    for streams in (False, True):
        manager, actor = placed(model, streams=streams)
        with manager.phase("weight_sync"), worker.Live(actor) as live:
            deque(actor.weights(bucket_bytes=2 * largest), maxlen=0)
            assert live.now == 0
        adapters = 2 * 64 * 2 * 4
        # A full bucket, whose last weight is the layer's own; the product of the adapters, and the
        # same scaled. Streamed, also what is brought ahead: the layers of the next bucket, and
        # their adapters.
        ahead = 2 * (largest + adapters) if streams else 0
        assert 2 * largest < live.peak <= 4 * largest + 2 * adapters + ahead
        manager.close()


# --- sharded over ranks


@pytest.mark.sweep
@pytest.mark.parametrize("build", ["fsdp2", "fsdp1_original", "fsdp1_flat"])
@on_ranks("two_ranks")
def test_sharded_models_publish_what_the_whole_one_does(build: str) -> None:
    """Every mode, resident and streamed, before and after a forward that leaves the root unsharded,
    against PEFT on the whole model."""
    base = worker.Model()
    fixed = list(base.parameters())
    config = lora(target_modules=["up", "down", "embed"], use_dora=True, modules_to_save=["norm"])
    with quietly():
        whole = randomize(peft.get_peft_model(base, config), fixed=fixed)
    wanted = {"merged": merged_by_peft(whole), "separate": saved_by_peft(whole)}
    for streams in (False, True):
        module = model = copy.deepcopy(whole)
        with quietly():
            if build.startswith("fsdp1"):
                module = worker.BUILDS[build](model, of={worker.Block})
            else:
                worker.BUILDS[build](model.base_model.model)
        manager, actor = placed(module, streams=streams)
        for _ in range(2):
            with manager.phase("weight_sync"):
                for adapters, values in wanted.items():
                    assert_same(read(actor, adapters=adapters, bucket_bytes=2000), values)
                without = read(actor, adapters="base")
                assert set(without) == set(wanted["merged"])
                assert not without["blocks.0.up.weight"].equal(
                    wanted["merged"]["blocks.0.up.weight"]
                )
            assert_nothing_resident(manager)
            with manager.phase("log_prob"), torch.no_grad():
                module(worker.tokens())
