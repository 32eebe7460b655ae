"""The command line, and the pieces of the demo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import placement
from placement.cli import COMMANDS, main
from placement.cli.grpo import Recipe, grpo_loss


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text and summary in " ".join(text.split()) for name, summary in COMMANDS.items())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--device", "tpu"],
        ["demo", "--steps", "0"],
        ["demo", "--serve", "99999"],
        ["discover", ".", "--port", "99999"],
        ["discover", ".", "--port", "-1"],
        ["demo", "--json", "no/such/directory/result.json"],
        ["demo", "--json", "."],
    ],
)
def test_a_mistake_on_the_command_line_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: placement" in capsys.readouterr().err


def test_an_error_of_placement_is_one_line_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "simulated", "--policy", "no-such-policy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("placement demo: PolicyError: ")
    assert "Traceback" not in error


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"placement {placement.__version__}\n"


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("placement.cli.workers.run_status", interrupted)
    assert main(["status"]) == 130


def test_a_reader_that_stops_reading_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "placement", "explain"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_loss_of_an_unchanged_policy_is_minus_the_mean_advantage() -> None:
    log_probs = torch.log(torch.tensor([[0.5, 0.25], [0.125, 0.5]]))
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, kl = grpo_loss(log_probs, log_probs, log_probs, torch.tensor([[3.0], [-3.0]]), mask, Recipe())
    assert loss.item() == pytest.approx(-1.0)
    assert kl.item() == 0.0


def test_loss_stops_rewarding_beyond_the_clip() -> None:
    old = torch.zeros(1, 1)
    new = torch.full((1, 1), 1.0, requires_grad=True)
    loss, _ = grpo_loss(new, old, new.detach(), torch.ones(1, 1), torch.ones(1, 1), Recipe(clip=0.2))
    loss.backward()
    assert loss.item() == pytest.approx(-1.2)
    assert new.grad is not None
    assert new.grad.item() == 0.0
