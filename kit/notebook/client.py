"""Runs the cells of a notebook in a kernel; the status of every cell is true at every moment, in memory and on disk."""

import ast
import asyncio
import contextlib
import itertools
import json
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_output

from kit import files
from kit.notebook.ending import Ending, Outcome, kernel_death
from kit.notebook.provenance import relative
from kit.notebook.redact import Secrets, hide, secret_values

GRACE_S = 10.0  # from the interrupt to the kill; Slurm's KillWait leaves 30 between SIGTERM and SIGKILL
AUTOSAVE_S = 30.0  # between saves while a cell runs
START_TIMEOUT_S = OUTPUT_TIMEOUT_S = 60
KERNEL_STARTS = 3  # attempts: ports are free when they are chosen, but may be taken when the kernel binds them
KERNEL_STDERR_LIMIT = 10_000  # bytes kept of what a dead kernel wrote
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
RESULTS = "__import__('kit.notebook.provenance', fromlist=['results']).results(globals())"  # evaluated in the kernel


class LineWriter:
    """Copies output to a stream by lines, without secrets. A line that is refreshed (\\r) is written once, complete."""

    def __init__(self, stream: TextIO, secrets: Secrets) -> None:
        self.stream, self.secrets, self.unfinished = stream, secrets, ""

    def write(self, text: str) -> None:
        """Write the lines that `text` completes."""
        *lines, self.unfinished = as_on_terminal(self.unfinished + text).split("\n")
        for line in lines:
            print(hide(line.strip("\r"), self.secrets), file=self.stream, flush=True)

    def finish(self) -> None:
        """Write what is left of an incomplete line."""
        if self.unfinished:
            self.write("\n")


