"""Replay: what an executed notebook came of, and whether the same comes of it again.

Every kernel imports this at its end, so it imports little.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError

DIFF = 20_000  # characters kept of a dirty tree's diff; its digest is of all
REASONS = {
    "code": ("notebook_sha256", "git"), "environment": ("python", "packages", "constraints"), "data": ("data",),
    "host": ("host", "machine", "gpus"),
}  # fmt: skip


def provenance(source: Path) -> dict[str, Any]:
    """What runs, on what, and where. Digests are sha256; `packages` is of the name and version of each."""
    packages = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    constraints = files.REPOSITORY / "env" / "constraints.txt"
    return {
        "notebook_sha256": sha256(source.read_bytes()),
        "git": git(source.parent) or git(files.REPOSITORY),
        "constraints": sha256(constraints.read_bytes()) if constraints.exists() else None,
        "packages": sha256("\n".join(packages).encode()),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "gpus": (_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def git(folder: Path) -> dict[str, Any] | None:
    """The checkout's commit, and how its tracked files differ from it; None where there is no checkout."""
    if not (commit := _said("git", "-C", str(folder), "rev-parse", "HEAD")):
        return None
    diff = _said("git", "-C", str(folder), "diff", "HEAD") or ""
    return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff.encode()), "diff": diff[:DIFF]}


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sha256(content: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def held(variables: Mapping[str, Any]) -> str:
    """In the kernel, at its end: runs and data that variables hold, and the numbers in a dict `result`, as JSON."""
    values = [value for name, value in variables.items() if not name.startswith("_")]
    runs = [v for v in values if type(v).__module__ == "kit.slurm.run" and not isinstance(v, type)]
    data = {v.manifest["digest"] for v in values if type(v).__module__ == "kit.data.dataset" and hasattr(v, "manifest")}
    data |= {run.info["digests"]["data"] for run in runs if run.trains}
    given = variables.get("result")
    numbers = {k: v for k, v in given.items() if _numeric(v)} if isinstance(given, dict) else {}
    return json.dumps({"runs": [str(r.path) for r in runs], "data": sorted(data), "result": numbers}, default=float)


def _numeric(value: Any) -> bool:
    return all(map(_numeric, value)) if isinstance(value, list) else hasattr(value, "__float__")


def replay(executed: Path, out: Path, anyway: bool = False) -> dict[str, Any]:
    """Execute it again with the same parameters, wait for the runs that it launches, and compare.

    {"out", "same", "results": what differs in them, "reasons": what differs by reason}. Raises InputError where the
    notebook has changed since (unless `anyway`), is gone, or was not executed by kit.
    """
    from kit.notebook.execute import NotebookFailed, execute
    from kit.notebook.parameters import read_notebook

    noted = read_notebook(executed).metadata.get("kit", {})
    if "input" not in noted:
        raise InputError(f"{executed} does not say what it came of; only what kit executed can be replayed.")
    source = (executed.parent / noted["input"]).resolve()
    if not source.is_file():
        raise InputError(f"{executed} came of {source}, which is not there.")
    if not anyway and sha256(source.read_bytes()) != noted["notebook_sha256"]:
        raise InputError(f"{source} has changed since; to replay {executed.name} all the same, say --anyway.")
    with contextlib.suppress(NotebookFailed):  # then it is compared as far as it came
        execute(source, out, noted["parameters"], cwd=executed.parent / noted["folder"], stream=sys.stderr)
    again = read_notebook(out).metadata.kit
    was, now = _results(executed), _results(out)
    results = list(_differences(was, now))
    failed = [key for key, end in now.items() if key.endswith(" end") and end != "COMPLETED" and was.get(key) == end]
    results += [f"{key} is {now[key]} both times, which proves nothing" for key in failed]
    reasons = {
        r: [*_differences(*({k: n.get(k) for k in keys} for n in (noted, again)))] for r, keys in REASONS.items()
    }
    return {
        "out": str(out),
        "same": not results,
        "results": results,
        "reasons": {r: v for r, v in reasons.items() if v},
    }


def _results(path: Path) -> dict[str, Any]:
    """How it ended, the numbers in `result` and every loss of its runs; where it has neither, what its cells show."""
    from kit.notebook.compare import curves
    from kit.notebook.parameters import read_notebook
    from kit.slurm.run import Run

    notebook = read_notebook(path)
    noted = notebook.metadata.kit
    found = {f"result[{key!r}]": value for key, value in noted.get("result", {}).items()}
    began = datetime.fromisoformat(noted["start_time"]).timestamp()
    runs = [Run((path.parent / one).resolve()) for one in noted.get("runs", [])]
    for number, run in enumerate(run for run in runs if run.info["created"] >= began):  # the others it only looked at
        end = str(run.wait().state)
        losses = {f"{split} loss": [*map(list, zip(*curve, strict=True))] for split, curve in curves(run).items()}
        found |= {f"run {number} {key}": value for key, value in ({"end": end} | losses).items()}
    shown = {} if found else {f"cell {n + 1}": _shown(cell) for n, cell in enumerate(notebook.cells)}
    return {"end": noted["reason"] or "well", **found, **shown}


def _shown(cell: Any) -> str:
    """What a cell shows as text; nothing for one that is tagged nbval-ignore-output."""
    outputs = [] if "nbval-ignore-output" in cell.metadata.get("tags", []) else cell.get("outputs", [])
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*was, *now]):
        a, b = was.get(key), now.get(key)
        if json.dumps(a) == json.dumps(b):  # NaN is NaN here
            continue
        if isinstance(a, list) and isinstance(b, list):
            a, b = next(
                ((x, y) for x, y in zip(a, b, strict=False) if x != y), (f"{len(a)} values", f"{len(b)} values")
            )
        yield f"{key} was {_short(a)}, is {_short(b)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):  # git
        return f"{value['commit'][:12]}" + (f" with changes {value['diff_sha256'][:12]}" if value["dirty"] else "")
    return str(value) if len(str(value)) < 80 else f"{str(value)[:76]} ..."
