"""What the commands of every family share: their common options, and how they print.

A family is a module `cli_*.py` with `register(commands)`; `kit.cli` puts them together.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kit.config.recipe import Recipe
from kit.errors import InputError

Commands = Any  # what argparse's add_subparsers() returns
Command = Callable[[argparse.Namespace], int]


def add(commands: Commands, name: str, command: Command, text: str, *options: str) -> argparse.ArgumentParser:
    """A command's parser; `options` are names from OPTIONS."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    for option in options:
        OPTIONS[option](parser)
    return parser


def group(commands: Commands, name: str, text: str) -> Commands:
    """A word that only stands before other commands, as `kit checkpoint` does."""
    return commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar="COMMAND")


def _recipe_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="recipe file, or the name of a shipped one")
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as schedule.lr=1e-4"
    )


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], Any]] = {
    "recipe": _recipe_option,
    "cluster": lambda p: p.add_argument(
        "--cluster", default="local", help="cluster profile or the name of a shipped one"
    ),
    "run": lambda p: p.add_argument("run", help="run folder, run name or job id"),
    "json": lambda p: p.add_argument("--json", action="store_true", help="one JSON object on stdout"),
}


def pairs(words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping."""
    if wrong := [w for w in words if "=" not in w]:
        raise InputError(f"{wrong[0]!r} is no NAME=VALUE.")
    return dict(w.split("=", 1) for w in words)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe with its overrides."""
    return Recipe.load(options.recipe, **pairs(options.set))


def say(text: object) -> None:
    """Progress and warnings: on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def show(options: argparse.Namespace, value: Any, lines: Sequence[str]) -> None:
    """The answer: lines, or with --json one object, on stdout."""
    print(json.dumps(value, default=str) if options.json else "\n".join(lines))
