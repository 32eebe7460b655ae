"""Contexts for the pages of frameworks that need a cluster or GPUs: classes in the framework's shape stand where it would be imported.

After each block the framework's calls run on what it defined, and on the stand-in alone; every bit that leaves them has to be the same.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from placement.integrations import nemo_rl as placed_nemo_rl
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.integrations import jobs, nemo_rl_standin, openrlhf_standin, roll_standin, skyrl_standin, slime_standin
from tests.support.seeds import seed

if TYPE_CHECKING:
    from tests.docs.contexts import Tools

Names = dict[str, Any]


def _install(tools: Tools, modules: Mapping[str, ModuleType]) -> None:
    """These modules can be imported, and each manager has a device of its own, as in processes of their own."""
    for name, module in modules.items():
        tools.monkeypatch.setitem(sys.modules, name, module)
    tools.monkeypatch.setattr("placement.manager.select_device", lambda name, **_: SimulatedDevice(capacity_bytes=16 << 20))


def _remote() -> Any:
    """Ray's decorator, which makes actor classes without a cluster."""
    return pytest.importorskip("ray", reason="ray is not installed here").remote


def _inside(actor_class: Any) -> Any:
    return actor_class.__ray_metadata__.modified_class


@contextmanager
def slime(tools: Tools) -> Iterator[Names]:
    """slime's arguments, and its functions that make the actors: what they would start is kept."""
    made: list[tuple[str, type[Any]]] = []

    class Group:
        def __init__(self, role: str, actor_cls: type[Any]) -> None:
            made.append((role, actor_cls))

        def create(self, rollout_manager: Any = None) -> list[int]:
            return [1]

    def allocate_train_group(
        args: Any, num_nodes: int, num_gpus_per_node: int, pg: Any, role: str = "actor", with_ref: bool = False, actor_cls: Any = None
    ) -> Group:
        return Group(role, actor_cls)

    def create_actor_model(args: Any, pgs: Any, rollout_manager: Any, actor_cls: Any = None) -> tuple[Group, list[int]]:
        return Group("actor", actor_cls), [1]

    def create_training_models(args: Any, pgs: Any, rollout_manager: Any, actor_cls: Any = None) -> tuple[Group, None]:
        return create_actor_model(args, pgs, rollout_manager, actor_cls)[0], None

    functions = {
        "create_placement_groups": lambda args: {"actor": "gpus", "rollout": "gpus", "critic": "gpus"},
        "create_rollout_manager": lambda args, pg: ("manager", 1),
        "create_training_models": create_training_models,
        "create_actor_model": create_actor_model,
        "allocate_train_group": allocate_train_group,
    }
    packages = ("slime", "slime.ray", "slime.backends", "slime.backends.megatron_utils")
    modules = {name: jobs.made(name, {}) for name in packages}
    modules["slime.ray.placement_group"] = jobs.made("slime.ray.placement_group", functions)
    actor = {"MegatronTrainRayActor": slime_standin.TrainActor}
    modules["slime.backends.megatron_utils.actor"] = jobs.made("slime.backends.megatron_utils.actor", actor)
    _install(tools, modules)
    tools.replaced |= {'"60GiB"': '"60MiB"'}
    args = Namespace(offload_train=True, critic_num_nodes=1, critic_num_gpus_per_node=1, start_rollout_id=None)
    yield {"args": args}
    assert [role for role, _ in made] == ["actor", "actor", "actor", "critic"]
    assert (args.offload_train, args.start_rollout_id) == (False, 1)
    for role, actor_cls in made:
        runs = []
        for kind in (slime_standin.TrainActor, actor_cls):
            seed(0)
            worker = kind(1, 0, None, None)
            runs.append(slime_standin.run(worker, slime_standin.arguments(jobs.plain), role))
        assert runs[0] == runs[1]
        assert_nothing_resident(worker.placement)


