"""The doors of SkyRL that its page relies on: files, classes, methods and their parameters, as they
were read in the sources."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "skyrl.md"


_WORKERS = "skyrl/backends/skyrl_train/workers"
DOORS = {
    (f"{_WORKERS}/worker.py", "Worker"): {
        "init_model": "args kwargs",
        "offload_to_cpu": "offload_optimizer offload_model",
        "backload_to_gpu": "backload_optimizer backload_model",
        "_get_module_for_offload": "",
    },
    (f"{_WORKERS}/fsdp/fsdp_worker.py", "FSDPPolicyWorkerBase"): {
        "init_model": "model_path num_training_steps"
    },
    ("skyrl/train/trainer.py", "RayPPOTrainer"): {
        "build_models": ("PolicyWorker CriticWorker RefWorker")
    },
    ("skyrl/train/entrypoints/main_base.py", "BasePPOExp"): {
        "get_trainer": (
            "cfg tracker tokenizer train_dataset eval_dataset inference_engine_client generator "
            "colocate_pg"
        )
    },
}
"""By file and class: the methods, with their parameters in order."""


def methods(file: Path, owner: str) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    functions = [
        node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        each.name: " ".join(
            [arg.arg for arg in ast.walk(each.args) if isinstance(arg, ast.arg)][1:]
        )
        for each in functions
    }


def test_an_installed_skyrl_has_the_doors() -> None:
    """The sources are read and not imported: SkyRL cannot be imported without a GPU."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("skyrl is not installed here")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    for (file, owner), wanted in DOORS.items():
        found = methods(root / file, owner)
        assert {name: found.get(name) for name in wanted} == wanted, owner


def test_the_page_names_every_door() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [file for file, _ in DOORS if file not in text] == []
    assert [
        name
        for names in DOORS.values()
        for name in names
        if f"`{name}`" not in text and f"{name}(" not in text
    ] == []
