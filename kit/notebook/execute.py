"""Execute a notebook without a browser, through a papermill engine that reports truthfully how it ended."""

import asyncio
import math
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, TextIO

import nbformat
from nbformat import NotebookNode

from kit.errors import InputError, KitError
from kit.notebook.client import START_TIMEOUT_S, CellRunner
from kit.notebook.ending import Ending, Outcome
from kit.notebook.parameters import (
    INJECTED,
    PARAMETERS,
    assignments,
    check,
    has_tag,
    inject,
    read_notebook,
    read_parameters,
)
from kit.notebook.provenance import provenance, relative
from kit.notebook.values import as_json


class NotebookFailed(KitError):  # noqa: N818  (reads as a sentence where it is caught)
    """A notebook that did not run to its end. `outcome` says why; `exit_code` is that of the outcome."""

    def __init__(self, notebook: Path | None, outcome: Outcome, source: str) -> None:
        place = "before the first cell"
        if outcome.cell is not None:
            place = f"cell {outcome.cell + 1} ({source.strip().partition(chr(10))[0]})"
        super().__init__(f"{notebook}, {place}: {outcome.reason} The output so far is in that notebook.")
        self.notebook, self.outcome, self.exit_code = notebook, outcome, outcome.exit_code


class KitEngine:
    """papermill's engine `kit`, as in `papermill --engine kit IN OUT`.

    It has the methods of papermill.engines.Engine but not the base class: papermill loads its engines while its own
    module is half imported, and a base class from there would make importing this module first fail.
    """

    nb_kernel_name = staticmethod(lambda nb, name=None: "python3")  # whatever the notebook says
    nb_language = staticmethod(lambda nb, language=None: "python")

    @staticmethod
    def execute_notebook(nb: Any, kernel_name: str = "", output_path: str | None = None, **options: Any) -> Any:
        """The executed notebook, also saved at output_path as it grows.

        Options as papermill passes them: input_path (a path or a notebook), execution_timeout (seconds a cell),
        start_timeout, stdout_file, stderr_file, cwd. Where a cell raised, papermill finds that in the outputs, marks
        the cell and raises its PapermillExecutionError. Raises InputError before anything runs, and NotebookFailed
        where the notebook could not run to its end for another reason.
        """
        from papermill.iorw import papermill_io

        home = papermill_io.get_handler("local")._cwd or "."  # papermill changes folder before it calls an engine
        source, out = _local_file(options["input_path"], home), _local_file(output_path, home)
        if isinstance(options["input_path"], NotebookNode):
            nb.metadata.papermill.input_path = None  # where papermill has put the complete notebook
        done, outcome = _execute(nb, source, out, _given_parameters(nb), options)
        if outcome.failed and outcome.ending is not Ending.CELL_FAILED:
            raise _failure(out, outcome, done)
        return done


def _local_file(path: Any, home: str) -> Path | None:
    """The file of a path that papermill was given; None for a notebook, "-" for a pipe, and an address as s3://."""
    if not path or isinstance(path, NotebookNode) or path == "-" or "://" in path:
        return None
    return Path(home, path)


def _given_parameters(notebook: Any) -> dict[str, Any]:
    """The values that papermill was called with, in the types of the notebook, and written into its injected cell.

    Without any, papermill leaves the cell and the metadata of an earlier execution, which has marked that cell. A
    notebook without a parameters cell takes any name.
    """
    injected = next(
        (cell for cell in notebook.cells if has_tag(cell, INJECTED) and not cell.metadata.get("papermill")), None
    )
    given = dict(notebook.metadata.papermill.get("parameters", {})) if injected else {}
    if not injected or not any(has_tag(cell, PARAMETERS) for cell in notebook.cells):
        if odd := [name for name in given if not name.isidentifier()]:
            raise InputError(f"Parameter {odd[0]!r} is not a name of Python.")
        return given
    values = check(read_parameters(notebook), given)
    if repr(values) != repr(given):  # else papermill's own words are right
        injected.source = f"# Parameters\n{assignments(values)}\n"
    return values


