"""The command line: `kit ...`. Thin; --json prints one object on stdout, progress and warnings go to stderr.

Exit codes: 0 done, 1 a finding or a failure, 2 a wrong call, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from kit import cli_checkpoint, cli_data, cli_job, cli_notebook
from kit.errors import KitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error is a sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("kit: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in (cli_data, cli_job, cli_checkpoint, cli_notebook):
        family.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
