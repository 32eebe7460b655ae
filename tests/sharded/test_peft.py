"""PEFT: LoRA over a frozen base, adapters that come and go, and are saved and made while the model
is offloaded. The real package."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from placement import IntegrityError, Manager, NotResidentError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.frameworks import Later, needs
from tests.support.ranks import Ranks
from tests.support.sweeps import few
from tests.support.worker import make_manager

peft = needs("peft")
transformers = needs("transformers")
safetensors = needs("safetensors.torch")
hotswap = Later("peft.utils.hotswap")
intruders = Later("peft.tuners.lora.intruders")

pytestmark = pytest.mark.filterwarnings("ignore")
"""transformers and PEFT warn of each other."""

WIDTH = 64
CHUNK_BYTES = 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(inputs + self.down(self.up(inputs).relu()))
        return result


def config(**more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights="gaussian", **more)


def adapted(*, save_head: bool = False) -> Any:
    return peft.get_peft_model(Model(), config(modules_to_save=["head"] if save_head else None))


def batch(number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def build() -> training.Program:
    model = adapted(save_head=True)
    for layer in (model.base_model.model.up, model.base_model.model.down):
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.AdamW(trained(model), lr=1e-2)
    return training.Program(model, adam, lambda number: (model(batch(number)) - 1).square().mean())


# --- adapters that come and go


def story(
    phase: Callable[[str], AbstractContextManager[Any]],
) -> Iterator[tuple[Any, Any, bytes | None]]:
    """A program whose adapters are added in a phase, and switched, disabled and deleted between
    phases. Yields model, optimizer and last loss."""
    torch.manual_seed(0)
    model = adapted(save_head=True)
    adam = torch.optim.AdamW(trained(model), lr=1e-2)
    yield model, adam, None

    def learn(number: int) -> bytes:
        torch.manual_seed(number)
        loss = (model(batch(number)) - 1).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return training.as_bytes(loss)

    def look(number: int) -> bytes:
        with torch.no_grad():
            return training.as_bytes(model(batch(number)))

    def run(name: str, work: Callable[[int], bytes], number: int) -> tuple[Any, Any, bytes]:
        with phase(name):
            return model, adam, work(number)

    for number in range(3):
        yield run("train", learn, number)
    with phase("log_prob"):
        model.add_adapter("second", config())
    yield run("log_prob", look, 3)
    model.set_adapter("second")
    adam.add_param_group({"params": trained(model), "lr": 3e-2})
    for number in range(4, 7):
        yield run("train", learn, number)
    with model.disable_adapter():
        yield run("log_prob", look, 7)
    model.set_adapter("default")
    yield run("train", learn, 8)
    yield run("log_prob", look, 9)
    del adam.param_groups[1]
    kept = {id(each) for each in adam.param_groups[0]["params"]}
    adam.state = defaultdict(
        dict, {each: entry for each, entry in adam.state.items() if id(each) in kept}
    )
    model.delete_adapter("second")
    for number in range(10, 13):
        yield run("train", learn, number)
    yield run("log_prob", look, 13)


def values(model: Any, optimizer: Any) -> dict[str, bytes]:
    return training.bytes_of(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    )


def test_steps_of_lora_under_fsdp2(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(training.compare, build):
        assert outcome.skipped_bytes["actor"] > outcome.offloaded_bytes["actor"]


def test_adapters_that_are_added_switched_disabled_and_deleted() -> None:
    """The story plain and under a manager."""
    plain = [(values(model, adam), loss) for model, adam, loss in story(lambda _: nullcontext())]
    manager = Manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    hosts: list[int] = []
    for number, (model, adam, loss) in enumerate(story(manager.phase)):
        if not manager.handles:
            manager.register("actor", model, role="actor")
            manager.register("actor.optimizer", adam)
        assert_nothing_resident(manager)
        wanted, plain_loss = plain[number]
        assert loss == plain_loss, f"the loss of part {number} differs from the plain run's"
        training.assert_same(
            values(manager.handles["actor"], manager.handles["actor.optimizer"]),
            wanted,
            f"part {number}",
        )
        hosts.append(manager.handles["actor"].host_bytes)
    assert len(hosts) == len(plain)
    manager.close()
    assert hosts[4] > hosts[3]  # the second adapter
    assert hosts[-1] == hosts[3]  # deleted: its host memory is given back


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("merged with its adapters", lambda model: model.merge_adapter()),
        ("merged with its adapters", lambda model: model.merge_and_unload()),
        # It copies the module that is to be saved.
        (
            "copied or pickled",
            lambda model: model.add_adapter("more", config(modules_to_save=["head"])),
        ),
    ],
)
def test_what_would_compute_with_offloaded_weights_is_refused(
    what: str, change: Callable[[Any], Any]
) -> None:
    """Merged while offloaded, NaN is added to NaN, which nobody sees; PEFT notes the merge and
    leaves the adapter out from then on."""
    model = adapted()
    output = training.as_bytes(model(batch(0)))
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    with pytest.raises(NotResidentError, match=what):
        change(model)
    with manager.phase("log_prob"):
        assert training.as_bytes(model(batch(0))) == output
    with manager.phase("log_prob"):
        model.merge_adapter()
        merged = training.as_bytes(model(batch(0)))
    assert_nothing_resident(manager)
    with pytest.raises(NotResidentError, match="merged with its adapters"):
        model.unmerge_adapter()
    with manager.phase("log_prob"):
        assert training.as_bytes(model(batch(0))) == merged
        model.unmerge_adapter()
    manager.close()
    assert not any({"merge", "unmerge"} & set(vars(module)) for module in model.modules())


# --- what changes tensors together with what Python code keeps about them: refused as a whole while
# offloaded, and in a phase as PEFT alone


def _two_adapters(**more: Any) -> Any:
    torch.manual_seed(3)
    model = peft.get_peft_model(Model(), config(lora_alpha=4, **more))
    model.add_adapter("second", config(lora_alpha=4, **more))
    return model


def _weighted(how: str) -> Callable[[Any, Path], Any]:
    return lambda model, _: model.add_weighted_adapter(
        ["default", "second"], [0.7, 0.3], "both", combination_type=how, density=0.5
    )


def _load_into_the_first(model: Any, folder: Path) -> None:
    peft.set_peft_model_state_dict(
        model, safetensors.load_file(folder / "adapter_model.safetensors")
    )


def _eva(model: Any, _: Path) -> None:
    model.peft_config["default"].init_lora_weights = "eva"
    found = {
        name: torch.ones(4, part.in_features)
        for name, part in model.named_modules()
        if hasattr(part, "lora_A")
    }
    peft.initialize_lora_eva_weights(model, eva_state_dict=found)


def _hotswap(model: Any, folder: Path) -> None:
    hotswap.hotswap_adapter(model, str(folder), "default", torch_device="cpu")


def _hotswap_from_state_dict(model: Any, folder: Path) -> None:
    given = safetensors.load_file(folder / "adapter_model.safetensors")
    given = {name.replace(".weight", ".default.weight"): value for name, value in given.items()}
    hotswap.hotswap_adapter_from_state_dict(
        model, given, "default", peft.LoraConfig.from_pretrained(folder)
    )


CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "hotswap": _hotswap,
    "hotswap from a state dict": _hotswap_from_state_dict,
    "padding": lambda model, _: hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8),
    **{f"weighted, {how}": _weighted(how) for how in ("svd", "linear", "cat", "ties", "dare_ties")},
    "load": lambda model, folder: model.load_adapter(folder, "more", torch_device="cpu"),
    "load into": lambda model, folder: model.load_adapter(folder, "second", torch_device="cpu"),
    "a state dict": _load_into_the_first,
    "eva": _eva,
    "intruders": lambda model, _: intruders.reduce_intruder_dimension(model, logging_sink=None),
    "dora": lambda model, _: model.add_adapter("more", config(use_dora=True)),
    "olora": lambda model, _: model.add_adapter(
        "more", peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights="olora")
    ),
    "a module to save": lambda model, _: model.add_adapter(
        "more", config(modules_to_save=["head"])
    ),
    "merge": lambda model, _: model.merge_adapter(),
    "merge and unload": lambda model, _: model.merge_and_unload(),
    "merge a layer": lambda model, _: model.base_model.model.down.merge(),
}
PLAIN_CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "the first adapter": lambda model, _: peft.get_peft_model(model, config(use_dora=True)),
    "kasa": lambda model, _: peft.get_peft_model(model, config(kasa_config=peft.KasaConfig())),
    "a saved adapter": lambda model, folder: peft.PeftModel.from_pretrained(model, str(folder)),
    "a saved mixed adapter": lambda model, folder: peft.PeftMixedModel.from_pretrained(
        model, str(folder)
    ),
    "injected": lambda model, _: peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights="pissa"), model
    ),
    "injected, with a module to save": lambda model, _: peft.inject_adapter_in_model(
        config(modules_to_save=["head"]), model
    ),
}
"""Changes of a model that was registered without adapters."""


def _numbers(model: Any) -> dict[str, Any]:
    """What PEFT keeps beside the tensors."""
    kept: dict[str, Any] = {
        name: [
            {key: float(value) for key, value in getattr(part, "scaling", {}).items()},
            dict(getattr(part, "r", {})),
            *(list(part.merged_adapters), list(part.active_adapters)),
        ]
        for name, part in model.named_modules()
        if hasattr(part, "merged_adapters")
    }
    configs = getattr(model, "peft_config", {}).items()
    return kept | {name: copy.deepcopy(each.to_dict()) for name, each in configs}


@pytest.mark.parametrize(
    "name",
    few(
        [*CHANGES, *PLAIN_CHANGES],
        *("hotswap", "weighted, svd", "load", "a state dict", "eva"),
        *("a module to save", "merge", "merge and unload", "a saved adapter"),
    ),
)
def test_a_change_of_adapters_is_refused_as_a_whole_and_made_in_a_phase(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    peft.get_peft_model(Model(), config(lora_alpha=16)).save_pretrained(tmp_path)

    def start() -> Any:
        torch.manual_seed(3)
        return Model() if name in PLAIN_CHANGES else _two_adapters()

    def change(model: Any) -> Any:
        torch.manual_seed(7)
        result = (CHANGES | PLAIN_CHANGES)[name](model, tmp_path)
        return result if isinstance(result, nn.Module) else model

    plain = change(start())
    wanted = training.bytes_of(plain.state_dict()), _numbers(plain), plain(batch(0)).tolist()
    model = start()
    output = training.as_bytes(model(batch(0)))
    if name == "eva":  # its precondition
        model.peft_config["default"].init_lora_weights = "eva"
    before = training.bytes_of(model.state_dict()), _numbers(model)
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    with pytest.raises(NotResidentError, match=r"'actor' is CPU_OFFLOADED"):
        change(model)
    assert (training.bytes_of(model.state_dict()), _numbers(model)) == before
    assert manager.audit().ok
    with manager.phase("log_prob"):
        assert training.as_bytes(model(batch(0))) == output
        changed = change(model)
        found = training.bytes_of(changed.state_dict()), _numbers(changed)
        assert (*found, changed(batch(0)).tolist()) == wanted
    with manager.phase("log_prob"):
        assert training.bytes_of(changed.state_dict()) == wanted[0]
    manager.close()


def test_a_change_of_a_layer_that_was_put_into_a_model_without_pefts_own(tmp_path: Path) -> None:
    torch.manual_seed(5)
    peft.get_peft_model(Model(), config(lora_alpha=16)).save_pretrained(tmp_path)
    inside = peft.inject_adapter_in_model(config(), Model())
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", inside, role="actor")
    before = _numbers(inside)
    with pytest.raises(NotResidentError, match="given the weights of an adapter"):
        hotswap.hotswap_adapter_from_state_dict(inside, {}, "default", config(lora_alpha=16))
    with pytest.raises(NotResidentError, match="padded"):
        hotswap.prepare_model_for_compiled_hotswap(inside, target_rank=8)
    assert _numbers(inside) == before
    manager.close()


@pytest.mark.parametrize("name", ["merge", "merge and unload", "weighted, svd"])
def test_a_change_by_a_tuner_that_was_made_after_the_registration(
    name: str, tmp_path: Path
) -> None:
    model = Model()
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        around = peft.get_peft_model(model, config())
        around.add_adapter("second", config())
    before = _numbers(around)
    with pytest.raises(NotResidentError, match=r"'actor' is CPU_OFFLOADED"):
        CHANGES[name](around, tmp_path)
    assert _numbers(around) == before
    with manager.phase("log_prob"):
        CHANGES[name](around, tmp_path)
    manager.close()


def test_an_adapter_by_transformers_that_is_computed_from_weights_can_be_added_later() -> None:
    """Transformers notes that there is an adapter before it makes the first one."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY))
    manager = _registered(model)
    with pytest.raises(NotResidentError, match="computed from its weights"):
        model.add_adapter(peft.LoraConfig(use_dora=True, **_Q))
    with manager.phase("log_prob"):
        model.add_adapter(adapter_config=peft.LoraConfig(use_dora=True, **_Q))
    assert model.active_adapters() == ["default"]
    manager.close()


