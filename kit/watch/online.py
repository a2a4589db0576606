"""A run on a W&B server, read through wandb's public API by a process of its own; and `sync`, which brings runs there.

The process keeps wandb out of the kernel: its calls block, retry in silence, and ask for a key where they find none.
It asks for little: six requests in any minute, counted before they are made, and twice where one fails, since wandb
then tries once more (`x_graphql_retry_max`), after the time that the server's Retry-After says.
"""

import contextlib
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from kit.errors import InputError, KitError
from kit.slurm.run import Run
from kit.watch.metrics import Store
from kit.watch.wandb_log import find_logs

PER_MINUTE = 6  # requests
SAMPLE = 10_000  # rows that are asked for at once; of more than these the server takes a sample
LATE, TIMEOUT = 1.5, 10  # seconds after which a silent server is worth a word, and is given up
_QUIET = {"WANDB_SILENT": "true", "WANDB_X_GRAPHQL_RETRY_MAX": "1", "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2"}
_CODES = {"finished": 0, "failed": 1, "crashed": 1, "killed": 1}
_WORDS = {'"NaN"': "NaN", '"Infinity"': "Infinity", '"-Infinity"': "-Infinity"}  # the server's JSON has them as texts
Said = dict[str, Any]


class Online(Store):
    """A run "entity/project/run" on a W&B server. `poll` never waits for it; `close` ends the process that asks."""

    def __init__(self, path: str, minute: float = 60.0) -> None:
        """`minute` is the time, in seconds, in which six requests are made at most. A wrong path is an InputError."""
        super().__init__()
        if len(parts := path.split("/")) != 3 or not all(parts):
            raise InputError(f"{path!r} names no run on a W&B server; write entity/project/run.")
        self.source, self.run_id = f"W&B {path}", parts[2]
        self.state = ""  # as W&B calls it: running, finished, failed, crashed, killed
        self.sampled = ""  # "sampled 10,000 of 50,000 rows", unless all of them are known
        self._trouble, self._asked = "", time.monotonic()
        self._heard: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kit.watch.online", path, str(minute)], env=_environment() | _QUIET, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Thread(target=_listen, args=(self._process.stdout, self._heard), daemon=True).start()

    def poll(self) -> bool:
        """Take in what the process has heard by now. True if there was anything new."""
        new = False
        while not self._heard.empty():
            said = self._heard.get()
            new = self._take(said) or new
        late = time.monotonic() - self._asked
        self.problem = f"no answer from W&B for {late:.0f} s" if late > LATE else self._trouble
        if self._process.poll():
            self.problem = f"the process that asks W&B ended with exit code {self._process.returncode}"
        return new

    def _take(self, said: Said) -> bool:
        self._asked = min(self._asked, time.monotonic()) if "asking" in said else math.inf
        self._trouble = said.get("trouble", self._trouble if "asking" in said else "")
        self.rows({name: [text.encode() for text in texts] for name, texts in said.get("rows", {}).items()})
        for told in said.get("statistics", []):
            self.statistics("node", told)
        if "state" in said:
            self.state, self.sampled, self.exit_code = said["state"], said["sampled"], _CODES.get(said["state"])
            self.config, self.summary = said["config"], said["summary"]
        return not said.keys() & {"asking", "trouble"}

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()


