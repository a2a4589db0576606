"""Execute a notebook without a browser, through a papermill engine that reports truthfully how it ended."""

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, TextIO

from kit.errors import InputError, KitError
from kit.notebook.client import CellRunner, ClientOptions
from kit.notebook.ending import Outcome
from kit.notebook.parameters import check, inject, read_notebook, read_parameters
from kit.notebook.provenance import provenance, relative


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
        """The executed notebook, also saved at output_path as it grows. Raises InputError and NotebookFailed.

        Options as papermill passes them: input_path, execution_timeout (seconds a cell), stdout_file, stderr_file.
        """
        from papermill.iorw import papermill_io

        home = papermill_io.get_handler("local")._cwd or "."  # papermill changes folder before it calls an engine
        source, out = Path(home, options["input_path"]), Path(home, output_path) if output_path else None
        values = check(read_parameters(nb), nb.metadata.papermill.parameters)
        client_options = ClientOptions(
            out,
            cwd=options.get("cwd"),
            cell_timeout_s=options.get("execution_timeout") or math.inf,
            stdout=options.get("stdout_file"),
            stderr=options.get("stderr_file"),
        )
        _prepare(nb, source, client_options, values)
        # At its normal end a kernel may write lines that readers of a log take for a crash, so they are kept apart.
        with tempfile.TemporaryFile("w+", errors="replace") as kernel_stderr:
            runner = CellRunner(nb, client_options, kernel_stderr)
            outcome = _run(runner.run())
        done = runner.clean_notebook()
        if not outcome.completed:
            raise NotebookFailed(out, outcome, done.cells[outcome.cell].source if outcome.cell is not None else "")
        return done


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
    nb.metadata["papermill"] = {
        "parameters": dict(parameters or {}),
        "input_path": str(notebook),
        "output_path": str(out),
        "version": version("papermill"),
    }
    KitEngine.execute_notebook(
        nb,
        output_path=str(target),
        input_path=source,
        execution_timeout=timeout,
        cwd=str(cwd) if cwd else None,
        stdout_file=stream,
        stderr_file=stream,
    )
    return target


def _prepare(notebook: Any, source: Path, options: ClientOptions, values: Mapping[str, Any]) -> None:
    """Inject the values, clear the outputs and start the metadata: every cell pending, the notebook unfinished."""
    inject(notebook, values)
    times: dict[str, Any] = {"start_time": None, "end_time": None, "duration": None}
    for cell in notebook.cells:
        cell.metadata["papermill"] = times | {"exception": None, "status": "pending"}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata.pop("widgets", None)
    plain = json.loads(json.dumps(values, default=str), parse_constant=str)  # JSON has no Path and no NaN
    times["start_time"] = datetime.now(UTC).isoformat()
    notebook.metadata.papermill.update(times, exception=None, parameters=plain)
    notebook.metadata["kit"] = times | {
        "reason": None,
        "version": next((found.version for found in distributions(name="finetune-kit")), None),  # None: not installed
        "parameters": plain,
        "input": relative(source, options.out),
        "folder": relative(options.cwd or Path.cwd(), options.out),
        **provenance(source),
    }


def _run(job: Coroutine[Any, Any, Outcome]) -> Outcome:
    """asyncio.run; in a new thread if this one has a running loop, as a notebook's has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, job).result()
