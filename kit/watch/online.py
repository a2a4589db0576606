"""Reader of a run on a W&B server, by wandb's public API in a child process.

The child keeps wandb out of the kernel, where its calls block, retry in silence and ask for a key. It makes at most six
requests a minute: four or five at first, then two in each half, of which wandb repeats one that fails.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from kit.errors import InputError, KitError
from kit.watch.background import Background
from kit.watch.metrics import Store

ROWS = 10_000  # rows asked for; of more the server returns a sample
LATE, TIMEOUT = 1.5, 10  # seconds after which a silent server is mentioned, and given up
_SETTINGS = {"WANDB_SILENT": "true", "WANDB_X_GRAPHQL_RETRY_MAX": "1", "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2"}
_EXIT_CODES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # texts in the server's JSON
_runs: dict[str, Any] = {}  # wandb's object of each run; in the child


class Online(Store):
    """A run "entity/project/run" on a W&B server. `poll` never waits for the server; `close` ends the child."""

    def __init__(self, path: str, minute: float = 60.0) -> None:
        """`minute`: seconds in which at most six requests are made. Raises InputError for a wrong path."""
        super().__init__()
        if path.count("/") != 2 or not all(path.split("/")):
            raise InputError(f"{path!r} is not a run on a W&B server; expected entity/project/run.")
        self.path, self._minute = path, minute
        self.state = ""  # as W&B calls it: running, finished, failed, crashed, killed
        self.sampled = ""  # "sampled 10,000 of 50,000 rows", unless all rows are known
        self._rows, self._last_step, self._last_sample = 0, -1, 0.0
        self._child = multiprocessing.get_context("spawn").Pool(1)
        self._answer = Background(lambda: self._child.apply(ask, (path, self._last_step)), minute)

    def poll(self) -> bool:
        """Take what the child has received, and ask again when it is time. True if there was anything new."""
        if silent := self._answer.waiting:
            self.problem = f"no answer from W&B for {silent:.0f} s" if silent > LATE else self.problem
            return False
        answer, self._answer.value, self.problem = self._answer.value, None, str(self._answer.error or "")
        is_new = answer is not None and self._take(answer)
        self._answer.refresh()  # after it is known which rows are there
        return is_new

    def _take(self, answer: dict[str, Any]) -> bool:
        self._answer.interval = self._minute / (2 if self.state else 1)  # longer after the first, which asks more
        self.state, self.config, self.exit_code = answer["state"], answer["config"], _EXIT_CODES.get(answer["state"])
        self._rows += len(answer["rows"])
        self.sampled = f"sampled {self._rows:,} of {answer['total']:,} rows" if self._rows < answer["total"] else ""
        self._last_step = max([self._last_step, *(row["_step"] for row in answer["rows"])])
        for names, group in groupby((dict(_flat(row)) for row in answer["rows"]), key=sorted):
            rows = list(group)
            self.add_rows({name: [row[name] for row in rows] for name in names})
        for sample in answer["samples"]:
            if sample.get("_timestamp", 0.0) > self._last_sample:
                self._last_sample = sample["_timestamp"]
                self.add_wandb_sample("node", {name.removeprefix("system."): sample[name] for name in sample})
        return True

    def close(self) -> None:
        """End the child."""
        self._child.terminate()


def ask(path: str, last_step: int) -> dict[str, Any]:
    """In the child: what the server knows of the run, with the rows after `last_step`. Raises KitError."""
    os.environ.pop("WANDB_SERVICE", None)  # of the parent, whose settings are others
    os.environ.update(_SETTINGS)
    try:
        import wandb

        run, rows, samples = _runs.get(path), [], list[Any]()
        if run is None:
            run = wandb.Api(timeout=TIMEOUT).run(path)
            samples = run.history(samples=1000, pandas=False, stream="system")
            _runs[path] = run
        else:
            run.load(force=True)
        if (run.historyKeys or {}).get("lastStep", -1) > last_step:
            rows = [row for row in run.history(samples=ROWS, pandas=False) if row["_step"] > last_step]
        facts = {"state": run.state, "config": dict(run.config), "total": run.historyLineCount}
        return {"rows": rows, "samples": [*samples, run.system_metrics], **facts}
    except Exception as error:  # wandb's own do not survive the way to the parent
        reason = (str(error).splitlines() or [""])[-1].removeprefix("while retrying: ")
        raise KitError(f"W&B: {type(error).__name__}: {reason}") from None


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """(name, JSON text) of each value; nested names are joined by dots, as in the log."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, (value if value in _NOT_FINITE else json.dumps(value)).encode()
