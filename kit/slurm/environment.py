"""Job scripts: what each of the kit takes from the cluster profile: directives, environment, tokens, set-up lines."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from kit.config.cluster import Cluster
from kit.errors import InputError
from kit.files import REPOSITORY

# Only the owner may read the file, and what it holds is never shown, not even a line that is no NAME=VALUE.
TOKENS = """\
if [[ $(stat -Lc %a {file}) != *00 ]]; then
  reason="others can read the file of tokens (slurm.env_file): chmod 600 it"
  echo "$reason" >&2
  exit 1
fi
while read -r line || [[ -n $line ]]; do
  line=${{line#export }} value=${{line#*=}} value=${{value#[\\"\\']}} value=${{value%[\\"\\']}}
  if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "${{BASH_REMATCH[0]}}$value"; fi
done < {file}

"""
# An interpreter of the cluster's own, and an image's, need not have the kit.
PYTHONPATH = f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}:${{PYTHONPATH-}}"


def render(cluster: Cluster, options: Iterable[str], body: str, environment: Mapping[str, str] | None = None) -> str:
    """A job of one of the kit's own commands; the profile's environment wins. Raises InputError as `private`."""
    values = {"PYTHONUNBUFFERED": "1"} | dict(environment or {}) | cluster.environment
    directives = [f"#SBATCH {option}" for option in options]
    before = ["set -euo pipefail", *exports(values), PYTHONPATH, tokens(cluster) + setup(cluster) + body]
    return "\n".join(["#!/bin/bash", *directives, *before, ""])


def options(cluster: Cluster, **asked: object) -> list[str]:
    """sbatch's long options, in Python's spelling: the profile's, those that are asked over them, and its free ones."""
    slurm = cluster.slurm
    given = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time} | asked
    return [*(f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value), *slurm.options]


def python(cluster: Cluster) -> str:
    """The interpreter outside of an image, quoted."""
    inside = cluster.slurm.container.kind != "none"  # then slurm.python is the image's
    return shlex.quote(sys.executable if inside else cluster.slurm.python or sys.executable)


def exports(environment: Mapping[str, str]) -> list[str]:
    """Lines of shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def setup(cluster: Cluster) -> str:
    """The profile's set-up lines."""
    lines = "".join(f"{line}\n" for line in cluster.slurm.setup)
    return f"set +u  # module and conda scripts read unset variables\n{lines}set -u\n\n" if lines else ""


def tokens(cluster: Cluster) -> str:
    """Lines of shell that read the profile's file of tokens; none where it names no file. Raises as `private`."""
    file = cluster.slurm.env_file
    return TOKENS.format(file=shlex.quote(str(private(file)))) if file else ""


def private(name: str) -> Path:
    """A file of tokens. Raises InputError where it is not there, or where others can read it."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise InputError(f"slurm.env_file: {path} is not there. Write NAME=VALUE lines into it, and chmod 600 it.")
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise InputError(f"slurm.env_file: {path} has mode {mode:o}, so others can read its tokens: chmod 600 it.")
    return path
