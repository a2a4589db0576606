"""Provenance of an executed notebook: code, environment, data and host, as digests in its metadata.

`results` runs in every kernel at its end, so this module imports little.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kit import files

DIFF_LIMIT = 20_000  # characters kept of a dirty tree's diff; the digest is of the complete diff


def provenance(source: Path | None, text: str = "") -> dict[str, Any]:
    """What runs, on what, and where, of a notebook in a file or of this text.

    Digests are sha256; `packages` is of the names and versions of all.
    """
    packages = sorted(f"{found.name}=={found.version}" for found in importlib.metadata.distributions())
    constraints = files.REPOSITORY / "env" / "constraints.txt"
    return {
        "notebook_sha256": sha256(source.read_bytes() if source else text.encode()),
        "git": (git(source.parent) if source else None) or git(files.REPOSITORY),
        "constraints": sha256(constraints.read_bytes()) if constraints.exists() else None,
        "packages": sha256("\n".join(packages).encode()),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "gpus": (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def git(folder: Path) -> dict[str, Any] | None:
    """The checkout's commit and the changes of its tracked files; None if there is no checkout."""
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return None
    diff = _output("git", "-C", str(folder), "diff", "HEAD") or ""
    return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff.encode()), "diff": diff[:DIFF_LIMIT]}


def _output(*command: str) -> str | None:
    """What a program prints; None if it is missing, fails or takes longer than 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sha256(content: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def relative(path: str | Path, out: Path | None) -> str:
    """A path as seen from the folder of the executed notebook, which may be moved and shared."""
    return os.path.relpath(path, out.absolute().parent) if out else str(path)


def results(variables: Mapping[str, Any]) -> str:
    """The runs and datasets that variables of a notebook hold, and the numbers of the dict `result`, as JSON."""
    values = [value for name, value in variables.items() if not name.startswith("_")]
    runs = _instances(values, "kit.slurm.run", "Run")
    data = {dataset.manifest["digest"] for dataset in _instances(values, "kit.data.dataset", "Dataset")}
    data |= {run.info["digests"]["data"] for run in runs if run.trains}
    result = variables.get("result")
    numbers = {key: value for key, value in result.items() if _is_numeric(value)} if isinstance(result, dict) else {}
    found = {"runs": [str(run.path) for run in runs], "data": sorted(data), "result": numbers}
    return json.dumps(found, default=float)


def _instances(values: Iterable[Any], module: str, name: str) -> list[Any]:
    """The values of this class; none if the kernel has not imported its module, which is not imported for this."""
    kind = getattr(sys.modules.get(module), name, ())
    return [value for value in values if isinstance(value, kind)]


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list) else hasattr(value, "__float__")