def _environment() -> dict[str, str]:
    """For a process that finds kit, and neither this one's wandb service nor its wish to stay offline."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), kept.get("PYTHONPATH", "")])}


def _listen(stream: Any, heard: "queue.SimpleQueue[Said]") -> None:
    for line in stream:
        heard.put(json.loads(line))


class _Asker:
    """The process's side: counts requests, and says what it hears."""

    def __init__(self, path: str, minute: float, say: Callable[..., None]) -> None:
        self.path, self.minute, self.say = path, minute, say
        self.run: Any = None
        self.rows = 0
        self.pages = True  # whether rows can be had page by page
        self.last_step, self.last_sample = -1, 0.0
        self.times: deque[float] = deque([-math.inf] * PER_MINUTE, PER_MINUTE)

    @contextlib.contextmanager
    def asking(self, requests: int) -> Iterator[None]:
        """Wait until so many requests more are polite, and say that they begin."""
        _rest(self.times[requests - 1] + self.minute - time.monotonic())
        self.say(asking=True)
        try:
            yield
        finally:
            self.times.extend([time.monotonic()] * requests)

    def look(self) -> bool:
        """Ask for what is new; False when the run has ended and all of it is known."""
        if self.run is None:
            import wandb

            with self.asking(4):  # who asks, their entity, the run, its statistics
                run = wandb.Api(timeout=TIMEOUT).run(self.path)
                self._statistics(run.history(samples=1000, pandas=False, stream="system"))
            self.run = run
        else:
            with self.asking(1):
                self.run.load(force=True)
        run, before = self.run, self.last_step
        total, last = run.historyLineCount, (run.historyKeys or {}).get("lastStep", -1)
        if last > before:
            self._history(last)
        self._statistics([run.system_metrics])
        sampled = f"sampled {self.rows:,} of {total:,} rows" if self.rows < total else ""
        self.say(state=run.state, sampled=sampled, config=run.config, summary=run.summary_metrics)
        return run.state == "running" or self.last_step > before

    def _history(self, last: int) -> None:
        """All rows behind the last one known, in one page; a sample if they are too many, or no page has them."""
        rows: list[Said] = []
        if self.pages and self.last_step >= 0 and last - self.last_step <= SAMPLE:
            self.pages = False  # where it fails, the next look takes a sample
            span = {"min_step": self.last_step + 1, "max_step": last + 1, "page_size": last - self.last_step}
            with self.asking(3):
                rows = list(self.run.scan_history(**span))
            self.pages = True
        if not rows:  # a page may be empty while a run is active (github.com/wandb/wandb/issues/12067)
            with self.asking(1):
                sample = self.run.history(samples=SAMPLE, pandas=False)
            rows = [row for row in sample if row["_step"] > self.last_step]
        for names, group in groupby((dict(_flat(row)) for row in rows), key=sorted):
            parts = list(group)
            for start in range(0, len(parts), 500):
                self.say(rows={name: [row[name] for row in parts[start : start + 500]] for name in names})
        self.rows += len(rows)
        self.last_step = max([last, *(row["_step"] for row in rows)])

    def _statistics(self, samples: list[Said]) -> None:
        new = [sample for sample in samples if sample.get("_timestamp", 0) > self.last_sample]
        if new:
            self.last_sample = new[-1]["_timestamp"]
            self.say(statistics=[{name.removeprefix("system."): v for name, v in one.items()} for one in new])


def _flat(row: Said, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, JSON text) of each value; nested names are joined by dots, as in the log."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = json.dumps(value)
            yield prefix + name, _WORDS.get(text, text)


def _sentence(error: Exception) -> str:
    if isinstance(error, LookupError | TypeError | ValueError | AttributeError):
        return f"W&B's answer cannot be read ({type(error).__name__}: {error})"
    text = (str(error).splitlines() or [type(error).__name__])[-1].removeprefix("while retrying: ")
    return f"W&B did not answer within {TIMEOUT} s" if "respond in time" in text else f"W&B: {text}"


def _rest(seconds: float) -> None:
    """Wait; end if the reader is gone, so that its end of the pipe is closed."""
    if select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
        sys.exit()


def main(path: str, minute: str) -> None:
    """Say in JSON lines what the server has, until the run has ended."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nobody else's words among them
    asker, more = _Asker(path, float(minute), lambda **said: print(json.dumps(said), file=out)), True
    while more:
        pause = asker.minute / PER_MINUTE
        try:
            more = asker.look()
        except Exception as error:
            asker.say(trouble=_sentence(error))
            asker.times.append(time.monotonic())  # it was tried twice
            pause *= PER_MINUTE if "429" in str(error) or "respond in time" in str(error) else 2
        _rest(pause * more)


def sync(place: str | Path | Run, echo: Callable[[str], None] = print, timeout: float = 600.0) -> None:
    """Bring a run that was logged offline to the server by `wandb sync`, whose lines go to `echo` as they come.

    Raises InputError where no log is, KitError with the last line when it did not work within `timeout` seconds.
    """
    logs = find_logs(place.path if isinstance(place, Run) else Path(place))
    if not logs:
        raise InputError(f"{place} holds no W&B log to sync.")
    folders = [str(log.parent) for log in logs if log.name == logs[-1].name]
    command, line = [sys.executable, "-m", "wandb", "sync", *folders], ""
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=_environment(), text=True, stdout=pipe, stderr=out) as process:
        alarm = threading.Timer(timeout, _end, (process.pid,))
        alarm.start()
        for line in process.stdout or ():
            echo(line.rstrip())
        alarm.cancel()
    if process.returncode == -signal.SIGKILL:
        raise KitError(f"wandb sync did not end within {timeout:.0f} s and was stopped: {line.strip()}")
    if process.returncode:
        raise KitError(f"wandb sync ended with exit code {process.returncode}: {line.strip()}")


def _end(pid: int) -> None:
    """Kill the process and those it started, wandb's service, which keep its output open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            one.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
