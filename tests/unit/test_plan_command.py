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
        "--rate",
        "1GB",
        "--work",
        "train=2,rollout=3.5",
    ]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "one of 2 ranks (shards 2, tensor parallel 1, data parallel 1), 2 a node\n"
    )
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
            " a node",
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
                "--steps",
                "train=4",
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
    words = [model, "--cycle", "ppo", "--compare", policies, "--budget", "1GiB", "--rate", "1GB"]
    assert main(["plan", *words]) == 0
    head, text = (out := capsys.readouterr().out).split("\n\n", 1)
    assert "resident" in text
    assert "critic" not in head
    assert out.count("yes") == 2
    columns = re.split("  +", text.splitlines()[2].strip())
    assert columns[::2] == policies.rsplit(",", 1)  # options tell two columns of one policy apart
    assert main(["plan", *words, "--json"]) == 0
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == [
        "colocated",
        "resident",
    ]


def test_options_of_models(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--roles",
        "actor,ref",
        "--dtype",
        "float32",
        "--optimizer",
        "adamw-master",
        "--gradients",
        "kept",
        "--shards",
        "8",
    ]
    assert (
        main(["plan", model, *words, "--replicated", "ref", "--model-of", f"ref={model}", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    handles = {each["name"]: each for each in found["handles"]}
    assert handles["ref"]["node_host_bytes"] < 8.1 * handles["ref"]["host_bytes"]
    assert handles["actor.optimizer"]["host_bytes"] == pytest.approx(
        3 * handles["actor"]["host_bytes"] / 2, rel=0.01
    )
    assert found["budget_bytes"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--link", "absent.json"], "there is no file absent.json"),
        (["MODEL", "--cycle", "rollout,trian"], "did you mean 'train'"),
        (["MODEL", "--roles", "actor,judge"], "--roles: judge is not among"),
        (["MODEL", "--model-of", "ref"], "is not of the form ROLE=CONFIG"),
        (["MODEL", "--work", "train=long"], "'long' of phase 'train' is no number of seconds"),
        (["MODEL", "--steps", "train=many"], "'many' of phase 'train' is no number of steps"),
        (
            ["MODEL", "--tensor-parallel", "3", "--gpus-per-node", "3"],
            ("does not divide the model's num_attention_heads, 8"),
        ),
        (["MODEL", "--shards", "0"], "shards must be a whole number from 1 on"),
        (["MODEL", "--policy", "colocatd"], "did you mean 'colocated'"),
        (["MODEL", "--replicated", "actor"], "--replicated: actor is written to"),
        (
            ["MODEL", "--kv-cache", "1GiB", "--rollout-tensor-parallel", "0"],
            ("--rollout-tensor-parallel must be 1 or more, not 0"),
        ),
        (
            ["MODEL", "--rollout-tensor-parallel", "4"],
            ("--rollout-tensor-parallel describes a rollout engine, and the job has none"),
        ),
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
