"""Standing: what one run logged and how it is doing, as the board tells it. One thread keeps it; others may look."""

import math
import threading
import time
from functools import cached_property
from pathlib import Path

from kit import files
from kit.errors import InputError, KitError
from kit.slurm.run import Run
from kit.watch.metrics import WINDOW, Metrics, Store
from kit.watch.online import Online
from kit.watch.wandb_log import find_logs

ASK = 10.0  # seconds between questions to Slurm
SILENT = 5.0  # seconds after which a node that samples once a second counts as silent
STALE = 600.0  # seconds without a byte after which wandb, too, takes a run without an exit record for dead


class Standing:
    """A run, its folder, name or job id, a folder or file of W&B's, or "entity/project/run" on its server.

    `look` finds and reads it. What is no run, or cannot be read, is told in `trouble`.
    """

    def __init__(self, ref: str | Path | Run) -> None:
        self.ref = ref
        self.run: Run | None = None
        self.folder: Path | None = None  # None for a run on a server
        self.metrics: Store = Store()
        self.state, self.cause, self.over = "OPENING", "", False
        self.refused = ""  # why there is nothing to watch
        self.trouble = ""
        self.note = ""  # what else there is to tell
        self._asked = -math.inf
        self._asker: threading.Thread | None = None

    @property
    def title(self) -> str:
        """The run's own name."""
        if self.folder is None or self.folder.is_dir():
            return self.folder.name if self.folder else str(self.ref)
        return self.folder.stem.removeprefix("run-")

    @property
    def settled(self) -> bool:
        """Whether someone has told how the run is, be it that nobody can."""
        if isinstance(self.metrics, Online):
            return bool(self.metrics.state or self.metrics.problem)
        return self.over or self.state != "OPENING"

    def look(self) -> bool:
        """Read what is there by now, some tens of milliseconds at most. True if anything was new."""
        self.trouble, new = "", False
        try:
            if self.state == "OPENING" and self.folder is None and not isinstance(self.metrics, Online):
                self._open()
            new = self.metrics.poll() if isinstance(self.metrics, Metrics | Online) else False
            if not new or self.state == "OPENING":
                self._judge()
        except InputError as error:
            self.state, self.over, self.refused = "NO RUN", True, str(error)
        except Exception as error:  # told, not raised: whoever watches goes on
            self.trouble = f"{type(error).__name__}: {error}"
        return new

    def _open(self) -> None:
        ref = self.ref
        if isinstance(ref, str) and ref.count("/") == 2 and not Path(ref).exists() and not ref.startswith(("/", ".")):
            self.metrics = Online(ref)
            return
        place = ref.path if isinstance(ref, Run) else Path(ref)
        if isinstance(ref, Run) or not place.exists() or (place / "run.json").is_file():
            self.run = Run.attach(ref)
            place = self.run.path
        elif place.is_dir() and not find_logs(place) and not (place / "wandb").is_dir():
            raise InputError(f"{place} is neither a run (it has no run.json) nor does it hold a wandb folder.")
        self.folder, self.metrics = place.absolute(), Metrics(place.absolute())

    def _judge(self) -> None:
        if self.run is not None:
            if time.monotonic() - self._asked > ASK and self._asker is None:
                self._asker = threading.Thread(target=self._ask, args=(self.run,), daemon=True)  # Slurm may be slow
                self._asker.start()
        elif isinstance(self.metrics, Online):
            self.state = self.metrics.state.upper() or "OPENING"
            self.over = self.metrics.exit_code is not None
        elif self.folder is not None:
            self._judge_by_log(self.folder)

    def _ask(self, run: Run) -> None:
        try:
            found = run.state
            self.cause, self.over, self.state = found.cause, found.ended, str(found.state)
        except (KitError, OSError) as error:
            self.state, self.cause = "UNKNOWN", str(error)
        self._asked, self._asker = time.monotonic(), None

    def _judge_by_log(self, folder: Path) -> None:
        """The state of a run that is known by its W&B log alone."""
        code, logs = self.metrics.exit_code, find_logs(folder)
        age = time.time() - max((log.stat().st_mtime for log in logs), default=math.inf)
        self.cause = ""
        if code is not None:
            self.state, self.cause = ("FAILED", f"exit code {code}") if code else ("FINISHED", "")
        elif self.metrics.problem:
            self.state = "UNREADABLE"
        elif age > STALE:
            self.state, self.cause = "STALE", f"nothing was written for {duration(age)}"
        else:
            self.state = "RUNNING" if logs else "WAITING"
        self.over = self.state in ("FINISHED", "FAILED", "STALE")

    @cached_property
    def forecast(self) -> tuple[int, float, float]:
        """(optimizer steps, seconds a step, MFU at one token a second) as forecast for its recipe; 0 where unknown."""
        if self.run is None or not (self.run.path / "recipe.toml").is_file():
            return 0, 0.0, 0.0
        from kit.forecast.timing import predict

        manifest = Path(self.run.info.get("dataset", ""), "manifest.json")
        try:
            recipe = self.run.recipe
            told = predict(recipe, self.run.cluster, files.read_json(manifest) if manifest.is_file() else None).time
        except InputError:  # a family of models that the forecast does not know
            return 0, 0.0, 0.0
        pace = (told.tokens_per_s_per_gpu or 0.0) * recipe.world_size
        return told.optimizer_steps or 0, told.step_s or 0.0, (told.mfu or 0.0) / pace if pace else 0.0

    def progress(self) -> tuple[int, int, float]:
        """(optimizer steps done, steps in all, seconds left): as the job tells, or at its pace so far, or as forecast.

        The last two are 0 where nobody knows.
        """
        done = int(self.metrics.last(self.metrics.step_name) or 0)
        path = self.folder / "state" / "progress.json" if self.folder else None
        if path and path.is_file():
            told = files.read_json(path)
            return max(done, told["step"]), told["max_steps"], told["eta_s"] - (time.time() - path.stat().st_mtime)
        steps, pace, _ = self.forecast
        planned = self.metrics.config.get("max_steps")  # as the Trainer of transformers tells W&B
        steps = planned if isinstance(planned, int) and planned > 0 else steps
        times = self.metrics.series.get("_timestamp")
        if times and times.steps[-1] > times.steps[0]:
            pace = (times.values[-1] - times.values[0]) / (times.steps[-1] - times.steps[0])
        return done, steps, max(0.0, pace * (steps - done))

    def silent(self) -> dict[str, float]:
        """Nodes that have stopped sampling, and for how many seconds; at its end, of a run that is over."""
        newest = max(self.metrics.nodes.values(), default=0.0) if self.over else time.time()
        return {node: newest - t for node, t in sorted(self.metrics.nodes.items()) if newest - t > SILENT}

    def status(self) -> str:
        """State, step, age of the newest row, time left, nodes, damage, source, and what is wrong."""
        if self.refused:
            return self.refused
        metrics, (step, steps, left) = self.metrics, self.progress()
        facts = [self.state.lower() + (f" ({self.cause})" if self.cause else "")]
        if step or steps:
            facts.append(f"step {step:,}" + (f" of {steps:,}" if steps else ""))
        facts.append(f"newest row {duration(time.time() - metrics.newest)} ago" if metrics.newest else "no row yet")
        if left > 0 and not self.over:
            facts.append(f"about {duration(left)} left")
        facts += self._nodes() + self._source()
        return " · ".join(facts + [text for text in (metrics.problem, self.trouble, self.note) if text])

    def _nodes(self) -> list[str]:
        nodes, silent = self.metrics.nodes, self.silent()
        expected = self.metrics.expected if isinstance(self.metrics, Metrics) else 0
        if not nodes and not expected:
            return []
        verb = "reported" if self.over else "reporting"
        names = ", ".join(f"{node} silent for {duration(age)}" for node, age in silent.items())
        told = f"{len(nodes) - len(silent)} of {max(expected, len(nodes))} nodes {verb}"
        return [told + (f" ({names})" if names else "")]

    def _source(self) -> list[str]:
        metrics = self.metrics
        if isinstance(metrics, Online):
            return [text for text in (metrics.sampled, f"from {metrics.source}") if text]
        if not isinstance(metrics, Metrics):
            return []
        left = [f"{metrics.left / 1e6:,.0f} MB still to read"] if metrics.left > WINDOW else []
        source = f"from {Path(metrics.source).name}" if metrics.source else "no W&B log yet"
        return [*left, f"{metrics.damaged} damaged records", source]

    def close(self) -> None:
        """End the process that asks a server."""
        if isinstance(self.metrics, Online):
            self.metrics.close()


def duration(seconds: float) -> str:
    """In the unit that a person would take: 42 s, 12 min, 3.5 h, 2 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds:.0f} s"
