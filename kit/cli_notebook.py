"""`kit demo`, `run`: notebooks without a browser."""

import argparse
from pathlib import Path
from typing import Any

from kit.command import Commands, add, pairs


def register(commands: Commands) -> None:
    """These commands' parsers."""
    one = add(commands, "demo", demo, "run every notebook headless on the embedded default")
    one.add_argument("--out", default="demo")
    one = add(commands, "run", run_notebook, "execute a notebook; its end is told truthfully")
    one.add_argument("notebook")
    one.add_argument("out")
    one.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    one.add_argument("-f", dest="file", metavar="PARAMS.yaml")


def demo(options: argparse.Namespace) -> int:
    """`kit demo`: all notebooks, end to end."""
    from kit.demo import demo as run_demo

    return run_demo(Path(options.out))


def run_notebook(options: argparse.Namespace) -> int:
    """`kit run`."""
    from kit.execute import execute
    from kit.parameters import read_values

    given: dict[str, Any] = {}
    if options.file:
        given |= read_values(Path(options.file))
    print(execute(Path(options.notebook), Path(options.out), given | pairs(options.parameters)))
    return 0
