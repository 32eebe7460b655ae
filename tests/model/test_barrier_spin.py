"""The protocol between ranks, every run of it: barrier.pml and stages.pml in spin. With SWEEP=all
also what takes minutes and gigabytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

BARRIER = "barrier.pml"
STAGES = "stages.pml"
DEPTH = 1_000_000
MEMORY_MIB = 16_000

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        not all(map(shutil.which, ("spin", "gcc"))), reason="spin and gcc are not installed here"
    ),
    pytest.mark.timeout(1800),
]
EVERYTHING = os.environ.get("SWEEP") == "all"
slow = pytest.mark.slow
on_demand = pytest.mark.skipif(not EVERYTHING, reason="takes minutes and gigabytes: SWEEP=all")


class Verdict(NamedTuple):
    errors: int
    states: int
    depth: int
    violated: str | None
    """The property."""
    is_exhaustive: bool
    unreached: list[str]


def check(folder: Path, model: str = BARRIER, **defines: int) -> Verdict:
    """Look at every state that the model can reach, until a property is violated."""
    shutil.copy(Path(__file__).with_name(model), folder)
    generate = ["spin", *(f"-D{name}={value}" for name, value in defines.items()), "-a", model]
    smaller = ["-DCOLLAPSE"] if EVERYTHING else []  # half the memory, and a third slower
    compiler = [
        "gcc",
        "-O2" if EVERYTHING else "-O0",
        "-w",
        "-DSAFETY",
        *smaller,
        f"-DMEMLIM={MEMORY_MIB}",
        "-o",
        "pan",
        "pan.c",
    ]
    for command in (generate, compiler):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    text = subprocess.run(
        ["./pan", f"-m{DEPTH}"], cwd=folder, capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"depth reached (\d+), errors: (\d+)\s+([\d.e+]+) states, stored", text)
    assert found is not None, text
    violated = re.search(r"assertion violated (\w+)|(invalid end state) ", text)
    return Verdict(
        errors=int(found[2]),
        states=int(float(found[3])),
        depth=int(found[1]),
        violated=None if violated is None else violated[1] or violated[2],
        is_exhaustive="max search depth too small" not in text
        and "Search not completed" not in text,
        unreached=re.findall(r"\.pml:\d+, state \d+, \"(.+)\"", text),
    )


@pytest.mark.parametrize(
    "defines",
    [
        pytest.param(
            {"RANKS": 2, "EPOCHS": 2, "KILLS": 2, "BOARD_LOSS": 1, "LOSSES": 1},
            id="2-ranks-all-faults",
        ),
        pytest.param({"RANKS": 3, "EPOCHS": 2, "KILLS": 2}, id="3-ranks-two-deaths", marks=slow),
        pytest.param(
            {"RANKS": 3, "EPOCHS": 2, "KILLS": 2, "BOARD_LOSS": 1},
            id="3-ranks-two-deaths-board-lost",
            marks=on_demand,
        ),
        pytest.param(
            {"RANKS": 3, "EPOCHS": 2, "KILLS": 1, "LOSSES": 1},
            id="3-ranks-lost-messages",
            marks=on_demand,
        ),
        pytest.param(
            {"RANKS": 2, "EPOCHS": 4, "KILLS": 2, "BOARD_LOSS": 1},
            id="2-ranks-four-changes",
            marks=on_demand,
        ),
        pytest.param(
            {"RANKS": 4, "EPOCHS": 1, "KILLS": 2, "BOARD_LOSS": 1},
            id="4-ranks-two-deaths",
            marks=on_demand,
        ),
        pytest.param(
            {"RANKS": 3, "EPOCHS": 3, "KILLS": 0, "SKIPS": 2}, id="two-transitions-skipped"
        ),
        pytest.param(
            {"RANKS": 4, "EPOCHS": 3, "KILLS": 0, "SKIPS": 3},
            id="4-ranks-three-skip",
            marks=on_demand,
        ),
    ],
)
def test_every_run_keeps_every_property(
    defines: dict[str, int], tmp_path: Path, counted: Callable[[str], None]
) -> None:
    verdict = check(tmp_path, **defines)
    assert (verdict.errors, verdict.violated, verdict.is_exhaustive) == (0, None, True)
    if "SKIPS" in defines:
        assert "missed" not in "".join(verdict.unreached)  # some rank has passed over an epoch
    else:
        # a statement that no run reaches would have proved nothing
        assert not verdict.unreached or defines["EPOCHS"] == 1
    what = ", ".join(f"{name.lower().replace('_', ' ')} {value}" for name, value in defines.items())
    counted(
        f"commit protocol in spin ({what}): {verdict.states:,} states, depth {verdict.depth}, all "
        "of them, 0 errors"
    )


@pytest.mark.parametrize(
    "defines",
    [
        {"RANKS": 2, "CHANGES": 2},
        {"RANKS": 3, "CHANGES": 1},
        # and they do not fail where nothing fails
        {"FAILS": 0},
        pytest.param({"RANKS": 3, "CHANGES": 2}, marks=slow),
        pytest.param({"RANKS": 4, "CHANGES": 1}, marks=slow),
    ],
    ids=str,
)
def test_ranks_with_different_engines_change_phase_together(
    defines: dict[str, int], tmp_path: Path, counted: Callable[[str], None]
) -> None:
    verdict = check(tmp_path, STAGES, **defines)
    assert (verdict.errors, verdict.violated, verdict.is_exhaustive) == (0, None, True)
    assert not verdict.unreached or "FAILS" in defines
    counted(
        f"stages of a phase transition in spin ({defines}): {verdict.states:,} states, all of "
        "them, 0 errors"
    )


DEATH, SKIPPED = (
    {"RANKS": 3, "EPOCHS": 2, "KILLS": 1},
    {"RANKS": 2, "EPOCHS": 3, "KILLS": 0, "SKIPS": 1},
)


@pytest.mark.parametrize(
    ("model", "world", "mutant", "violated"),
    [
        # a rank goes back at its deadline without claiming ABORT
        pytest.param(BARRIER, DEATH, "UNILATERAL", "barrier", marks=slow),
        # votes are counted, and a client asks again after a lost answer
        pytest.param(BARRIER, DEATH, "COUNTER", "barrier", marks=slow),
        # a restarted process takes its place without ending the open epoch
        pytest.param(BARRIER, DEATH, "REUSE", "fence", marks=slow),
        # the source is given up with the move, before the decision
        (BARRIER, DEATH, "EARLYFREE", "nothing_lost"),
        # keys are forgotten by their age, with a stopped rank still to ask
        pytest.param(BARRIER, DEATH, "FORGET", "agreement", marks=slow),
        # a rank that is interrupted after its vote goes back and asks nobody
        pytest.param(BARRIER, DEATH, "DESERT", "agreement", marks=slow),
        # a rank that skipped a phase transition obeys what the others gave up there, and stays an
        # epoch behind
        (BARRIER, SKIPPED, "BEHIND", "meet"),
        # it passes over one more, without looking whether that has ended
        (BARRIER, SKIPPED, "TWICE", "invalid end state"),
        # votes do not name their stage, so votes for two stages add up to COMMIT
        (STAGES, {"FAILS": 0}, "NAMELESS", "smooth"),
        # a rank without engines to load ends while others go on
        (STAGES, {"FAILS": 0}, "OWN", "invalid end state"),
        # engines are loaded together with the other handles
        (STAGES, {"FAILS": 0}, "AT_ONCE", "room"),
    ],
)
def test_each_shortcut_is_refuted(
    model: str,
    world: dict[str, int],
    mutant: str,
    violated: str,
    tmp_path: Path,
    counted: Callable[[str], None],
) -> None:
    verdict = check(tmp_path, model, **world, **{mutant: 1})
    assert (verdict.errors, verdict.violated) == (1, violated)
    counted(
        f"{model} in spin: {mutant} violates {violated} after {verdict.states:,} states, at depth "
        f"{verdict.depth}"
    )
