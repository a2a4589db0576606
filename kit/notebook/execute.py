"""Notebooks, run headless through a papermill engine that tells the truth about how they ended."""

import ast
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, TextIO

import nbformat
import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_output

from kit.errors import InputError, KitError
from kit.notebook.parameters import Parameter, check, inject, read_notebook, read_parameters, read_values
from kit.notebook.redact import hide, secret_values
from kit.notebook.replay import provenance
from kit.slurm.client import available

__all__ = ["KitEngine", "NotebookFailed", "Parameter", "check", "execute", "read_parameters", "read_values"]

GRACE = 10.0  # seconds from interrupt to kill; Slurm's KillWait leaves 30 between SIGTERM and SIGKILL
EVERY = 30.0  # seconds between saves inside a cell, and between log lines of one progress bar
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HEAVY = 300.0  # CPU seconds; the strictest login nodes that we know of act at 900 (BlueBEAR's documentation)
HELD = "__import__('kit.notebook.replay', fromlist=['held']).held(globals())"  # what the variables hold at the end
TIMED_OUT = 124  # as timeout(1) exits


class NotebookFailed(KitError):  # noqa: N818  (reads as a sentence where it is caught)
    """A notebook that did not run to its end: the saved copy, the cell's index (-1: no kernel came up), the reason.

    The exit code is 1 for an exception, 128 + signal or the kernel's own where that ended it, 124 for a time-out.
    """

    def __init__(self, notebook: Path | None, cell: int, source: str, reason: str, code: int = 1) -> None:
        place = f"cell {cell + 1} ({source.strip().partition(chr(10))[0]})" if cell >= 0 else "before the first cell"
        super().__init__(f"{notebook}, {place}: {reason} The output so far is in that notebook.")
        self.notebook, self.cell, self.reason, self.exit_code = notebook, cell, reason, code


def _prepare(notebook: Any, source: Path, out: Path | None, cwd: str | None, values: Mapping[str, Any]) -> None:
    """Injects the values, empties the outputs and starts the metadata: every cell pending, the notebook unfinished."""
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
        "version": next((d.version for d in distributions(name="finetune-kit")), None),  # None: never installed
        "parameters": plain,
        "input": relative(source, out),
        "folder": relative(cwd or Path.cwd(), out),
        **provenance(source),
    }


def relative(path: str | Path, out: Path | None) -> str:
    """A path as it is seen from the executed notebook's folder, which may move and be shown to others."""
    return os.path.relpath(path, out.absolute().parent) if out else str(path)


def _span(start: str) -> dict[str, Any]:
    """End and duration in seconds, under papermill's names."""
    end = datetime.now(UTC)
    return {"end_time": end.isoformat(), "duration": (end - datetime.fromisoformat(start)).total_seconds()}


def _settle(text: str) -> str:
    """Each line as a terminal shows it: what follows its last carriage return (one at the end still waits)."""
    lines = [(line, line.rstrip("\r")) for line in text.split("\n")]
    return "\n".join(body.rpartition("\r")[2] + line[len(body) :] for line, body in lines)


class _Log:
    """Cell output as lines of a stream; a line that is being refreshed is written when it ends, or every 30 s."""

    def __init__(self, stream: TextIO, secrets: list[str]) -> None:
        self.stream, self.secrets, self.rest, self.written = stream, secrets, "", time.monotonic()

    def write(self, text: str) -> None:
        *lines, self.rest = _settle(self.rest + text).split("\n")
        if "\r" in text and time.monotonic() - self.written > EVERY:
            lines.append(self.rest)
        for line in lines:
            print(hide(line.strip("\r"), self.secrets), file=self.stream, flush=True)
            self.written = time.monotonic()


