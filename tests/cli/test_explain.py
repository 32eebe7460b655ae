"""The phase × handle table of `placement explain`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from placement import Plan
from placement.cli import main
from placement.cli.plan import explain
from placement.core.states import PHASES, State
from placement.policies import Colocated
from tests.support.worker import Scripted


def row(text: str, phase: str) -> list[str]:
    ((_, *words),) = (line.split() for line in text.splitlines() if line.split()[:1] == [phase])
    return words


def test_colocated() -> None:
    status, text = explain("colocated")
    assert status == 0
    assert row(text, "idle") == ["-"] * 7 + ["0", "25.2", "GiB"]
    assert row(text, "rollout") == ["-"] * 6 + ["gpu", "64", "GiB", "14", "GiB"]
    assert row(text, "train") == [
        "train",
        "train",
        "-",
        "train",
        "train",
        "-",
        "-",
        "25.2",
        "GiB",
        "23.4",
        "GiB",
    ]
    assert row(text, "optimizer_step")[-3:] == ["25.2", "GiB", "0"]
    # of the engine its weights
    assert row(text, "weight_sync")[:9] == ["sync", "-", "-", "-", "-", "-", "gpu", "15.8", "GiB"]
    assert row(text, "checkpoint")[:7] == row(text, "weight_sync")[:7]


@pytest.mark.parametrize(
    ("policy", "worker_role"),
    [
        ("async_rollout", "rollout"),
        pytest.param("resident", "trainer", marks=pytest.mark.sweep),
        pytest.param("cyclic", "hybrid", marks=pytest.mark.sweep),
    ],
)
def test_every_shipped_policy_fills_an_aligned_table_within_115_columns(
    policy: str, worker_role: str
) -> None:
    status, text = explain(policy, worker_role=worker_role)
    assert status == 0
    text.encode("ascii")
    lines = text.splitlines()
    assert all(len(line) <= 115 for line in lines[:-1]), text
    body = [next(line for line in lines if line.split()[:1] == [phase]) for phase in PHASES]
    assert len({len(line) for line in body}) == 1
    starts = [lines[2].index(word) for word in ("ref", "reward", "rollout")]
    assert all(line[start - 1] == " " and line[start] != " " for line in body for start in starts)


def test_a_phase_that_does_not_fit_is_shown_and_the_status_says_so() -> None:
    status, text = explain("colocated", budget_bytes=63 << 30)
    assert status == 1
    assert text.count("does not fit") == 2
    assert (
        "\n"
        "rollout: does not fit: needs 64 GiB, 1 GiB (1,073,741,824 bytes) too many\n"
        "eval: does not fit: needs 64 GiB, 1 GiB ("
    ) in text
    assert row(text, "rollout")[:7] == ["-"] * 7
    # the phase that was refused changed nothing
    assert row(text, "eval")[:7] == row(text, "checkpoint")[:7]


@pytest.mark.sweep
def test_a_streamed_sync_has_its_own_mark() -> None:
    _, text = explain(Colocated(stream_sync=True))
    assert row(text, "weight_sync")[:2] == ["stream", "-"]
    assert row(text, "weight_sync")[-4:-2] == ["14", "GiB"]
    _, text = explain(Colocated("streamed"))
    assert row(text, "train")[:2] == ["train", "stream"]


def test_a_users_phase_gets_a_row() -> None:
    _, text = explain("colocated", phases={"distill": ("actor", "ref")})
    assert row(text, "distill")[:4] == ["gpu", "-", "gpu", "-"]
    assert "own phases: distill" in text


def test_a_policy_that_gives_no_plan_is_shown_where() -> None:
    status, text = explain(Scripted(reward=KeyError("judge")))
    assert status == 1
    assert (
        "\n"
        "reward: no plan: PolicyError: policy 'colocated' failed on phase 'reward': "
        "KeyError('judge')\n"
    ) in text


def test_a_policy_whose_idle_plan_does_not_fit_is_shown() -> None:
    status, text = explain(
        Scripted(idle=lambda view: Plan(dict.fromkeys(view.handles, State.GPU_RESIDENT)))
    )
    assert status == 1
    assert "\nidle: does not fit once all is registered: 12.8 GiB too many\n" in text
    assert row(text, "rollout")[:7] == ["-"] * 6 + ["gpu"]


def test_the_command_reads_settings_and_its_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "placement.toml"
    path.write_text(
        'policy = "resident"\nbudget_bytes = '
        '"90GiB"\nworker_role '
        "= "
        '"trainer"\n[phases]\ndistill '
        '= ["teacher"]\n'
    )
    assert main(["explain", "--settings", str(path)]) == 0
    assert capsys.readouterr().out.startswith(
        "policy resident, budget 90 GiB, worker role trainer, own phases: distill\n"
    )
    assert (
        main(
            [
                "explain",
                "colocated",
                "--settings",
                str(path),
                "--budget",
                "80GiB",
                "--worker-role",
                "hybrid",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith(
        "policy colocated, budget 80 GiB, worker role hybrid, own phases: distill\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "lots"], ("'lots' is not a number of bytes")),
        (["--settings", "absent.toml"], "absent"),
    ],
)
def test_the_command_says_what_it_cannot_read(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_finds_a_policy_beside_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_the_user.py").write_text(
        "from placement.policies import Resident\nclass Mine(Resident):\n    name = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert main(["explain", "beside_the_user:Mine"]) == 0
    assert capsys.readouterr().out.startswith("policy mine,")
