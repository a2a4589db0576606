"""Reader of a run on a W&B server, by wandb's public API in a child process.

The child keeps wandb out of the kernel, where its calls block, retry in silence and ask for a key. It makes at most six
requests a minute: four or five at first, then two in each third of a minute, of which wandb repeats one that fails.
"""

import json
import math
import multiprocessing.connection
import os
import queue
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from kit.errors import InputError
from kit.watch.metrics import Store

SAMPLE = 10_000  # rows asked for; of more the server returns a sample
LATE, TIMEOUT = 1.5, 10  # seconds after which a silent server is mentioned, and given up
_SETTINGS = {"WANDB_SILENT": "true", "WANDB_X_GRAPHQL_RETRY_MAX": "1", "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2"}
_EXIT_CODES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1}
_NUMBERS = {'"NaN"': "NaN", '"Infinity"': "Infinity", '"-Infinity"': "-Infinity"}  # texts in the server's JSON
Message = dict[str, Any]


class Online(Store):
    """A run "entity/project/run" on a W&B server. `poll` never waits for the server; `close` ends the child."""

    def __init__(self, path: str, minute: float = 60.0) -> None:
        """`minute`: seconds in which at most six requests are made. Raises InputError for a wrong path."""
        super().__init__()
        if path.count("/") != 2 or not all(path.split("/")):
            raise InputError(f"{path!r} is not a run on a W&B server; expected entity/project/run.")
        self.source, self.run_id = f"W&B {path}", path.rpartition("/")[2]
        self.state = ""  # as W&B calls it: running, finished, failed, crashed, killed
        self.sampled = ""  # "sampled 10,000 of 50,000 rows", unless all rows are known
        self._failure, self._asked = "", time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._messages = context.Queue()
        self._child = context.Process(target=_follow, args=(path, minute, self._messages), daemon=True)
        self._child.start()

    def poll(self) -> bool:
        """Take what the child has received. True if there was anything new."""
        new = False
        try:
            while True:
                new = self._take(self._messages.get_nowait()) or new
        except queue.Empty:
            silent = time.monotonic() - self._asked
        self.problem = f"no answer from W&B for {silent:.0f} s" if silent > LATE else self._failure
        if self._child.exitcode:
            self.problem = f"the process that asks W&B ended with exit code {self._child.exitcode}"
        return new

    def _take(self, message: Message) -> bool:
        self._asked = message.get("asked", math.inf)
        if "asked" in message:
            return False
        self._failure = message.get("failure", "")
        if self._failure:
            return False
        self.state, self.sampled = message["state"], message["sampled"]
        self.exit_code = _EXIT_CODES.get(self.state)
        self.config, self.summary = message["config"], message["summary"]
        for names, rows in groupby((dict(_flat(row)) for row in message["rows"]), key=sorted):
            same = list(rows)
            self.add_rows({name: [row[name] for row in same] for name in names})
        for sample in message["samples"]:
            self.add_wandb_sample("node", {name.removeprefix("system."): value for name, value in sample.items()})
        return True

    def close(self) -> None:
        """End the child."""
        self._child.terminate()
        self._child.join()


def _follow(path: str, minute: float, messages: Any) -> None:
    """The child: put what is new into the queue until the run has ended or the parent process is gone."""
    os.environ.pop("WANDB_SERVICE", None)
    os.environ.pop("WANDB_MODE", None)
    os.environ.update(_SETTINGS)
    asker = _Asker(path, messages.put)
    while multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]  # this is a child
        first = asker.run is None
        try:
            more, pause = asker.ask(), minute if first else minute / 3
        except Exception as error:  # whatever it is, the board shows it
            messages.put({"failure": _sentence(error)})
            more, pause = True, minute if first else 2 * minute / 3
        if not more:
            return
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel], pause)  # type: ignore[union-attr]


class _Asker:
    """Asks the server, and remembers what is known."""

    def __init__(self, path: str, send: Callable[[Message], None]) -> None:
        self.path, self.send = path, send
        self.run: Any = None
        self.rows, self.last_step, self.last_sample = 0, -1, 0.0

    def ask(self) -> bool:
        """Ask for what is new; False when the run has ended and all of it is known."""
        import wandb

        self.send({"asked": time.monotonic()})
        samples: list[Message] = []
        if self.run is None:
            run = wandb.Api(timeout=TIMEOUT).run(self.path)
            samples, self.run = run.history(samples=1000, pandas=False, stream="system"), run
        else:
            self.run.load(force=True)
        run, rows = self.run, []
        if (run.historyKeys or {}).get("lastStep", -1) > self.last_step:
            rows = [row for row in run.history(samples=SAMPLE, pandas=False) if row["_step"] > self.last_step]
        samples = [one for one in [*samples, run.system_metrics] if one.get("_timestamp", 0) > self.last_sample]
        self.rows += len(rows)
        self.last_step = max([self.last_step, *(row["_step"] for row in rows)])
        self.last_sample = max([self.last_sample, *(sample["_timestamp"] for sample in samples)])
        facts = {"state": run.state, "config": dict(run.config), "summary": dict(run.summary_metrics)}
        total = run.historyLineCount
        sampled = f"sampled {self.rows:,} of {total:,} rows" if self.rows < total else ""
        self.send({"rows": rows, "samples": samples, "sampled": sampled, **facts})
        return run.state == "running" or bool(rows)


def _flat(row: Message, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """(name, JSON text) of each value; nested names are joined by dots, as in the log."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = json.dumps(value)
            yield prefix + name, _NUMBERS.get(text, text).encode()


def _sentence(error: Exception) -> str:
    if isinstance(error, LookupError | TypeError | ValueError | AttributeError):
        return f"W&B's answer cannot be read ({type(error).__name__}: {error})"
    text = (str(error).splitlines() or [type(error).__name__])[-1].removeprefix("while retrying: ")
    return f"W&B did not answer within {TIMEOUT} s" if "respond in time" in text else f"W&B: {text}"