class _Client(NotebookClient):  # type: ignore[misc]
    """Runs the cells, and keeps the status of every cell true at every moment, in memory and on disk."""

    km: Any

    def __init__(self, notebook: Any, out: Path | None, options: Mapping[str, Any], raw: TextIO) -> None:
        super().__init__(notebook, iopub_timeout=60, raise_on_iopub_timeout=True)
        self.out, self.raw, self.why, self.code, self.secrets = out, raw, "", 1, secret_values()
        self.limit, self.cwd = options.get("execution_timeout") or float("inf"), options.get("cwd")
        self.cpu_s, self.say = 0.0, options.get("say") or (lambda text: None)
        self.heavy = 0.0 if notebook.metadata.get("heavy") else HEAVY
        streams = {name: options.get(f"{name}_file") for name in ("stdout", "stderr")}
        self.logs = {name: _Log(stream, self.secrets) for name, stream in streams.items() if stream}

    async def run(self) -> int | None:
        """Runs and saves the notebook. The index of the cell that kept it from its end (-1: no kernel), or None."""
        self.loop, meta = asyncio.get_running_loop(), self.nb.metadata
        with contextlib.suppress(RuntimeError):  # a thread other than the main one gets no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                why = f"{number.name} stopped the notebook."
                self.loop.add_signal_handler(number, self.stop, why, 128 + number)
        self.saver = self.loop.create_task(self.autosave())
        self.save()
        await self.offer()
        try:
            culprit = await self.run_cells()
            meta.kit.update(await self.held(), cpu_s=round(self.cpu_s, 1), exit_code=self.code if self.why else 0)
            meta.papermill.update(_span(meta.papermill.start_time), exception=culprit is not None)
            meta.kit.update(_span(meta.kit.start_time), reason=self.why or None)
            self.save()
            await self.offer()
            self.say(f"{self.cpu_s:.1f} CPU s in {meta.kit.duration:.1f} s")
            return culprit
        finally:
            if self.km:
                await self._async_cleanup_kernel()

    async def run_cells(self) -> int | None:
        try:
            await self.start_kernel()
        except RuntimeError as error:
            self.why = self.why or f"The kernel did not start: {error}."
            return -1
        for index, cell in enumerate(self.nb.cells):
            if not self.why:
                await self.run_cell(cell, index)
            if self.why:
                return index
        return None

    async def start_kernel(self, attempts: int = 3) -> None:
        """A kernel of this interpreter, whatever kernelspec the notebook names.

        With no folder to search, jupyter_client falls back on ipykernel's native spec, which runs sys.executable.
        Ports are free when chosen but may be gone when the kernel binds them (nteract/papermill#511): three attempts.
        """
        specs = KernelSpecManager(kernel_dirs=[])
        self.km = AsyncKernelManager(kernel_spec_manager=specs, transport_encryption="required")
        try:
            await self.async_start_new_kernel(cwd=self.cwd, stderr=self.raw)
            await self.async_start_new_kernel_client()
        except RuntimeError:
            if self.why or attempts == 1:
                raise
            await self.start_kernel(attempts - 1)

    async def run_cell(self, cell: Any, index: int) -> None:
        """Runs one cell; `why` is set where it did not come to its end."""
        meta, status, why = cell.metadata.papermill, "completed", ""
        meta.update(status="running", start_time=datetime.now(UTC).isoformat())
        self.save()
        why_late = f"The cell ran longer than {self.limit:g} s."
        timer = self.loop.call_later(self.limit, self.stop, why_late, TIMED_OUT)
        try:
            await self.async_execute_cell(cell, index)
        except CellExecutionError as error:
            status, why = "failed", f"The cell raised {error.ename}({error.evalue})."
        except DeadKernelError:
            status, why = "terminated", await self.obituary()
            self.last_words(cell)
        except CellTimeoutError:
            status, why = "terminated", f"The cell's output did not arrive within {self.iopub_timeout} s."
        timer.cancel()
        self.count_cpu()
        for log in self.logs.values():
            log.write("\n" if log.rest else "")
        status = "terminated" if self.why else status  # it was told to stop, which explains whatever came of it
        self.why = self.why or why
        if status == "terminated" and cell.cell_type == "code":
            cell.outputs.append(new_output("error", ename="Terminated", evalue=self.why, traceback=[self.why]))
        meta.update(_span(meta.start_time), status=status, exception=status != "completed")

    def count_cpu(self) -> None:
        """CPU seconds of the kernel and what it started and waited for."""
        with contextlib.suppress(psutil.Error, AttributeError):  # it is gone, or not up yet
            times = psutil.Process(self.km.provisioner.pid).cpu_times()
            self.cpu_s = times.user + times.system + times.children_user + times.children_system

    async def offer(self) -> None:
        """Once, where a heavy notebook runs on a login node: how to run it as a job."""
        if self.cpu_s < self.heavy or "SLURM_JOB_ID" in os.environ or not await asyncio.to_thread(available):
            return
        if self.cpu_s >= self.heavy:  # it was not said meanwhile
            self.heavy = float("inf")
            spent = f"{self.cpu_s:.0f} CPU s so far, on a login node" if self.cpu_s else "This notebook is heavy"
            self.say(f"{spent}: `kit run NOTEBOOK OUT --cluster FILE` runs it as a job.")

    async def held(self) -> dict[str, Any]:
        """Runs, data and results that the notebook's variables hold; nothing where the kernel is gone or lacks kit."""
        if not (self.km and await self.km.is_alive()):
            return {}
        with contextlib.suppress(RuntimeError, TimeoutError, LookupError):
            ask = {"silent": True, "user_expressions": {"held": HELD}, "reply": True, "timeout": self.iopub_timeout}
            reply = await self.kc.execute("", **ask)
            text = ast.literal_eval(reply["content"]["user_expressions"]["held"]["data"]["text/plain"])
            found: dict[str, Any] = json.loads(text, parse_constant=str)
            return found | {"runs": [relative(run, self.out) for run in found["runs"]]}
        return {}

    def stop(self, why: str, code: int) -> None:
        """Interrupts the cell, so that it can clean up; GRACE seconds later, or when asked again, kills the kernel."""
        number = signal.SIGKILL if self.why else signal.SIGINT
        if not self.why:
            self.why, self.code = why, code
            self.loop.call_later(GRACE, self.stop, why, code)
        if self.km and self.km.has_kernel:
            self.sending = self.loop.create_task(self.km.provisioner.send_signal(number))

    async def obituary(self) -> str:
        """How the kernel died. What it had started in its process group goes with it."""
        code = await self.km.provisioner.poll() or 0
        await self.km.provisioner.send_signal(signal.SIGKILL)
        if not self.why:
            self.code = 128 - code if code < 0 else code or 1
        if code == -signal.SIGKILL:
            return "The kernel was killed (SIGKILL), as the system does when memory runs out."
        return f"The kernel died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})."

    def last_words(self, cell: Any) -> None:
        """What the dead kernel wrote outside of any message, such as the trace of a crash, as output of the cell."""
        self.raw.seek(0)
        if words := self.raw.read()[-10_000:]:
            cell.outputs.append(new_output("stream", name="stderr", text=words))
            if log := self.logs.get("stderr"):
                log.write(words)

    def output(self, outs: list[Any], msg: Any, display_id: str | None, cell_index: int) -> Any:
        """nbclient's hook for every output: text is logged, and joins what the same stream wrote just before."""
        out = super().output(outs, msg, display_id, cell_index)
        if out is None or out.output_type != "stream":
            return out
        if out.name in self.logs:
            self.logs[out.name].write(out.text)
        before = itertools.takewhile(lambda o: o.output_type == "stream", reversed(outs[:-1]))
        if same := next((o for o in before if o.name == out.name), None):
            same.text, out = same.text + outs.pop().text, same
        out.text = _settle(out.text)
        return out

    async def autosave(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self.count_cpu()
            self.save()
            await self.offer()

    def clean(self) -> Any:
        """The notebook to save: no secrets, and no widget views, which show an error once their kernel is gone."""
        notebook = nbformat.from_dict(hide(self.nb, self.secrets))
        for output in itertools.chain(*(c.get("outputs", ()) for c in notebook.cells)):
            output.get("data", {}).pop(WIDGET_VIEW, None)
        return notebook

    def save(self) -> None:
        """Under its name only when whole. A plain open gives the umask's mode, where tempfile's would be 0600."""
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            part = self.out.with_name(f".{self.out.name}.{os.getpid()}")
            part.write_text(nbformat.writes(self.clean()), encoding="utf-8")
            part.replace(self.out)


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
        _prepare(nb, source, out, options.get("cwd"), check(read_parameters(nb), nb.metadata.papermill.parameters))
        # What the kernel itself says is noise at its end, which readers of a log take for a crash; or why it died.
        with tempfile.TemporaryFile("w+", errors="replace") as raw:
            client = _Client(nb, out, options, raw)
            culprit, done = _wait(client.run()), client.clean()
        if culprit is not None:
            raise NotebookFailed(out, culprit, done.cells[culprit].source, done.metadata.kit.reason, client.code)
        return done


def _wait(job: Coroutine[Any, Any, int | None]) -> int | None:
    """asyncio.run, in a thread of its own where a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, job).result()


def execute(
    notebook: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    cwd: str | Path | None = None,
    stream: TextIO | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Runs the notebook into `out`, with cell output on `stream` (stdout by default); timeout is seconds a cell.

    `say` is told the CPU seconds, and on a login node that a heavy notebook can be a job.
    Raises InputError before anything runs (unknown parameter, bad value, `out` exists), NotebookFailed after.
    papermill's own front end is passed by: it guesses types, formats paths and ends with an in-place write.
    """
    source, target, stream = Path(notebook).absolute(), Path(out).absolute(), stream or sys.stdout
    nb = read_notebook(source)
    if target.exists() and (not overwrite or target.samefile(source)):
        raise InputError(f"{out} exists; choose another name for the executed notebook.")
    nb.metadata["papermill"] = {"parameters": dict(parameters or {}), "input_path": str(notebook)}
    nb.metadata.papermill.update(output_path=str(out), version=version("papermill"))
    options: dict[str, Any] = {"input_path": source, "execution_timeout": timeout, "cwd": cwd and str(cwd), "say": say}
    KitEngine.execute_notebook(nb, output_path=str(target), stdout_file=stream, stderr_file=stream, **options)
    return target
