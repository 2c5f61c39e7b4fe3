"""How commands read their words: options of their own, a recipe's keys, or a run directory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from manyhands.types import UsageError

INTERRUPTED = 130
RunDirectory = Annotated[Path, tyro.conf.Positional]
Options = dict[str, tuple[Any, str]]  # name -> default, explanation


def program(command: str) -> str:
    return f"manyhands {command}"


def recipe_and_options(command: str, arguments: list[str], options: Options) -> tuple[Any, dict[str, Any]]:
    """RECIPE, overrides of its keys, and the command's own options, which are taken out first."""
    from manyhands.config import load_recipe, recipe_names
    from manyhands.flags import override

    words, own = take_options(arguments, options)
    if words and words[0] in ("--help", "-h"):
        print(f"usage: {program(command)} RECIPE [--section.key value ...] [OPTIONS]\n\n{explained(options)}\n")
        print(f"recipes: {', '.join(recipe_names())}\n'{program(command)} RECIPE --help' lists every key of a recipe")
        sys.exit(0)
    flags = [f"--{name.replace('_', '-')}" for name in options]
    if not words or words[0].startswith("-"):
        raise UsageError(f"usage: {program(command)} RECIPE [--section.key value ...]   (and: {', '.join(flags)})")
    recipe = override(load_recipe(words[0]), words[1:], f"{program(command)} {words[0]}", explained(options), flags)
    return recipe, own


def explained(options: Options) -> str:
    lines = []
    for name, (default, about) in options.items():
        kind = {bool: "", str: " TEXT"}.get(type(default), " NUMBER")
        usual = "" if not kind or default == "" else f" ({default})" if kind == " TEXT" else f" ({default:,.10g})"
        lines.append(f"  --{name.replace('_', '-') + kind:<28} {about}{usual}")
    return "\n".join(lines)


def take_options(arguments: list[str], options: Options) -> tuple[list[str], dict[str, Any]]:
    """Options with a bool default are switches; the others take a value of their default's type."""
    values = {name: default for name, (default, _) in options.items()}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, attached = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name not in options:
            rest.append(word)
            continue
        kind = type(options[name][0])
        if kind is bool:
            if attached not in ("", "true", "false"):
                raise UsageError(f"{word}: {flag} is a switch, it takes no value")
            values[name] = attached != "false"
        else:
            value = attached if equals else next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
            try:
                values[name] = kind(value)
            except ValueError:
                raise UsageError(f"{flag} {value}: must be a number") from None
    return rest, values


def options_of(cls: Any, command: str, arguments: list[str], about: str) -> Any:
    from manyhands.flags import check_flags, normalised, parse

    flags = {"--" + f.name.replace("_", "-"): f.type for f in dataclasses.fields(cls)} | {"--help": None, "-h": None}
    # --json and --quiet are switches: FlagConversionOff (which recipes need) would ask for a value.
    switches = {"--" + f.name for f in dataclasses.fields(cls) if f.type == "bool"}
    words: list[str] = []
    for word in normalised(arguments):
        if word.startswith("--") and word not in flags:
            check_flags([word], flags)
        words += [word, "True"] if word in switches else [word]
    if not words:
        asked = dataclasses.fields(cls)[0].name.upper()
        raise UsageError(f"usage: {program(command)} {asked}   ('{program(command)} --help' explains)")
    return parse(cls, words, program(command), description=about)


def check_picture(option: str, path: str) -> None:
    """Before the work whose picture it is."""
    if path and Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{option} {path}: the name must end in .png, .svg or .pdf")
    if path and not Path(path).parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {Path(path).parent}")


def warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
