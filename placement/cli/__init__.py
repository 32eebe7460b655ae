"""The command `placement`. A module of this package has `add_NAME(parser)` for each of its
subcommands: its arguments, and the function that it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from placement.core import __version__
from placement.core.errors import PlacementError

COMMANDS = {
    "dashboards": "write Grafana dashboards, Prometheus rules and a configuration for both",
    "demo": "run a small GRPO job and show what was on the device, phase by phase",
    "doctor": "measure the link and look at what would slow moves down or stop them",
    "explain": "print where a policy puts every handle in every phase, as a table",
    "plan": "forecast what a job needs on the device in each phase, and what its moves cost",
    "resume": "let suspended workers have their GPUs again",
    "status": "print what workers hold on their GPUs, once or again and again",
    "suspend": "ask workers to leave their GPUs until they are resumed",
    "trace": "write the journals of running workers as a Chrome trace for Perfetto",
}
"""Subcommands with their help texts. Only the chosen subcommand's module is imported."""
_MODULES = dict.fromkeys(("dashboards", "resume", "status", "suspend", "trace"), "workers")
_MODULES["explain"] = "plan"
"""The module of each subcommand that has none of its own name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 1 when the command failed, 2 for a mistake on
    the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="placement",
        description="Manage and show which models are on the GPU in RL post-training.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if words and words[0] == name:
            module = importlib.import_module(f"placement.cli.{_MODULES.get(name, name)}")
            getattr(module, f"add_{name}")(subparser)
    parser.add_argument("--version", action="version", version=f"placement {__version__}")
    parsed = parser.parse_args(words)
    if os.getcwd() not in sys.path:
        # a console script does not search the working directory for policies of the user's
        sys.path.append(os.getcwd())
    try:
        status = int(parsed.run(parsed))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        # else the interpreter complains when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130  # as shells say it
    except PlacementError as error:
        print(f"placement {parsed.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return status


def port(text: str) -> int:
    """A port on the command line; 0 takes a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port; write a number from 1 to 65535, or 0 for a free one"
        )
    return int(text)
