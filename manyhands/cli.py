"""The command line. Wrong input: one line, exit 2, nothing started. Exit 0 only if the work was done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from manyhands.commands.judging import evaluate, play, plot, random_player, record_starts, table
from manyhands.commands.options import INTERRUPTED
from manyhands.commands.studying import plan, study, suite
from manyhands.commands.training import bench, recipes, resume, train
from manyhands.types import RunError, UsageError

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "play": play,
    "random": random_player,
    "record-starts": record_starts,
    "table": table,
    "plot": plot,
    "bench": bench,
    "plan": plan,
    "study": study,
    "suite": suite,
    "recipes": recipes,
}


def _usage() -> str:
    lines = ["usage: manyhands COMMAND ...", ""]
    lines += [f"  {name:<13} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "'manyhands COMMAND --help' explains each"])


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _dispatch(arguments)
    except UsageError as error:
        print(f"manyhands: {error}", file=sys.stderr)
        code = 2
    except RunError as error:
        print(f"manyhands: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # `manyhands recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from manyhands import __version__

        print(f"manyhands {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(COMMANDS)})"
        raise UsageError(f"no command {arguments[0]!r}{hint}")
    return command(arguments[1:])
