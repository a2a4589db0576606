"""The command line: `kit ...`. One function per command and no logic; a module per subject.

`--json` prints one object on stdout; progress and warnings go to stderr. Exit codes: 0 done, 1 a finding or a failure,
2 a wrong call, 130 interrupted. The commands import what they need, so that `kit --help` starts quickly.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

import kit
from kit.cli import data, jobs, notebooks, outputs
from kit.cli.base import SETTINGS, KitGroup

app = typer.Typer(name="kit", cls=KitGroup, **SETTINGS)
for subject in (jobs, data, outputs, notebooks):
    app.add_typer(subject.app)  # without a name: its commands become commands of `kit`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kit")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kit {kit.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune language models on Slurm clusters: prepare, predict, launch, watch, export, repeat."""
