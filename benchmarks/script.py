"""What every benchmark begins with: options from the command line, one line for what is wrong with them, a quiet Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from manyhands.config import Recipe, load_recipe
from manyhands.flags import override, parse
from manyhands.types import RunError, UsageError


def run(main: Callable[[Any], int | None], options: type, about: str | None, arguments: Sequence[str] | None = None) -> NoReturn:
    """Ends the process: 0, what main says, 1 for what failed, 2 for wrong options, 130 for Ctrl-C."""
    program = Path(sys.argv[0]).name
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        sys.exit(main(parse(options, words, program, description=about, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UsageError, RunError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def changed(recipe: str, options: Sequence[str]) -> Recipe:
    """A recipe with some of its options given as section.key=value."""
    words: list[str] = []
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip("-"):
            raise UsageError(f"{option}: give section.key=value")
        words += [f"--{name.lstrip('-')}", value]
    return override(load_recipe(recipe), words, recipe)