def test_a_conversion_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """To LoRA, or to an adapter for the weights that the base had before PiSSA changed them."""
    model = _adapted(peft.MissConfig(r=4, **_Q))
    manager = _registered(model)
    with pytest.raises(NotResidentError, match="cannot be converted to LoRA"):
        peft.save_as_lora(tmp_path / "lora", model, rank=4)
    with manager.phase("log_prob"):
        peft.save_as_lora(tmp_path / "lora", model, rank=4)
    pissa = _adapted(peft.LoraConfig(r=4, init_lora_weights="pissa", **_Q))
    pissa.save_pretrained(tmp_path / "initial")
    second = _registered(pissa)
    convert = {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
    with pytest.raises(NotResidentError, match="cannot be given the weights of an adapter"):
        pissa.save_pretrained(tmp_path / "found", **convert)
    assert not (tmp_path / "found").exists()
    with second.phase("log_prob"):
        pissa.save_pretrained(tmp_path / "found", **convert)
    manager.close()
    second.close()


def test_other_active_adapters_are_refused_while_adapters_are_merged() -> None:
    """PEFT unmerges them first."""
    model = _two_adapters()
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    model.set_adapter("second")
    model.set_adapter("default")
    with manager.phase("log_prob"):
        model.merge_adapter()
    before = _numbers(model)
    with pytest.raises(NotResidentError, match="merged with its adapters"):
        model.base_model.set_adapter("second")
    assert _numbers(model) == before
    with manager.phase("log_prob"):
        model.set_adapter("second")
        assert not any(part.merged for part in model.modules() if hasattr(part, "merged"))
    manager.close()


@pytest.mark.parametrize("prompt", ["prompt", "multitask prompt", "prefix"])
def test_a_prompt_is_not_computed_while_offloaded(prompt: str) -> None:
    model = _adapted(_READ_PAST_IT[prompt]())
    task_ids = torch.tensor([0]) if prompt == "multitask prompt" else None
    manager = _registered(model)
    with pytest.raises(NotResidentError, match="cannot be asked for its prompt"):
        model.get_prompt(1, task_ids)
    with manager.phase("log_prob"):
        model.get_prompt(1, task_ids)
    manager.close()


# --- adapters that PEFT saves and makes while the model is offloaded: as without placement, or
# refused before anything is written


_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_Q = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
_PROMPT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
_READ_IN_STATE_DICT = {
    "lora": lambda: peft.LoraConfig(r=4, bias="all", modules_to_save=["lm_head"], **_Q),
    "dora with tokens": lambda: peft.LoraConfig(
        r=4, use_dora=True, trainable_token_indices=[1, 2], **_Q
    ),
    "vera": lambda: peft.VeraConfig(r=4, **_Q),
    "vblora": lambda: peft.VBLoRAConfig(
        r=2, vector_length=4, num_vectors=16, save_only_topk_weights=True, **_Q
    ),
    "randlora": lambda: peft.RandLoraConfig(r=4, **_Q),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=8, **_Q),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM"),
}
_READ_PAST_IT = {
    "shira": lambda: peft.ShiraConfig(r=4, **_Q),
    "multitask prompt": lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, **_PROMPT),
    "prompt": lambda: peft.PromptTuningConfig(**_PROMPT),
    "prompt for inference": lambda: peft.PromptTuningConfig(inference_mode=True, **_PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**_PROMPT),
}