@contextmanager
def nemo_rl(tools: Tools) -> Iterator[Names]:
    """What run_grpo.py has at the call of `setup`; the workers that NeMo-RL would start are made here."""
    _remote()
    _install(tools, nemo_rl_standin.modules())
    tools.replaced |= {'"60GiB"': '"60MiB"'}
    names: Names = {"config": {"dtensor_cfg": {"enabled": True, "_v2": True}}, **dict.fromkeys(("tokenizer", "dataset", "val_dataset"))}
    yield names
    worker = names["parts"].worker_extension_cls_fqn
    try:
        made = _inside(getattr(placed_nemo_rl, worker.rpartition(".")[2]))
    finally:
        vars(placed_nemo_rl).pop("DTensorPolicyWorkerV2", None)
    both = ((nemo_rl_standin.DTensorWorker, made), (nemo_rl_standin.MegatronWorker, _inside(names["MyWorker"])))
    for kinds in both:
        assert issubclass(kinds[1], kinds[0])
        runs = []
        for kind in kinds:
            seed(0)
            worker = kind({"build": jobs.plain})
            runs.append(nemo_rl_standin.grpo(worker))
        assert runs[0] == runs[1]
        assert_nothing_resident(worker.placement)


@contextmanager
def skyrl(tools: Tools) -> Iterator[Names]:
    """SkyRL's classes."""
    _remote()
    _install(tools, skyrl_standin.modules())
    names: Names = {}
    yield names
    trainer = names["PlacedExp"]({}).run()
    assert trainer.parts.keys() >= {"cfg", "generator"}
    placed = [_inside(each) for each in trainer.workers]
    workers: list[Any] = []
    for kind in placed:
        tools.monkeypatch.setattr(kind, "__init__", _keep(kind.__init__, workers))
    own = (skyrl_standin.FSDPPolicyWorkerBase, skyrl_standin.FSDPCriticWorkerBase, skyrl_standin.FSDPRefWorkerBase)
    assert skyrl_standin.run(*placed) == skyrl_standin.run(*own)
    assert [worker.role for worker in workers] == ["ref", "actor", "critic"]
    for worker in workers:
        assert worker.moves == []
        if worker.hold.is_open:
            worker.offload_to_cpu()
        assert_nothing_resident(worker.manager)


def _keep(init: Any, made: list[Any]) -> Any:
    def keep(self: Any) -> None:
        made.append(self)
        init(self)

    return keep


@contextmanager
def roll(tools: Tools) -> Iterator[Names]:
    """ROLL's classes."""
    _install(tools, roll_standin.modules())
    names: Names = {}
    yield names
    placed = names["PlacedActorWorker"]
    assert placed.initialize.dispatch_mode is roll_standin.Dispatch.ONE_TO_ALL
    for strategy, policy in (
        (roll_standin.Strategy, "colocated"),
        (roll_standin.MegatronStrategy, "colocated"),
        (roll_standin.MegatronStrategy, "colocated('optimizer_step')"),
    ):
        tools.monkeypatch.setenv("PLACEMENT_POLICY", policy)
        worker = placed(strategy)
        assert roll_standin.run(worker) == roll_standin.run(roll_standin.ActorWorker(strategy))
        assert worker.strategy.moves == [("offload", None), ("load", None)], "ROLL moved what placement places"
        assert_nothing_resident(worker.manager)
        phases = {record.phase for record in worker.manager.journal}
        assert {"log_prob", "train", "optimizer_step"} >= phases - {"idle", None} >= {"log_prob"}


@contextmanager
def openrlhf(tools: Tools) -> Iterator[Names]:
    """OpenRLHF's actor, decorated as OpenRLHF does it."""
    _install(tools, openrlhf_standin.modules(_remote()))
    names: Names = {}
    yield names
    worker = _inside(names["PolicyModelActor"])()
    assert openrlhf_standin.run(worker) == openrlhf_standin.run(openrlhf_standin.Actor())
    assert_nothing_resident(worker.manager)
    worker.manager.close()


CONTEXTS = (slime, nemo_rl, skyrl, roll, openrlhf)
