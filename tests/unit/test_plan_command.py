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


def test_a_limit_on_host_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--host-limit", "120MiB", "--policy", "colocated,resident"]) == 0
    assert "disk, this rank" in capsys.readouterr().out
    assert main(["plan", model, "--host-limit", "120MiB"]) == 0
    text = capsys.readouterr().out
    assert "disk: " in text
    assert "on disk: none" not in text
    assert main(["plan", model, "--host-limit", "10GiB"]) == 0
    assert "on disk: none" in capsys.readouterr().out
    # a manager refuses to register the optimizer
    assert main(["plan", model, "--host-limit", "100MiB"]) == 1
    text = capsys.readouterr().out
    assert (
        "registration is refused:\n'actor.optimizer' together with actor, which it steps, needs"
    ) in text
    assert text.endswith("it does not fit\n")
    assert main(["plan", model, "--host-limit", "100MiB", "--policy", "colocated,resident"]) == 1
    text = capsys.readouterr().out
    assert text.count("actor.optimizer' together with actor") == 1
    assert "yes" not in text


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
            "a node; on disk: none",
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
    assert main(["plan", model, *words, "--ranks-per-node", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    handles = {each["name"]: each for each in found["handles"]}
    actor, optimizer, ref = (handles[name] for name in ("actor", "actor.optimizer", "ref"))
    assert optimizer["host_bytes"] == pytest.approx(3 * actor["host_bytes"], rel=0.01)
    assert actor["host_bytes"] == pytest.approx(2 * ref["host_bytes"], rel=0.01)
    assert ref["node_host_bytes"] == 4 * ref["host_bytes"]
    assert found["budget_bytes"] is None
    assert not found["notes"]


def test_remarks_on_a_configuration_are_noted(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model).write_text(json.dumps({**CONFIG, "dtype": None}))
    assert main(["plan", model, "--dtype", "bf16", "--roles", "actor"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert main(["plan", model, "--dtype", "bf16"]) == 0  # the reference is as the file says
    assert "has no dtype; the weights" in capsys.readouterr().out


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