def _adapted(config: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY)), config
    )


def _registered(model: Any) -> Manager:
    manager = make_manager(device=SimulatedDevice(1 << 26))
    manager.register("actor", model, role="actor")
    return manager


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return dict(safetensors.load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "config", [pytest.param(each, id=name) for name, each in _READ_IN_STATE_DICT.items()]
)
def test_an_adapter_is_saved_while_offloaded(config: Callable[[], Any], tmp_path: Path) -> None:
    model = _adapted(config())
    true, true_state = (
        _saved(model, tmp_path / "true"),
        {k: v.clone() for k, v in peft.get_peft_model_state_dict(model).items()},
    )
    _registered(model)
    assert training.bytes_of(_saved(model, tmp_path / "found")) == training.bytes_of(true)
    assert training.bytes_of(peft.get_peft_model_state_dict(model)) == training.bytes_of(true_state)


@pytest.mark.parametrize(
    "config", [pytest.param(each, id=name) for name, each in _READ_PAST_IT.items()]
)
def test_what_peft_reads_past_the_state_dict_is_saved_in_a_phase(
    config: Callable[[], Any], tmp_path: Path
) -> None:
    model = _adapted(config())
    true, values = (
        _saved(model, tmp_path / "true"),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    manager = _registered(model)
    for folder in (
        {"save_directory": tmp_path / "refused"},
        {"save_directory": tmp_path / "refused", "safe_serialization": False},
    ):
        with pytest.raises(
            NotResidentError,
            match=r"'actor' .* cannot be saved by PEFT, .*phase\('log_prob'\)",
        ):
            model.save_pretrained(**folder)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(NotResidentError, match="cannot be saved by PEFT"):
        peft.get_peft_model_state_dict(model)
    assert training.bytes_of(manager.handles["actor"].state_dict()) == training.bytes_of(values)
    with manager.phase("log_prob"):
        assert training.bytes_of(_saved(model, tmp_path / "found")) == training.bytes_of(true)
    assert_nothing_resident(manager)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "mica", True, "gaussian"])