class CellRunner(NotebookClient):  # type: ignore[misc]
    """An nbclient client that records the outcome and saves the notebook after every change."""

    km: Any

    def __init__(
        self,
        notebook: Any,
        kernel_stderr: TextIO,
        out: Path | None,
        cwd: str | None,
        cell_timeout_s: float,
        start_timeout_s: int = START_TIMEOUT_S,
        **streams: Any,
    ) -> None:
        """Without `out` the notebook is not saved. `streams`: stdout and stderr, for a copy of what cells print."""
        super().__init__(
            notebook, iopub_timeout=OUTPUT_TIMEOUT_S, raise_on_iopub_timeout=True, startup_timeout=start_timeout_s
        )
        self.out, self.cwd, self.cell_timeout_s, self.kernel_stderr = out, cwd, cell_timeout_s, kernel_stderr
        self.secrets = secret_values()
        self.stop_request: Outcome | None = None  # set once by a signal or a time-out; it then is the outcome
        self.logs = {name: LineWriter(stream, self.secrets) for name, stream in streams.items() if stream}

    async def run(self) -> Outcome:
        """Execute all cells, save the notebook, end the kernel."""
        self.loop, metadata = asyncio.get_running_loop(), self.nb.metadata
        self.stop_on_signals()
        self.save()
        self.autosaving = self.loop.create_task(self.autosave())  # asyncio.run cancels it at the end
        try:
            outcome = await self.run_cells()
            metadata.kit.update(await self.results(), ending=outcome.ending.value, exit_code=outcome.exit_code)
            metadata.papermill.update(time_span(metadata.papermill.start_time), exception=outcome.failed)
            metadata.kit.update(time_span(metadata.kit.start_time), reason=outcome.reason or None)
            self.save()
            return outcome
        finally:
            if self.km:
                await self._async_cleanup_kernel()

    async def run_cells(self) -> Outcome:
        """Start the kernel and run the cells until one of them does not complete."""
        try:
            await self.start_kernel()
        except RuntimeError as error:
            return self.stop_request or Outcome(Ending.KERNEL_NOT_STARTED, detail=str(error))
        for index, cell in enumerate(self.nb.cells):
            outcome = self.stop_request or await self.run_cell(cell, index)
            if not outcome.completed:
                return replace(outcome, cell=index)
        return Outcome(Ending.COMPLETED)

    async def start_kernel(self) -> None:
        """Start a kernel of this interpreter, whatever kernelspec the notebook names.

        Without folders to search, jupyter_client uses ipykernel's native kernelspec, which runs sys.executable. Several
        attempts, because another process may take a port between its choice and its use (nteract/papermill#511).
        """
        specs = KernelSpecManager(kernel_dirs=[])
        for attempts_left in reversed(range(KERNEL_STARTS)):
            self.km = AsyncKernelManager(kernel_spec_manager=specs, transport_encryption="required")
            try:
                await self.async_start_new_kernel(cwd=self.cwd, stderr=self.kernel_stderr)
                await self.async_start_new_kernel_client()
                return
            except RuntimeError:
                if self.stop_request or not attempts_left:
                    raise

    async def run_cell(self, cell: Any, index: int) -> Outcome:
        """Run one cell and record how it ended."""
        metadata, limit = cell.metadata.papermill, self.cell_timeout_s
        metadata.update(status="running", start_time=datetime.now(UTC).isoformat())
        self.save()
        timer = self.loop.call_later(limit, self.stop, Outcome(Ending.CELL_TIMED_OUT, detail=f"{limit:g}"))
        outcome = await self.cell_outcome(cell, index)
        timer.cancel()
        for log in self.logs.values():
            log.finish()
        outcome = self.stop_request or outcome  # what the cell does after an interrupt is explained by the interrupt
        if outcome.cell_status == "terminated" and cell.cell_type == "code":
            reason = outcome.reason
            cell.outputs.append(new_output("error", ename="Terminated", evalue=reason, traceback=[reason]))
        status = outcome.cell_status
        metadata.update(time_span(metadata.start_time), status=status, exception=outcome.failed)
        return outcome

    async def cell_outcome(self, cell: Any, index: int) -> Outcome:
        """Execute a cell; the outcome is what the kernel did, whether or not a stop was requested."""
        try:
            await self.async_execute_cell(cell, index)
        except CellExecutionError as error:
            return self.failure(cell, error)
        except DeadKernelError:
            outcome = kernel_death(await self.km.provisioner.poll() or 0)
            await self.km.provisioner.send_signal(signal.SIGKILL)  # what it started in its process group
            self.append_kernel_stderr(cell)
            return outcome
        except CellTimeoutError:
            return Outcome(Ending.OUTPUT_TIMED_OUT, detail=f"{self.iopub_timeout}")
        return Outcome(Ending.COMPLETED)

    def failure(self, cell: Any, error: CellExecutionError) -> Outcome:
        """The outcome of a cell that raised. Of an error while a result is shown, only its output has the name."""
        raised = [output for output in cell.outputs if output.output_type == "error"]
        last = raised[-1] if raised else error
        if last.ename == "SystemExit" and last.evalue in ("", "0", "None"):
            return Outcome(Ending.LEFT)
        return Outcome(Ending.CELL_FAILED, detail=hide(f"{last.ename}({last.evalue})", self.secrets))

    def append_kernel_stderr(self, cell: Any) -> None:
        """What a dead kernel wrote outside of messages, such as the trace of a crash, becomes output of the cell."""
        descriptor = self.kernel_stderr.fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, KERNEL_STDERR_LIMIT, max(0, size - KERNEL_STDERR_LIMIT)).decode(errors="replace")
        if not text:
            return
        cell.outputs.append(new_output("stream", name="stderr", text=text))
        if "stderr" in self.logs:
            self.logs["stderr"].write(text)

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM stop the notebook; not in a thread other than the main one, which gets no signals."""
        with contextlib.suppress(RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self.loop.add_signal_handler(number, self.stop, Outcome(Ending.STOPPED, number))

    def stop(self, why: Outcome) -> None:
        """Interrupt the cell, so that it can clean up; GRACE_S later, or at the second call, kill the kernel."""
        number = signal.SIGKILL if self.stop_request else signal.SIGINT
        if not self.stop_request:
            self.stop_request = why
            self.loop.call_later(GRACE_S, self.stop, why)
        if self.km and self.km.has_kernel:
            self.sending = self.loop.create_task(self.km.provisioner.send_signal(number))

    async def results(self) -> dict[str, Any]:
        """What the notebook's variables hold (see provenance.results); empty if the kernel is gone or has no kit."""
        if not (self.km and await self.km.is_alive()):
            return {}
        with contextlib.suppress(RuntimeError, TimeoutError, LookupError):
            expressions = {"results": RESULTS}
            reply = await self.kc.execute(
                "", silent=True, user_expressions=expressions, reply=True, timeout=OUTPUT_TIMEOUT_S
            )
            text = ast.literal_eval(reply["content"]["user_expressions"]["results"]["data"]["text/plain"])
            found: dict[str, Any] = json.loads(text, parse_constant=str)
            return found | {"runs": [relative(run, self.out) for run in found["runs"]]}
        return {}

    def output(self, outs: list[Any], msg: Any, display_id: str | None, cell_index: int) -> Any:
        """nbclient's hook for every output. Text is logged, and joins what the same stream wrote just before."""
        out = super().output(outs, msg, display_id, cell_index)
        if out is None or out.output_type != "stream":
            return out
        if out.name in self.logs:
            self.logs[out.name].write(out.text)
        before = itertools.takewhile(lambda one: one.output_type == "stream", reversed(outs[:-1]))
        same = next((one for one in before if one.name == out.name), None)
        if same:
            same.text += outs.pop().text
            out = same
        out.text = as_on_terminal(out.text)
        return out

    async def autosave(self) -> None:
        """Save every AUTOSAVE_S seconds, also while a silent cell runs."""
        while True:
            await asyncio.sleep(AUTOSAVE_S)
            self.save()

    def save(self) -> None:
        """Write the notebook under its name, in one step."""
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            files.write(self.out, nbformat.writes(self.clean_notebook()))

    def clean_notebook(self) -> Any:
        """The notebook without secrets, and without widget views, which show an error once their kernel is gone.

        metadata.kit.hidden lists the variables whose values are hidden.
        """
        notebook = nbformat.from_dict(hide(self.nb, self.secrets))
        notebook.metadata.kit["hidden"] = sorted(self.secrets.hidden)
        for output in itertools.chain.from_iterable(cell.get("outputs", ()) for cell in notebook.cells):
            output.get("data", {}).pop(WIDGET_VIEW, None)
        return notebook


def as_on_terminal(text: str) -> str:
    """Each line as a terminal shows it: the text after the last carriage return. One at the end of a line stays."""
    lines = []
    for line in text.split("\n"):
        body = line.rstrip("\r")
        lines.append(body.rpartition("\r")[2] + line[len(body) :])
    return "\n".join(lines)


def time_span(start: str) -> dict[str, Any]:
    """The end, now, and the duration in seconds, under papermill's names. `start` in ISO format."""
    end = datetime.now(UTC)
    return {"end_time": end.isoformat(), "duration": (end - datetime.fromisoformat(start)).total_seconds()}
