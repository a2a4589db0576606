"""Replay an executed notebook: execute it again with the same parameters, and compare the results to the bit."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kit.errors import InputError
from kit.notebook.compare import loss_curves
from kit.notebook.execute import NotebookFailed, execute
from kit.notebook.parameters import read_notebook
from kit.notebook.provenance import sha256
from kit.show import Part, Result
from kit.slurm.run import Run

# What of the provenance could explain a difference.
REASONS = {
    "code": ("notebook_sha256", "git"),
    "environment": ("python", "packages", "constraints"),
    "data": ("data",),
    "host": ("host", "machine", "gpus"),
}
SHOWN = 80  # characters of a value in a difference


@dataclass(frozen=True)
class Replay(Result):
    """The outcome of a replay: what differs in the results, and what differs in the provenance, by reason."""

    out: Path
    differences: list[str]
    reasons: dict[str, list[str]]

    @property
    def same(self) -> bool:
        """True if the results are the same to the bit."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The fields; the differences under "results"."""
        return {"out": str(self.out), "same": self.same, "results": self.differences, "reasons": self.reasons}

    def parts(self) -> Iterator[Part]:
        """The verdict, the differences, and what could explain them."""
        yield "The results are the same, to the bit." if self.same else "The results differ."
        yield from self.differences
        for reason, texts in self.reasons.items():
            yield from (f"{reason}: {text}" for text in texts)


def replay(executed: str | Path, out: str | Path, anyway: bool = False) -> Replay:
    """Execute a notebook again as its executed copy says, wait for the runs that it launches, and compare.

    Raises InputError if the notebook has changed since (unless `anyway`), is missing, or was not executed by kit.
    """
    executed, out = Path(executed), Path(out)
    before: dict[str, Any] = read_notebook(executed).metadata.get("kit", {})
    source = _source(executed, before, anyway)
    with contextlib.suppress(NotebookFailed):  # then what it did until the failure is compared
        execute(source, out, before["parameters"], cwd=executed.parent / before["folder"], stream=sys.stderr)
    after = read_notebook(out).metadata.kit
    reasons = {
        reason: list(_differences({key: before.get(key) for key in keys}, {key: after.get(key) for key in keys}))
        for reason, keys in REASONS.items()
    }
    differences = _result_differences(_results(executed), _results(out))
    return Replay(out, differences, {reason: texts for reason, texts in reasons.items() if texts})


def _source(executed: Path, provenance: Mapping[str, Any], anyway: bool) -> Path:
    """The notebook that was executed."""
    if "input" not in provenance:
        raise InputError(f"{executed} does not name its source; only notebooks executed by kit can be replayed.")
    source: Path = (executed.parent / provenance["input"]).resolve()
    if not source.is_file():
        raise InputError(f"{executed} was made from {source}, which no longer exists.")
    if not anyway and sha256(source.read_bytes()) != provenance["notebook_sha256"]:
        raise InputError(f"{source} has changed since {executed.name} was made; use --anyway to replay regardless.")
    return source


def _results(path: Path) -> dict[str, Any]:
    """How it ended, the numbers in `result` and every loss of its runs; if it has neither, the output of its cells."""
    notebook = read_notebook(path)
    noted = notebook.metadata.kit
    found = {f"result[{key!r}]": value for key, value in noted.get("result", {}).items()}
    for number, run in enumerate(_launched_runs(path, noted)):
        found[f"run {number} end"] = str(run.wait().state)
        for split, curve in loss_curves(run).items():
            found[f"run {number} {split} loss"] = [list(point) for point in zip(*curve, strict=True)]
    if not found:
        found = {f"cell {number}": _output(cell) for number, cell in enumerate(notebook.cells, 1)}
    return {"end": noted["reason"] or "completed"} | found


def _launched_runs(path: Path, noted: Mapping[str, Any]) -> list[Run]:
    """The runs that the notebook launched, without those that it only opened."""
    began = datetime.fromisoformat(noted["start_time"]).timestamp()
    runs = [Run((path.parent / run).resolve()) for run in noted.get("runs", [])]
    return [run for run in runs if run.info["created"] >= began]


def _output(cell: Any) -> str:
    """The output of a cell as text; empty for one that is tagged nbval-ignore-output."""
    if "nbval-ignore-output" in cell.metadata.get("tags", []):
        return ""
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", []))


def _result_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Differences, and runs that failed both times, which proves nothing about the losses."""
    failed = [
        f"{key} is {end} both times, which proves nothing"
        for key, end in after.items()
        if key.endswith(" end") and end != "COMPLETED" and before.get(key) == end
    ]
    return [*_differences(before, after), *failed]


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if json.dumps(old) == json.dumps(new):  # unlike ==, true for NaN and NaN
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = _first_difference(old, new)
        yield f"{key} was {_short(old)}, is {_short(new)}"


def _first_difference(old: list[Any], new: list[Any]) -> tuple[Any, Any]:
    for pair in zip(old, new, strict=False):
        if pair[0] != pair[1]:
            return pair
    return f"{len(old)} values", f"{len(new)} values"


def _short(value: Any) -> str:
    if isinstance(value, dict):  # of git
        changes = f" with changes {value['diff_sha256'][:12]}" if value["dirty"] else ""
        return f"{value['commit'][:12]}{changes}"
    text = str(value)
    return text if len(text) < SHOWN else f"{text[: SHOWN - 4]} ..."
