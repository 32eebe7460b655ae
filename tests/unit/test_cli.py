"""The command line and what it draws."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import placement
from placement.cli import COMMANDS, main
from placement.cli.grpo import Characters, Recipe, grpo_loss, judge, positions_of
from placement.cli.timeline import PhaseRow, Span, Style, mebibytes, phase_table, timeline
from placement.core.states import State

PLAIN = Style(unicode=False, colour=False)
OFF, GPU, SYNC, TRAIN = State.CPU_OFFLOADED, State.GPU_RESIDENT, State.SYNCING, State.TRAINING


@dataclass(frozen=True)
class Change:
    at_seconds: float
    handle: str
    source: State
    target: State


def spans(*phases: tuple[int, str, float, float]) -> list[Span]:
    return [Span(step=s, phase=p, begin_seconds=b, end_seconds=e) for s, p, b, e in phases]


def test_timeline_shows_each_state_over_its_time() -> None:
    text = timeline(
        spans((1, "rollout", 0.0, 10.0), (1, "train", 10.0, 20.0)),
        [Change(10.1, "actor", OFF, GPU), Change(10.1, "actor", GPU, TRAIN), Change(10.1, "rollout", GPU, OFF)],
        {"rollout": GPU, "actor": OFF},
        PLAIN,
        columns=28,
    )
    ruler, rollout, actor, legend = text.splitlines()
    assert ruler.split() == ["rollout", "train"]
    assert rollout == "rollout ==========.........."
    assert actor == "actor   ..........##########"
    assert all(state.value in legend for state in State)


def test_timeline_gives_a_short_phase_its_columns_and_a_bar_between_steps() -> None:
    text = timeline(
        spans((1, "rollout", 0.0, 100.0), (1, "weight_sync", 100.0, 100.001), (2, "rollout", 100.001, 200.0)),
        [Change(100.0, "actor", OFF, SYNC), Change(100.001, "actor", SYNC, OFF)],
        {"actor": OFF},
        PLAIN,
        columns=40,
    )
    actor = text.splitlines()[1]
    assert "++++++|......" in actor
    assert len(actor) <= 40


def test_timeline_of_a_long_run_shows_the_last_steps_that_fit() -> None:
    steps = [((n, "log_prob", n, n + 0.5), (n, "train", n + 0.5, n + 1.0)) for n in range(9)]
    run = spans(*(span for step in steps for span in step))
    changes = [Change(0.0, "actor", OFF, GPU), Change(8.5, "actor", GPU, TRAIN)]
    ruler, actor, _ = timeline(run, changes, {"actor": OFF}, PLAIN, columns=45).splitlines()
    assert ruler.split("|") == ["      logp  train ", "logp  train ", "logp  train "]
    assert actor == "actor ============|============|======######"
    assert timeline(run, changes, {"actor": OFF}, PLAIN, columns=1).splitlines()[1] == "actor ======######"


def test_timeline_of_nothing_is_empty() -> None:
    assert timeline([], [], {}, PLAIN) == ""
    assert phase_table([], PLAIN) == ""


def test_phase_table_lines_up() -> None:
    row = PhaseRow(
        phase="log_prob",
        states={"actor": GPU, "a.long.handle.name": OFF},
        before_bytes=0,
        peak_bytes=3 << 20,
        after_bytes=2 << 20,
        loaded_bytes=2 << 20,
        offloaded_bytes=0,
        skipped_bytes=1,
        stall_seconds=0.0015,
    )
    head, line = phase_table([row], PLAIN).splitlines()
    assert len(head) == len(line)
    assert line.split() == ["log_prob", "gpu", "off", "0", "3.0", "2.0", "2.0", "0", "0.0", "1.5"]


def test_style_follows_the_stream() -> None:
    assert Style.of(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == Style(unicode=True, colour=False)
    assert Style.of(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == PLAIN
    assert Style(unicode=True, colour=True).mark(TRAIN, 2) == "\x1b[33m██\x1b[0m"


def test_zero_bytes_are_told_from_little() -> None:
    assert mebibytes(0) == "0"
    assert mebibytes(1) == "0.0"


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

    monkeypatch.setattr("placement.cli.status.run", interrupted)
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


def test_characters_pad_on_the_left_and_come_back() -> None:
    tokenizer = Characters()
    ids, mask = tokenizer.encode(["12+7=", "1+2="])
    assert mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert [tokenizer.decode(row) for row in ids.tolist()] == ["12+7=", "1+2="]
    assert positions_of(mask).tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]


def test_reward_prefers_right_to_well_formed_to_noise() -> None:
    assert judge("12", ended=True, target=12) == 1.0
    assert judge("12", ended=False, target=12) < judge("13", ended=True, target=12) < 1.0
    assert judge("", ended=False, target=12) == 0.0


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
