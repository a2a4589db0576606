"""%%sbatch: a notebook cell that is a batch script, linted and submitted as a Run.

{{name}} is the notebook's value of that name, quoted for the shell, a list as several words; {{settings.lr}} and
{{rows[0]}} work too. Everything else stays as it is, ${name} and {a,b} included.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import display

from kit.config.cluster import Cluster
from kit.errors import InputError, KitError
from kit.lint.lint import lint
from kit.lint.report import LintReport
from kit.lint.script import Script
from kit.lint.shell import Code
from kit.slurm.client import version
from kit.slurm.launch import launch_script
from kit.slurm.linting import site_of
from kit.slurm.run import Run

OPTIONS = MagicArgumentParser("%%sbatch", description="Submit the cell as a batch script.")
OPTIONS.add_argument("--cluster", help="a cluster profile: its runs folder, options and size")
OPTIONS.add_argument("--name", help="the run's name; otherwise --job-name in the script")
OPTIONS.add_argument("--anyway", action="store_true", help="submit in spite of errors that the linter found")
OPTIONS.add_argument("--dry-run", action="store_true", help="show the script and its findings, and submit nothing")
PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][\w.]*(?:\[[^\][{}]+\])*)\s*\}\}", re.ASCII)
# Nodes of the syntax tree inside which a quoted value would not stay one word.
QUOTED = {"string", "raw_string", "ansi_c_string", "heredoc_body", "comment"}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic, for %load_ext."""
    shell.register_magic_function(sbatch, "cell")


def sbatch(line: str, cell: str) -> Run | None:
    """Submit the cell as a batch script, and return the Run. Raises KitError for errors that the linter found."""
    shell, options = get_ipython(), OPTIONS.parse_args(shlex.split(line))
    cluster = Cluster.load(options.cluster) if options.cluster else None
    script = fill(cell, shell.ev)
    report = LintReport({"cell": script}, lint(script, "cell", site_of(cluster, version())))
    if report.findings:
        display(report)
    if options.dry_run:
        print(f"{script}\n# Nothing was submitted because of --dry-run.")
        return None
    if report.errors and not options.anyway:
        rules = ", ".join(finding.rule for finding in report.errors)
        raise KitError(f"Not submitted: {rules}. Correct the script, or use %%sbatch --anyway.")
    name = options.name or Script(script).request.value("job-name") or "cell"
    return launch_script(script, cluster or Cluster("unnamed"), re.sub(r"[^\w.-]", "-", name))


def fill(cell: str, look_up: Callable[[str], object]) -> str:
    """The cell with every {{name}} replaced by the value that `look_up` returns, quoted for the shell.

    Raises InputError for an unknown name, a value of another type, and one that cannot be quoted where it is used.
    """
    code = Code(PLACEHOLDER.sub(lambda match: "_" * len(match[0]), cell))

    def replacement(match: re.Match[str]) -> str:
        words = _words(match, look_up)
        quoted = " ".join(map(shlex.quote, words))
        before = cell[: match.start()]
        if before.rpartition("\n")[2].startswith("#SBATCH"):  # sbatch itself reads quotes there
            inside, quotable = "comment", "\n" not in quoted
        else:
            start = len(before.encode())
            quotes = code.node_types(start, start + len(match[0])) & QUOTED
            inside, quotable = min(quotes, default=""), not quotes or quoted == " ".join(words)
        if not quotable:
            raise InputError(
                f"{match[0]} is in a {inside.replace('_', ' ')}, where its value, {' '.join(words)!r}, cannot be "
                f"quoted. Set a variable on its own line (VALUE={match[0]}) and use that."
            )
        return quoted

    return PLACEHOLDER.sub(replacement, cell)


def _words(match: re.Match[str], look_up: Callable[[str], object]) -> list[str]:
    """The value of a placeholder as words."""
    try:
        value = look_up(match[1])
    except (NameError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{match[0]} is not known to this notebook: {error}.") from None
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | int | float | Path) for item in items):
        raise InputError(f"{match[0]} is a {type(value).__name__}; give text, a number, a path or a list of them.")
    return [str(item) for item in items]