def _execute(
    nb: Any, source: Path | None, out: Path | None, values: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Outcome]:
    """The executed notebook, without secrets, and how its execution ended. `values` are in the notebook already."""
    _prepare(nb, source, out, options.get("cwd"), values)
    # At its normal end a kernel may write lines that readers of a log take for a crash, so they are kept apart.
    with tempfile.TemporaryFile("w+", errors="replace") as kernel_stderr:
        runner = CellRunner(
            nb,
            kernel_stderr,
            out,
            options.get("cwd"),
            options.get("execution_timeout") or math.inf,
            options.get("start_timeout") or START_TIMEOUT_S,
            stdout=options.get("stdout_file"),
            stderr=options.get("stderr_file"),
        )
        outcome = _run(runner.run())
    done = runner.clean_notebook()
    if runner.secrets.hidden and options.get("stderr_file"):
        names = ", ".join(sorted(runner.secrets.hidden))
        print(f"kit: [hidden] is in the place of the values of {names}.", file=options["stderr_file"])
    return done, outcome


def _failure(out: Path | None, outcome: Outcome, notebook: Any) -> NotebookFailed:
    source = notebook.cells[outcome.cell].source if outcome.cell is not None else ""
    return NotebookFailed(out, outcome, source)


def execute(
    notebook: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    cwd: str | Path | None = None,
    stream: TextIO | None = None,
    overwrite: bool = False,
) -> Path:
    """Execute the notebook into `out` and return that path.

    `timeout` is in seconds for each cell; what cells print is copied to `stream`, stdout by default. Raises InputError
    before anything runs (unknown parameter, bad value, `out` exists), NotebookFailed after. papermill's own front end
    is not used: it guesses types, formats paths and overwrites `out` in place at the end.
    """
    source, target, stream = Path(notebook).absolute(), Path(out).absolute(), stream or sys.stdout
    nb = read_notebook(source)
    if target.exists() and (not overwrite or target.samefile(source)):
        raise InputError(f"{out} exists; choose another name for the executed notebook.")
    values = check(read_parameters(nb), parameters or {})
    inject(nb, values)
    nb.metadata["papermill"] = {"input_path": str(notebook), "output_path": str(out), "version": version("papermill")}
    options = {
        "execution_timeout": timeout,
        "cwd": str(cwd) if cwd else None,
        "stdout_file": stream,
        "stderr_file": stream,
    }
    done, outcome = _execute(nb, source, target, values, options)
    if outcome.failed:
        raise _failure(target, outcome, done)
    return target


def _prepare(notebook: Any, source: Path | None, out: Path | None, cwd: str | None, values: Mapping[str, Any]) -> None:
    """Clear the outputs and start the metadata: every cell pending, the notebook unfinished."""
    times: dict[str, Any] = {"start_time": None, "end_time": None, "duration": None}
    for cell in notebook.cells:
        cell.metadata["papermill"] = times | {"exception": None, "status": "pending"}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata.pop("widgets", None)
    plain = as_json(values)
    times["start_time"] = datetime.now(UTC).isoformat()
    notebook.metadata.papermill.update(times, exception=None)
    if values or "parameters" not in notebook.metadata.papermill:
        notebook.metadata.papermill["parameters"] = plain
    notebook.metadata["kit"] = times | {
        "reason": None,
        "version": next((found.version for found in distributions(name="finetune-kit")), None),  # None: not installed
        "parameters": plain,
        "input": relative(source, out) if source else None,
        "folder": relative(cwd or Path.cwd(), out),
        **provenance(source, nbformat.writes(notebook) if source is None else ""),
    }


def _run(job: Coroutine[Any, Any, Outcome]) -> Outcome:
    """asyncio.run; in a new thread if this one has a running loop, as a notebook's has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, job).result()
