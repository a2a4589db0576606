"""RunStatus: state, progress and metrics of one run. The board's thread keeps it up to date; others may read it."""

import math
import shutil
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError, KitError
from kit.forecast.timing import predict
from kit.slurm.folder import StateFolder
from kit.slurm.outcome import RunState
from kit.slurm.run import Run
from kit.slurm.states import JobState, Phase, PhaseRecord
from kit.watch.background import Background
from kit.watch.maps import Maps
from kit.watch.metrics import NEWEST, Metrics, Store
from kit.watch.online import Online
from kit.watch.samples import CPU, Reading
from kit.watch.wandb_log import find_logs

STATE_INTERVAL = 10.0  # seconds between questions to Slurm, and looks at the disk
NO_ANSWER = 30.0  # seconds without an answer after which the board says so and waits no longer
SILENT = 5.0  # seconds after which a node that samples once a second counts as silent
STALE = 600.0  # seconds without a byte after which wandb, too, takes a run without an exit record for dead
PHASES = {
    Phase.STARTING: "starting",
    Phase.LOADING: "loading the model",
    Phase.FIRST_STEP: "first step",
    Phase.TRAINING: "training",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving a checkpoint",
}


class BoardState(StrEnum):
    """States of runs that Slurm does not know; other states are those of `kit state` or of the W&B server."""

    OPENING = "OPENING"  # not read yet
    NO_RUN = "NO RUN"
    UNKNOWN = "UNKNOWN"  # the state could not be determined
    UNREADABLE = "UNREADABLE"  # the log cannot be read
    WAITING = "WAITING"  # nothing is logged yet
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    STALE = "STALE"  # no exit record, and nothing was written for a long time


@dataclass(frozen=True)
class Progress:
    """Optimizer steps done and in all, and the seconds left; 0 where unknown."""

    step: int = 0
    steps: int = 0
    seconds_left: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """What is forecast for the run's recipe; 0 where unknown."""

    steps: int = 0
    step_s: float = 0.0
    mfu_per_token_s: float = 0.0  # model FLOPs utilisation (0 to 1) at one token a second of all ranks
    mfu: float = 0.0
    links_s: float = 0.0  # by how much communication makes a step longer


def forecast_of(run: Run) -> Forecast:
    """The forecast for the run's recipe."""
    if not (run.path / "recipe.toml").is_file():
        return Forecast()
    manifest = Path(run.info.get("dataset", ""), "manifest.json")
    try:
        recipe = run.recipe
        found = predict(recipe, run.cluster, files.read_json(manifest) if manifest.is_file() else None).time
    except KitError:  # such as a family of models that the forecast does not know
        return Forecast()
    tokens_per_s = (found.tokens_per_s_per_gpu or 0.0) * recipe.world_size
    mfu = (found.mfu or 0.0) / tokens_per_s if tokens_per_s else 0.0
    step_s = found.step_s or 0.0
    alone_s = math.hypot(found.compute_s or 0.0, found.host_s or 0.0)  # as the forecast adds up what overlaps
    links_s = max(0.0, step_s - alone_s) if recipe.world_size > 1 else 0.0
    return Forecast(found.optimizer_steps or 0, step_s, mfu, found.mfu or 0.0, links_s)


