"""The command `placement plan`: jobs, comparisons, and what it says of bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from placement.cli import main

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_job_that_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        model,
        "--shards",
        "2",
        "--kv-cache",
        "64MiB",
        "--budget",
        "1GiB",
        "--link",
        "1GB",
        "--work",
        "train=2,rollout=3.5",
    ]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("policy colocated, budget 1 GiB\n")
    assert text.rstrip().endswith("everything fits")
    assert all(
        name in text
        for name in (
            "rollout",
            "log_prob",
            "train",
            "weight_sync",
            "actor.optimizer",
            "3.500",
            "host memory",
        )
    )
    assert all(len(line) <= 120 for line in text.splitlines())


def test_streamed_steps_are_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                model,
                "--policy",
                "colocated('streamed')",
                "--cycle",
                "log_prob,train",
            ]
        )
        == 0
    )
    assert "is streamed by optimizers" in capsys.readouterr().out


def test_a_job_that_does_not_fit_says_where_and_by_how_much(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--budget", "100MiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (refused,) = [phase for phase in found["phases"] if not phase["fits"]]
    assert refused["phase"] == "train"
    assert refused["wanted_bytes"] - (100 << 20) == refused["over_bytes"] == found["over_bytes"]
    assert main(["plan", model, "--budget", "100MiB"]) == 1
    assert f"({refused['over_bytes']:,} bytes) too many" in capsys.readouterr().out


@pytest.mark.sweep
def test_policies_side_by_side(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    policies = "colocated(drop_gradients=True, stream_sync=False),resident"
    words = [model, "--cycle", "ppo", "--policy", policies, "--budget", "1GiB", "--link", "1GB"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert text.count("yes") == 2
    columns = re.split("  +", text.splitlines()[2].strip())
    assert columns[::2] == policies.rsplit(",", 1)  # options tell two columns of one policy apart
    assert main(["plan", *words, "--json"]) == 0
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == [
        "colocated",
        "resident",
    ]


def test_options_of_models(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--roles", "actor,ref", "--dtype", "float32", "--optimizer", "adamw-master"]
    assert main(["plan", model, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    host_bytes = {handle["name"]: handle["host_bytes"] for handle in found["handles"]}
    assert host_bytes["actor.optimizer"] == pytest.approx(3 * host_bytes["actor"], rel=0.01)
    assert host_bytes["actor"] == pytest.approx(2 * host_bytes["ref"], rel=0.01)
    assert found["budget_bytes"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--link", "absent.json"], "there is no file absent.json"),
        (["MODEL", "--cycle", "rollout,trian"], "did you mean 'train'"),
        (["MODEL", "--roles", "actor,judge"], "--roles: judge is not among"),
        (["MODEL", "--work", "train=long"], "'train=long' is not of the form PHASE=SECONDS"),
        (["MODEL", "--dtype", "bf17"], "'bf17' is no dtype"),
        (["MODEL", "--optimizer", "adamv"], "did you mean 'adamw'"),
        (["MODEL", "--policy", ","], "--policy names no policy"),
        (["MODEL", "--shards", "0"], "shards must be a whole number from 1 on"),
        (["MODEL", "--policy", "colocatd"], "did you mean 'colocated'"),
        (["MODEL", "--discard-weights"], "describes a rollout engine, and the job has none"),
        (["MODEL", "--roles", "actor,rollout", "--kv-cache", "1GiB"], "leave the role rollout out"),
    ],
)
def test_bad_input_is_said(
    words: list[str],
    message: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *(model if word == "MODEL" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
