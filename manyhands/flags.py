"""The command line's overrides of a recipe: every key is an option, typos are answered with the nearest one."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import math
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import tyro

from manyhands.config import KINDS, Recipe, env_class, nearest, type_name
from manyhands.types import UsageError


def flags_of(recipe: Recipe) -> dict[str, Any]:
    """Every override as it is written: {"--sampler.num-envs": type}."""
    flags: dict[str, Any] = {}

    def visit(value: Any, prefix: str) -> None:
        hints = typing.get_type_hints(type(value))
        for f in dataclasses.fields(value):
            inner = getattr(value, f.name)
            if dataclasses.is_dataclass(inner):
                visit(inner, f"{prefix}{f.name}.")
            else:
                flags["--" + (prefix + f.name).replace("_", "-")] = hints[f.name]

    visit(recipe, "")
    return flags


def override(recipe: Recipe, arguments: list[str], program: str, beside: str = "", own: Iterable[str] = ()) -> Recipe:
    """The recipe with `--section.key value` applied by tyro, after a check that names the nearest flag for a typo. own: the
    command's own options; beside: what --help says of them."""
    arguments = normalised(arguments)
    recipe, arguments = _with_kinds(_with_env_kind(recipe, arguments), arguments)
    flags = flags_of(recipe)
    arguments = _with_switches(arguments, flags)
    if "--help" not in arguments and "-h" not in arguments:
        check_flags(arguments, flags, own)
        arguments = _checked_numbers(arguments, flags)
    kinds = "; ".join(f"--{section}.name {'|'.join(names)}" for section, names in KINDS.items())
    about = f"Every key of the recipe is an option. Other kinds, with options of their own: {kinds}."
    about += f" Beside them:\n{beside}" if beside else ""
    return parse(Recipe, arguments, program, default=recipe, description=about)


def _with_switches(arguments: list[str], flags: dict[str, Any]) -> list[str]:
    """`--memory.prioritized` alone means True."""
    words: list[str] = []
    for i, word in enumerate(arguments):
        alone = i + 1 == len(arguments) or arguments[i + 1].startswith("--")
        words += [word, "True"] if flags.get(word) is bool and alone else [word]
    return words


def _checked_numbers(arguments: list[str], flags: dict[str, Any]) -> list[str]:
    """Numbers as people write them – 1e6, 200_000 – and one clear line for what is none."""
    words = list(arguments)
    for i, word in enumerate(words):
        kind = next((k for k in (float, int) if k is flags.get(word) or k in typing.get_args(flags.get(word))), None)
        if kind is None or words[i + 1 : i + 2] == ["None"]:
            continue
        if i + 1 == len(words) or words[i + 1].startswith("--"):
            raise UsageError(f"{word} needs a value")
        try:
            number = float(words[i + 1])
        except ValueError:
            raise UsageError(f"{word} {words[i + 1]}: must be {type_name(kind)}") from None
        if kind is int:
            if number != int(number if math.isfinite(number) else 0.5):
                raise UsageError(f"{word} {words[i + 1]}: must be a whole number")
            words[i + 1] = str(int(number))
    return words


def parse(
    target: Any,
    arguments: list[str],
    program: str,
    default: Any = None,
    description: str | None = None,
    config: Sequence[Any] = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
) -> Any:
    """tyro, with its error boxes folded into one line."""
    extra = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(target, args=arguments, prog=program, config=config, description=description, **extra)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_fold(errors.getvalue())) from None


def _fold(box: str) -> str:
    """tyro draws errors in a box and repeats the usage: keep the sentences of its first part."""
    lines = [line.strip("│╭╮╰╯─| \t") for line in box.splitlines()]
    lines = [line for line in lines if line and "Parsing error" not in line and "Required options" not in line]
    text = " ".join(lines)
    for end in ("For full helptext", "Full helptext", "Argument helptext"):
        text = text.split(end)[0]
    for twice in ("Invalid choice ", "Missing argument ", "Value error", "Unrecognized options "):  # the heading of the box
        text = text.removeprefix(twice)
    return text.strip() or "cannot read the arguments"


def normalised(arguments: list[str]) -> list[str]:
    """`--a=b` as two words, TOML's true and false as Python's."""
    words: list[str] = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("--") and "=" in argument else [argument]
    words = ["--" + word[2:].replace("_", "-") if word.startswith("--") else word for word in words]
    return [{"true": "True", "false": "False"}.get(word, word) for word in words]


def _with_env_kind(recipe: Recipe, arguments: list[str]) -> Recipe:
    """`--env.id` may name another kind of simulator, which then starts from its own defaults."""
    if "--env.id" in arguments[:-1]:
        env_id = arguments[arguments.index("--env.id") + 1]
        cls = env_class(env_id)
        if cls is not type(recipe.env):
            return dataclasses.replace(recipe, env=cls(id=env_id))
    return recipe


def _with_kinds(recipe: Recipe, arguments: list[str]) -> tuple[Recipe, list[str]]:
    """`--store.name shared` and its like choose another kind, which starts from its own defaults."""
    words, chosen = list(arguments), {}
    for section, kinds in KINDS.items():
        flag = f"--{section}.name"
        while flag in words[:-1]:
            at = words.index(flag)
            name = words[at + 1]
            if name not in kinds:
                raise UsageError(f"{flag} {name}: no such {section}{nearest(name, kinds)}")
            del words[at : at + 2]
            if kinds[name] is not type(getattr(recipe, section)):
                chosen[section] = kinds[name]()
    return dataclasses.replace(recipe, **chosen), words


def _check_other_kinds(flag: str) -> None:
    """An option that another algorithm, rule or memory has."""
    section, _, key = flag.removeprefix("--").replace("-", "_").partition(".")
    owners = [n for n, cls in KINDS.get(section, {}).items() if key in {f.name for f in dataclasses.fields(cls)}]
    if owners:
        choose = f"--{section}.name {owners[0]}"
        if "replay" in owners:
            choose += " --algorithm.name dqn"
        elif section == "algorithm" and "dqn" in owners[0]:
            choose += " --memory.name replay"
        raise UsageError(f"{flag} belongs to {section} {' and '.join(owners)}, which this recipe does not have; {choose} would")


def check_flags(arguments: list[str], flags: dict[str, Any], own: Iterable[str] = ()) -> None:
    for i, word in enumerate(arguments):
        if word.startswith("--") and word not in flags:
            if "--sampler.kind" in flags:  # a recipe's
                _check_other_kinds(word)
            elif "." in word:
                raise UsageError(f"{word}: a run keeps its recipe; the options are {', '.join(flags)}")
            inside = [
                flag for flag in flags if len(word) > 2 and flag.partition(".")[2] == word[2:]
            ]  # --double for --algorithm.double
            near = inside or difflib.get_close_matches(word, [*own, *flags], 1, 0.7)
            raise UsageError(f"unknown option {word}" + (f"; did you mean {near[0]!r}?" if near else "; --help lists all"))
        if not word.startswith("--") and (i == 0 or (i > 1 and not arguments[i - 1].startswith("--"))):
            previous = next((w for w in reversed(arguments[:i]) if w.startswith("--")), None)
            if previous is None or typing.get_origin(flags[previous]) is not tuple:
                raise UsageError(f"unexpected argument {word!r}: overrides are written --section.key value")
