"""The doors of SkyRL that its page relies on: files, classes, methods and their parameters, as they were read in the sources."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "skyrl.md"


@dataclass(frozen=True)
class Door:
    """A method of a class, with its parameters in order."""

    file: str
    owner: str
    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def _doors(file: str, owner: str, **names: str) -> tuple[Door, ...]:
    return tuple(Door(file, owner, name, tuple(parameters.split())) for name, parameters in names.items())


_SKYRL = "skyrl/backends/skyrl_train/workers"

DOORS = (
    *_doors(
        f"{_SKYRL}/worker.py",
        "Worker",
        init_model="*args **kwargs",
        offload_to_cpu="offload_optimizer offload_model",
        backload_to_gpu="backload_optimizer backload_model",
        _get_module_for_offload="",
    ),
    *_doors(f"{_SKYRL}/fsdp/fsdp_worker.py", "FSDPPolicyWorkerBase", init_model="model_path num_training_steps"),
    *_doors("skyrl/train/trainer.py", "RayPPOTrainer", build_models="PolicyWorker CriticWorker RefWorker"),
    *_doors(
        "skyrl/train/entrypoints/main_base.py",
        "BasePPOExp",
        get_trainer="cfg tracker tokenizer train_dataset eval_dataset inference_engine_client generator colocate_pg",
    ),
)


def parameters(root: Path, door: Door) -> tuple[str, ...] | None:
    """The parameters that a door has in these sources, without `self`; None where it is not there."""
    file = root / door.file
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    for cls in (part for part in tree.body if isinstance(part, ast.ClassDef) and part.name == door.owner):
        for each in cls.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == door.name:
                return _parameters(each.args)[1:]
    return None


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [each.arg for each in arguments.kwonlyargs]
    return tuple(names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else []))


def test_an_installed_skyrl_has_the_doors() -> None:
    """The sources are read and not imported: SkyRL cannot be imported without a GPU."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("skyrl is not installed here")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    assert {str(door): parameters(root, door) for door in DOORS} == {str(door): door.parameters for door in DOORS}


def test_the_page_names_every_door() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [str(door) for door in DOORS if f"`{door.name}`" not in text and f"{door.name}(" not in text] == []
    assert [door.file for door in DOORS if door.file not in text] == []
