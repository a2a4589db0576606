"""What every job script takes from the cluster profile: sbatch options, environment, tokens, set-up lines, Python."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from kit.config.cluster import Cluster
from kit.errors import InputError
from kit.files import REPOSITORY
from kit.slurm.template import fill

# An interpreter of the cluster, or of an image, may not have the kit installed.
PYTHONPATH = f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}:${{PYTHONPATH-}}"

# Reports of use, checks for new versions and access to hubs, off by the variables that libraries and trainers document.
# Model and data were found at the launch, and compute nodes may have no network.
NOTHING_LEAVES = MappingProxyType({
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "USE_MODELSCOPE_HUB": "0",
    "USE_OPENMIND_HUB": "0",
    "VLLM_NO_USAGE_STATS": "1",
})  # fmt: skip


def render(cluster: Cluster, options: Iterable[str], body: str, environment: Mapping[str, str] | None = None) -> str:
    """The script of a job that runs one of the kit's commands. The environment of the profile has precedence.

    Raises InputError as `check_token_file` does.
    """
    values = {"PYTHONUNBUFFERED": "1"} | dict(environment or {}) | cluster.environment
    directives = [f"#SBATCH {option}" for option in options]
    before = ["set -euo pipefail", *exports(values), PYTHONPATH, tokens(cluster) + setup(cluster) + body]
    return "\n".join(["#!/bin/bash", *directives, *before, ""])


def options(cluster: Cluster, **asked: object) -> list[str]:
    """Options for sbatch: the profile's partition, account and time, replaced by those asked, then slurm.options.

    Names are sbatch's long options with underscores; an empty value leaves the option out, True gives it no value.
    """
    slurm = cluster.slurm
    given = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time} | asked
    named = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value}
    return [*(name if value is True else f"{name}={value}" for name, value in named.items()), *slurm.options]


def has_image(cluster: Cluster) -> bool:
    """Whether the ranks run in a container image; slurm.python is then the interpreter in the image."""
    return cluster.slurm.container.kind != "none"


def interpreter(cluster: Cluster) -> str:
    """The Python interpreter on the nodes, outside of an image."""
    return sys.executable if has_image(cluster) else cluster.slurm.python or sys.executable


def python(cluster: Cluster) -> str:
    """`interpreter`, quoted for the shell."""
    return shlex.quote(interpreter(cluster))


def exports(environment: Mapping[str, str]) -> list[str]:
    """Lines of shell that export these variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def setup(cluster: Cluster) -> str:
    """The profile's set-up lines (slurm.setup) as shell code, or an empty string."""
    if not cluster.slurm.setup:
        return ""
    lines = "".join(f"{line}\n" for line in cluster.slurm.setup)
    return f"set +u  # module and conda scripts read unset variables\n{lines}set -u\n\n"


def tokens(cluster: Cluster) -> str:
    """Shell code that exports the variables of the profile's token file; empty where there is none.

    Raises InputError as `check_token_file` does.
    """
    file = cluster.slurm.env_file
    return fill("tokens.sh", {"file": str(check_token_file(file))}, {}) if file else ""


def check_token_file(name: str) -> Path:
    """The token file's absolute path. Raises InputError where it does not exist, or others can read it."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise InputError(f"slurm.env_file: {path} does not exist. Write NAME=VALUE lines into it, and chmod 600 it.")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InputError(f"slurm.env_file: {path} has mode {mode:o}, so others can read its tokens: chmod 600 it.")
    return path
