"""What TRL's and transformers' trainers write into TensorBoard of placement, read from the files
and compared with what the manager tells."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from placement import Manager
from tests.integrations import test_transformers_trainer as plain
from tests.integrations import test_trl as trl
from tests.support import huggingface as hf
from tests.support.frameworks import needs
from tests.support.scalars import as_written, scalars

needs("tensorboard")
needs("accelerate")
transformers = needs("placement.integrations.transformers")
placed = needs("placement.integrations.trl")

pytestmark = pytest.mark.filterwarnings("ignore", "error:::placement\\.")

ALWAYS = ("stall_seconds", "to_device_gb", "to_host_gb", "skipped_gb", "host_gb")


def check(folder: Path, rows: list[dict[str, float]], manager: Manager, phase: str) -> None:
    """The files have the figures of each row, and their totals are those of the last snapshot."""
    read = scalars(folder)
    own = sorted({name for row in rows for name in row if name.startswith("placement/")})
    assert {f"placement/{name}" for name in ALWAYS} <= set(own)
    for name in own:
        wanted = [as_written(row[name]) for row in rows if name in row]
        assert read[f"train/{name}"] == wanted
    steps, last = rows[:-1], rows[-1]
    assert all(row[f"placement/peak_device_gb/{phase}"] > 0 for row in steps)
    assert all(not any("total" in name for name in row) for row in steps)
    total = sum(row["placement/to_device_gb"] for row in rows)
    assert total > 0
    assert last["placement/total/to_device_gb"] == pytest.approx(total)
    snapshot = manager.snapshot()
    peak = snapshot.phase_peak_bytes[phase] / 1e9
    assert last[f"placement/total/peak_device_gb/{phase}"] == peak
    assert peak == max(row[f"placement/peak_device_gb/{phase}"] for row in rows)


def rows_of(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "placement/host_gb" in row]


def test_trl(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    manager = trl.manager_for()
    config = trl.grpo_config(tmp_path, report_to="tensorboard", max_steps=3)
    trainer = trl.make(placed.PlacedGRPOTrainer, config, folder, manager=manager)
    trainer.train()
    rows = rows_of(trainer)
    assert len(rows) == 4  # three steps, and the end
    check(tmp_path / "board", rows, manager, "train")
    server = manager.serve()
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        exported = answer.read().decode()
    server.close()
    for figure, metric in (
        ("to_device_gb", "placement_loaded_bytes_total"),
        ("skipped_gb", "placement_skipped_bytes_total"),
    ):
        lines = [line for line in exported.splitlines() if line.startswith(f"{metric}{{")]
        nbytes = sum(float(line.rpartition(" ")[2]) for line in lines)
        assert rows[-1][f"placement/total/{figure}"] == nbytes / 1e9


def test_transformers(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    manager = plain.manager_for()
    with transformers.PlacementCallback(manager) as callback:
        trainer = transformers.PlacedTrainer(
            model=hf.model_from(folder),
            args=plain.transformers.TrainingArguments(
                output_dir=str(tmp_path),
                use_cpu=True,
                report_to="tensorboard",
                max_steps=3,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="no",
                disable_tqdm=True,
            ),
            callbacks=[callback],
            train_dataset=plain.examples(),
            eval_dataset=plain.examples(),
        )
        trainer.train()
    rows = rows_of(trainer)
    assert len(rows) == 4
    assert not any("eval_loss" in row for row in rows)
    check(tmp_path / "board", rows, manager, "train")


def test_one_setting_turns_them_off(folder: str, tmp_path: Path) -> None:
    config = trl.grpo_config(tmp_path, max_steps=1)
    manager = trl.manager_for(trainer_log=False)
    trainer = trl.make(placed.PlacedGRPOTrainer, config, folder, manager=manager)
    trainer.train()
    assert rows_of(trainer) == []
    assert manager.metrics()["placement/to_device_gb"] > 0
