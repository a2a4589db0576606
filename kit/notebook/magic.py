"""%%sbatch: a cell that is your own batch script, linted and submitted as a Run. Load: `%load_ext kit.notebook.magic`.

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
from kit.lint.lint import lint, slurm_version
from kit.lint.report import beside
from kit.lint.script import Script
from kit.lint.shell import Code
from kit.slurm.launch import launch_script
from kit.slurm.run import Run

OPTIONS = MagicArgumentParser("%%sbatch", description="Submit the cell as a batch script.")
OPTIONS.add_argument("--cluster", help="a cluster profile: its runs folder, its own options and its size")
OPTIONS.add_argument("--name", help="the run's name; otherwise --job-name in the script")
OPTIONS.add_argument("--anyway", action="store_true", help="submit in spite of errors that the linter found")
OPTIONS.add_argument("--dry-run", action="store_true", help="show the script and its findings, and submit nothing")
PLACE = re.compile(r"\{\{\s*([A-Za-z_][\w.]*(?:\[[^\][{}]+\])*)\s*\}\}", re.ASCII)
HELD = {"string", "raw_string", "ansi_c_string", "heredoc_body", "comment"}


def fill(cell: str, look_up: Callable[[str], object]) -> str:
    """The cell with every {{name}} replaced by what `look_up` gives, quoted for the shell.

    Raises InputError for other values, and for one that needs quotes inside quotes, a comment or a heredoc.
    """
    code = Code(PLACE.sub(lambda m: "_" * len(m[0]), cell))

    def value(match: re.Match[str]) -> str:
        try:
            found = look_up(match[1])
        except (NameError, AttributeError, LookupError, TypeError) as error:
            raise InputError(f"{match[0]} is not known to this notebook: {error}.") from None
        items = list(found) if isinstance(found, list | tuple) else [found]
        if not all(isinstance(item, str | int | float | Path) for item in items):
            raise InputError(f"{match[0]} is a {type(found).__name__}; give text, a number, a path or a list of them.")
        plain, text = " ".join(map(str, items)), " ".join(shlex.quote(str(item)) for item in items)
        start = len(cell[: match.start()].encode())
        held = code.around(start, start + len(match[0])) & HELD
        directive = cell[: match.start()].rpartition("\n")[2].startswith("#SBATCH")  # sbatch reads quotes there
        if "\n" in text if directive else held and plain != text:
            why = f"{match[0]} stands in a {min(held).replace('_', ' ')}, where its value, {plain!r}, cannot be quoted."
            raise InputError(f"{why} Set a variable on a line of its own (VALUE={match[0]}) and use that.")
        return text

    return PLACE.sub(value, cell)


def sbatch(line: str, cell: str) -> Run | None:
    """Submit the cell as a batch script; gives the Run. Raises KitError for errors that the linter found."""
    shell, given = get_ipython(), OPTIONS.parse_args(shlex.split(line))
    cluster = Cluster.load(given.cluster) if given.cluster else None
    script = fill(cell, shell.ev)
    if found := lint(script, "cell", cluster, slurm_version()):
        display(beside(script, found), raw=True)
    if given.dry_run:
        print(script + "\n# Nothing was submitted: that is what --dry-run is for.")
        return None
    if (errors := [f.rule for f in found if f.severity == "error"]) and not given.anyway:
        raise KitError(f"Not submitted: {', '.join(errors)}. Correct the script, or say %%sbatch --anyway.")
    name = given.name or Script(script).value("job-name") or "cell"
    return launch_script(script, cluster or Cluster("unnamed"), re.sub(r"[^\w.-]", "-", name))


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What %load_ext calls."""
    shell.register_magic_function(sbatch, "cell")
