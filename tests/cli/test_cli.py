"""The command line, and the pieces of the demo."""

from __future__ import annotations

import os
import sys

import pytest

import placement
from placement.cli import COMMANDS, main


def test_help_lists_every_command_and_the_version_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"placement {placement.__version__}\n"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(
        name in text and summary in " ".join(text.split()) for name, summary in COMMANDS.items()
    )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["demo", "--device", "tpu"],
        ["demo", "--steps", "0"],
        ["plan"],
        ["demo", "--serve", "99999"],
        ["demo", "--json", "no/such/directory/result.json"],
    ],
)
def test_a_mistake_on_the_command_line_exits_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: placement" in capsys.readouterr().err


def test_an_error_of_placement_is_one_line_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "simulated", "--policy", "no-such-policy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("placement demo: PolicyError: ")
    assert "Traceback" not in error


def test_a_reader_that_stops_reading_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    # closing it writes what was not written yet, as the end of the interpreter does
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["explain"]) == 1


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("placement.cli.workers.run_status", interrupted)
    assert main(["status"]) == 130