def test_an_adapter_made_by_a_decomposition_is_refused_before_anything_changed(
    init: str | bool,
) -> None:
    model = _adapted(peft.LoraConfig(r=4, **_Q))
    manager = _registered(model)
    names = list(model.state_dict())
    if init in (True, "gaussian"):
        model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
        with pytest.raises(IntegrityError, match="were added to"), manager.phase("log_prob"):
            pass
    else:
        with pytest.raises(
            NotResidentError,
            match=r"cannot be given an adapter "
            r"that "
            r"is "
            r"computed "
            r"from its weights: .*'log_prob'",
        ):
            model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
        assert list(model.state_dict()) == names
        with manager.phase("log_prob"):
            model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
    with manager.phase("log_prob"):
        assert all(value.isfinite().all() for value in model.state_dict().values())
    assert len(model.state_dict()) > len(names)


def test_a_close_takes_the_guards_off() -> None:
    model = _adapted(peft.ShiraConfig(r=4, **_Q))
    _registered(model).close()
    assert not any(
        {"save_pretrained", "inject_adapter", "merge"} & set(vars(part)) for part in model.modules()
    )
    assert not any(part._state_dict_pre_hooks for part in model.modules())


@torch.no_grad()
def test_modules_may_be_asked_for_under_a_decorator_of_torch() -> None:
    """PEFT decorates functions that change adapters with `torch.no_grad()`, too."""
    import peft.tuners.lora.eva
    import peft.utils.loftq_utils  # noqa: F401

    model = adapted()
    manager = _registered(model)
    assert len([*model.modules()]) > 1
    manager.close()
