"""The linter's rules, one module for each group. RULES has all of them, by id.

To add a rule: its texts in rules.toml; there also what it looks for (`find`), or else a function with @rule in the
module of its group; and in tests/lint/scripts.py a script that has the fault, a correct script that resembles it, and a
correct script with one change.

Sources: sbatch(1) and srun(1) of 22.05, what that sbatch accepts, SchedMD's changelogs of later releases (CHANGELOG/ in
SchedMD/slurm), torch.distributed.run, bash(1).
"""

from kit.lint import table
from kit.lint.rule import RULES
from kit.lint.rules import directives, ending, habits, logs, rendezvous, resources, signals

__all__ = ["RULES", "directives", "ending", "habits", "logs", "rendezvous", "resources", "signals", "table"]