class RunStatus:
    """A run, its folder, name or job id, a W&B log or folder, or "entity/project/run" on a W&B server.

    Nothing is read before `update`. `refused` says why there is nothing to watch, `problem` what went wrong last.
    """

    def __init__(self, ref: str | Path | Run) -> None:
        self.ref = ref
        self.run: Run | None = None
        self.folder: Path | None = None  # None for a run on a server
        self.metrics: Store = Store()
        self.maps = Maps()
        self._zoomed = Maps()
        self._joined: Maps | None = None  # with the ends of long files, since the last update
        self.expected_nodes = 0  # 0 if unknown
        self.state: str = BoardState.OPENING
        self.cause = ""
        self.over = False  # nothing more will come
        self.refused = self.problem = self.note = ""
        self.progress = Progress()
        self.forecast = Forecast()
        self.phase: PhaseRecord | None = None
        self.disk: Background[Any] | None = None  # its usage; in the background, as statvfs hangs on a dead NFS mount
        self._slurm: Background[RunState] | None = None

    @property
    def title(self) -> str:
        """The run's name."""
        if self.folder is None:
            return str(self.ref)
        return self.folder.stem.removeprefix("run-") if self.folder.suffix == ".wandb" else self.folder.name

    @property
    def settled(self) -> bool:
        """True once the state is known, or known to be unknowable for now."""
        if isinstance(self.metrics, Online):
            return bool(self.metrics.state or self.metrics.problem)
        slow = self._slurm is not None and self._slurm.waiting > NO_ANSWER
        return self.over or self.state != BoardState.OPENING or bool(self.problem) or slow

    @property
    def catching_up(self) -> bool:
        """True while the newest samples may not be read yet."""
        return isinstance(self.metrics, Metrics) and self.metrics.left > NEWEST

    @property
    def began(self) -> float:
        """Unix time of the first sample, or else of the first row; 0 before both."""
        if math.isfinite(self.metrics.first_sample):
            return self.metrics.first_sample
        times = self.metrics.series.get("_timestamp")
        return times.values[0] if times and times.values else 0.0

    def maps_now(self) -> Maps:
        """The heat maps; while long files are being read, with what is known of their ends."""
        end = self.metrics.end if isinstance(self.metrics, Metrics) else None
        if not end:
            return self.maps
        self._joined = joined = self._joined or self.maps.joined(end)
        return joined

    def maps_between(self, low: float, high: float) -> Maps:
        """The heat maps of the part between two unix times, with columns as narrow as it allows."""
        if (self._zoomed.low, self._zoomed.high) != (low, high):
            self._zoomed = Maps(low, high)
        zoomed = self._zoomed
        zoomed.update(self.metrics)
        return zoomed

    def update(self) -> bool:
        """Read what is new, some tens of milliseconds at most. True if there was anything. Never raises."""
        new = False
        try:
            if self.state == BoardState.OPENING and not isinstance(self.metrics, Metrics | Online):
                self._open()
            if isinstance(self.metrics, Metrics | Online):
                new = self.metrics.poll()
                self.maps.update(self.metrics)
                self._joined = None
            if not new or self.state == BoardState.OPENING:
                self._judge()
            if self.disk is not None:
                self.disk.refresh()
            self.progress = self._progress()
            self.phase = self.run.state_folder.read_phase() if self.run and not self.over else None
            self.problem = ""
        except InputError as error:
            self.state, self.over, self.refused = BoardState.NO_RUN, True, str(error)
        except Exception as error:  # the board goes on and shows it
            self.problem = f"{type(error).__name__}: {error}"
        return new

    def _open(self) -> None:
        ref = self.ref
        if isinstance(ref, str) and _is_online(ref):
            self.metrics = Online(ref)
            return
        place = ref.path if isinstance(ref, Run) else Path(ref)
        if isinstance(ref, Run) or not place.exists() or (place / "run.json").is_file():
            self.run = Run.attach(ref)
            place = self.run.path
            self.expected_nodes = self.run.recipe.parallel.nodes if self.run.trains else 0
            self.forecast = forecast_of(self.run)
        elif place.is_dir() and not find_logs(place) and not (place / "wandb").is_dir():
            raise InputError(f"{place} is not a run (it has no run.json) and has no wandb folder.")
        self.metrics = Metrics(place.absolute())
        self.folder = folder = place.absolute()
        self.disk = Background(lambda: shutil.disk_usage(folder), STATE_INTERVAL)

    def _judge(self) -> None:
        if self.run is not None:
            self._judge_by_slurm(self.run)
        elif isinstance(self.metrics, Online):
            self.state = self.metrics.state.upper() or BoardState.OPENING
            self.over = self.metrics.exit_code is not None
        elif self.folder is not None:
            self._judge_by_log(self.folder)

    def _judge_by_slurm(self, run: Run) -> None:
        self._slurm = self._slurm or Background(lambda: run.state, STATE_INTERVAL)
        self._slurm.refresh()
        if self._slurm.error is not None:
            error = self._slurm.error
            known = isinstance(error, KitError | OSError)
            self.state, self.cause = BoardState.UNKNOWN, str(error) if known else f"{type(error).__name__}: {error}"
        elif self._slurm.value is not None:
            found = self._slurm.value
            self.state, self.cause, self.over = found.state, found.cause, found.ended

    def _judge_by_log(self, folder: Path) -> None:
        """The state of a run of which there is only a W&B log."""
        code, logs = self.metrics.exit_code, find_logs(folder)
        age = time.time() - max((log.stat().st_mtime for log in logs), default=math.inf)
        self.cause = ""
        if code is not None:
            self.state = BoardState.FAILED if code else BoardState.FINISHED
            self.cause = f"exit code {code}" if code else ""
        elif self.metrics.problem:
            self.state = BoardState.UNREADABLE
        elif age > STALE:
            self.state, self.cause = BoardState.STALE, f"nothing was written for {coarse_duration(age)}"
        else:
            self.state = BoardState.RUNNING if logs else BoardState.WAITING
        self.over = self.state in (BoardState.FINISHED, BoardState.FAILED, BoardState.STALE)

    def _progress(self) -> Progress:
        """From the job's own report, else at its pace so far, else as forecast."""
        step = int(self.metrics.last(self.metrics.step_name) or 0)
        folder = StateFolder(self.folder / "state") if self.folder else None
        if folder and (report := folder.read_report()):
            age = time.time() - folder.progress.stat().st_mtime
            return Progress(max(step, report.step), report.max_steps, report.eta_s - age)
        planned = self.metrics.config.get("max_steps")  # as the Trainer of transformers reports it to W&B
        steps = planned if isinstance(planned, int) and planned > 0 else self.forecast.steps
        step_s = self.forecast.step_s
        times = self.metrics.series.get("_timestamp")
        if times and times.steps[-1] > times.steps[0]:
            step_s = (times.values[-1] - times.values[0]) / (times.steps[-1] - times.steps[0])
        return Progress(step, steps, max(0.0, step_s * (steps - step)))

    def silent_nodes(self) -> dict[str, float]:
        """Nodes that have stopped sampling, and seconds since; for a run that is over, at the time of its end."""
        nodes = dict(self.metrics.nodes)
        now = max(nodes.values(), default=0.0) if self.over else time.time()
        return {node: now - newest for node, newest in sorted(nodes.items()) if now - newest > SILENT}

    def line(self) -> str:
        """One line: state, step, age of the newest row, time left, nodes, damage, source, and what is wrong."""
        if self.refused:
            return self.refused
        metrics, progress = self.metrics, self.progress
        facts = [self.state.lower() + (f" ({self.cause})" if self.cause else "")]
        if progress.step or progress.steps:
            facts.append(f"step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else ""))
        age = coarse_duration(time.time() - metrics.newest)
        facts.append(f"newest row {age} ago" if metrics.newest else "no row yet")
        if progress.seconds_left > 0 and not self.over:
            facts.append(f"about {coarse_duration(progress.seconds_left)} left")
        facts += self._phase_facts() + self._training_facts() + self._node_facts() + self._source_facts()
        if self._slurm is not None and self._slurm.waiting > NO_ANSWER:
            facts.append(f"no answer about the job for {coarse_duration(self._slurm.waiting)}")
        return " · ".join(facts + [text for text in (metrics.problem, self.problem, self.note) if text])

    def _phase_facts(self) -> list[str]:
        """What the job does where it does not train: loading, compiling, evaluating, saving."""
        if self.phase is None or self.state != JobState.RUNNING or self.phase.phase is Phase.TRAINING:
            return []
        words = (
            "compiling" if self.phase.phase is Phase.FIRST_STEP and self.phase.compiles else PHASES[self.phase.phase]
        )
        return [f"{words} for {coarse_duration(max(0.0, time.time() - self.phase.since))}"]

    @property
    def gpus(self) -> int:
        """Ranks of the recipe, or else the GPUs that were sampled; 0 where neither is known."""
        if self.run is not None and self.run.trains:
            return self.run.recipe.world_size
        readings = [key for key in list(self.metrics.series) if isinstance(key, Reading)]
        return len({(key.host, key.device) for key in readings if key.device != CPU})

    def _training_facts(self) -> list[str]:
        """Tokens and epochs so far, tokens/s, and MFU as forecast before any is measured."""
        last, trained = self.metrics.last, self.metrics.series.get("train/loss_tokens")
        tokens, epoch, rate = last("train/num_tokens"), last("train/epoch"), last("train/tokens_per_s")
        facts = self._load_facts() if not tokens else []
        if tokens:
            labelled = f" ({si(math.fsum(trained.values))} trained on)" if trained and not trained.not_finite else ""
            facts.append(f"{si(tokens)} tokens{labelled}")
        if epoch:
            facts.append(f"epoch {epoch:.2f}")
        if rate:
            facts.append(f"{rate:,.0f} tokens/s" + (f" ({rate / self.gpus:,.0f} per GPU)" if self.gpus > 1 else ""))
        forecast = 0.0 if self.over else self.forecast.mfu
        mfu = rate * self.forecast.mfu_per_token_s if rate else forecast
        if mfu:
            facts.append(f"MFU {mfu:.1%}" + ("" if rate else " forecast"))
        return facts

    def _load_facts(self) -> list[str]:
        """How long the base model took to load, and how fast that was."""
        seconds, size, rate = (self.metrics.last(f"train/base_load_{name}") for name in ("s", "gb", "gb_s"))
        if seconds is None:
            return []
        amount = f" ({size:,.3g} GB, {rate:.3g} GB/s)" if size and rate else ""
        return [f"base loaded in {coarse_duration(seconds)}{amount}"]

    def _node_facts(self) -> list[str]:
        nodes, silent = self.metrics.nodes, self.silent_nodes()
        expected = self.expected_nodes
        if not nodes and not expected:
            return []
        verb = "reported" if self.over else "reporting"
        fact = f"{len(nodes) - len(silent)} of {max(expected, len(nodes))} nodes {verb}"
        names = ", ".join(f"{node} silent for {coarse_duration(age)}" for node, age in silent.items())
        return [f"{fact} ({names})" if names else fact]

    def _source_facts(self) -> list[str]:
        metrics = self.metrics
        if isinstance(metrics, Online):
            return [text for text in (metrics.sampled, f"from W&B {metrics.path}") if text]
        if not isinstance(metrics, Metrics):
            return []
        left = [f"{metrics.left / 1e6:,.0f} MB still to read"] if self.catching_up else []
        source = f"from {Path(metrics.source).name}" if metrics.source else "no W&B log yet"
        damaged = [f"{metrics.damaged:,} damaged records"] if metrics.damaged else []
        return [*left, *damaged, source]

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON-ready values."""
        metrics, progress = self.metrics, self.progress
        return {
            "run": self.title,
            "state": self.state,
            "cause": self.cause,
            "step": progress.step,
            "steps": progress.steps or None,
            "seconds_left": progress.seconds_left if progress.seconds_left > 0 and not self.over else None,
            "newest_row_age_s": time.time() - metrics.newest if metrics.newest else None,
            "phase": self.phase.phase if self.phase else None,
            "nodes": sorted(metrics.nodes),
            "silent_nodes": self.silent_nodes(),
            "damaged_records": metrics.damaged if isinstance(metrics, Metrics) else 0,
            "problem": self.refused or metrics.problem or self.problem or None,
        }

    def close(self) -> None:
        """Stop reading from a server."""
        if isinstance(self.metrics, Online):
            self.metrics.close()


def _is_online(ref: str) -> bool:
    """Whether it is written as entity/project/run, and is not a path that exists."""
    return ref.count("/") == 2 and not ref.startswith(("/", ".")) and not Path(ref).exists()


def si(amount: float) -> str:
    """An amount in three digits, as people say it: 812, 7.4 M, 1.2 G."""
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e4)):
        if amount >= size:
            return f"{amount / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{amount:,.0f}"


def coarse_duration(seconds: float) -> str:
    """A duration in one unit, as status lines show it: 42 s, 12 min, 3.5 h, 2 days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
