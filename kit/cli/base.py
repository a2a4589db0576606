"""What all commands share: their options, how they print, and how errors become exit codes."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from kit.errors import InputError, KitError
from kit.show import Result


class KitGroup(TyperGroup):
    """Turns errors into a message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.Exit with the exit code of a KitError, or 128 + that of SIGINT or SIGPIPE."""
        try:
            return self._invoke(ctx)
        except KitError as error:
            warn(f"kit: {error}")
            raise typer.Exit(error.exit_code) from None
        except PermissionError as error:
            warn(f"kit: {error.filename}: {error.strerror}. Its owner can open it to you: ls -ld shows who that is.")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            warn("kit: interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # as in `kit state RUN | head -1`: what is left has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        finally:
            sys.stdout.flush()


SETTINGS: dict[str, Any] = {"no_args_is_help": True, "pretty_exceptions_enable": False, "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]}}  # fmt: skip


def example(command: str) -> str:
    """The end of a command's help."""
    return f"Example: [bold]{escape(command)}[/bold]"


RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a recipe (`kit recipes` lists them).")
]
Overrides = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Override, such as schedule.lr=1e-4.")
]
ClusterName = Annotated[str, typer.Option("--cluster", help="A cluster profile, or its name (`kit clusters`).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, run name or job id; `latest` is the newest.")]
Task = Annotated[int | None, typer.Argument(help="One task of an array; without it, the complete run.")]
Ranks = Annotated[str, typer.Option(metavar="N,M", help="Numbers of ranks.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; may be repeated.")]
Repeats = Annotated[int, typer.Option(help="Samples of each method, in fresh processes.")]


def warn(text: object) -> None:
    """Print progress or a warning on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def emit(result: Result, as_json: bool) -> None:
    """Print a result: one JSON object, tables and colour on a terminal, or plain text in a pipe."""
    if as_json:
        print(json.dumps(result.as_dict(), default=str))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(result)
    else:
        print(result)


def finish(failed: bool) -> None:
    """Exit with 1 where something was found or failed."""
    if failed:
        raise typer.Exit(1)


def pairs(words: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE words as a mapping. Raises InputError for a word without an equals sign."""
    for word in words or ():
        if "=" not in word:
            raise InputError(f"Expected NAME=VALUE, got {word!r}.")
    return dict(word.split("=", 1) for word in words or ())


def load_recipe(name: str, overrides: Sequence[str] | None) -> Any:
    """The recipe with its overrides."""
    from kit.config.recipe import Recipe

    return Recipe.load(name, **pairs(overrides))


def load_cluster(name: str) -> Any:
    """The cluster of a profile."""
    from kit.config.cluster import Cluster

    return Cluster.load(name)


def find_run(name: str) -> Any:
    """The run of that folder, name or job id."""
    from kit.slurm.run import Run

    return Run.attach(name)


def numbers(text: str) -> list[int]:
    """Whole numbers from 1 with commas between. Raises InputError for anything else."""
    words = [word for word in text.split(",") if word]
    if not all(word.isdigit() and int(word) for word in words):
        raise InputError(f"Expected whole numbers from 1 with commas between, got {text!r}.")
    return [int(word) for word in words]
