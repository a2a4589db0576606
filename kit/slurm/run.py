"""Run: one launch, a folder. Any kernel on any day can attach to it by folder, name or job id."""

import contextlib
import hashlib
import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError, KitError
from kit.show import Part, Result
from kit.slurm import client, evidence, ledger, local, logs, pending
from kit.slurm.claim import claim
from kit.slurm.client import JobRow
from kit.slurm.creation import create
from kit.slurm.folder import RunFolder
from kit.slurm.logs import LogTail
from kit.slurm.outcome import RunState
from kit.slurm.states import CancelRecord, Confidence, Record, RequeueRecord
from kit.slurm.submit import submit


@dataclass(frozen=True)
class Run(RunFolder, Result):
    """A run: how it is, and what can be done with it. The files are described at RunFolder."""

    @classmethod
    def create(cls, recipe: Recipe, cluster: Cluster, dataset: Path, data_digest: str) -> "Run":
        """A new folder under the cluster's runs path, named name-date-time; a name is never used twice.

        Raises InputError where the folder cannot be written.
        """
        digests = {"data": data_digest, "recipe": recipe.digest(), "constraints": _constraints_digest()}
        return cls._new(
            recipe.name, cluster, {"recipe.toml": recipe.toml()}, dataset=str(dataset.absolute()), digests=digests
        )

    @classmethod
    def create_for_script(cls, script: str, cluster: Cluster, name: str) -> "Run":
        """A new folder for a user's own script, byte for byte; it has no recipe. Raises InputError as `create`."""
        return cls._new(name, cluster, {"job.sbatch": script})

    @classmethod
    def _new(cls, name: str, cluster: Cluster, texts: dict[str, str], **facts: Any) -> "Run":
        root = Path(cluster.paths.runs).absolute()
        run = cls(create(root, name, {"cluster.toml": cluster.toml()} | texts, facts))
        _remember(root)
        return run

    @classmethod
    def attach(cls, ref: "str | Path | Run") -> "Run":
        """A run by folder, name or job id; "latest" is the newest. Raises InputError that says where it looked."""
        if isinstance(ref, Run):
            return ref
        if ref == "latest" and (newest := next(find_runs(), None)):
            return newest
        if (Path(ref) / "run.json").is_file():
            return cls(Path(ref).absolute())
        for run in find_runs():
            if str(ref) in (run.name, run.job_id):
                return run
        looked = ", ".join(str(root) for root in roots()) or "any folder: none with runs is known yet"
        raise InputError(
            f"No run {str(ref)!r}: it is not a folder with a run.json, and no run of yours has that name or job id in "
            f"{looked}."
        )

    @property
    def state(self) -> RunState:
        """The state now: asks Slurm or the local runner, and judges every record. Slurm is asked at most every 2 s."""
        state = evidence.state_of(self)
        return replace(state, pending=pending.why_pending(self, state))

    def task_states(self) -> dict[int | None, RunState]:
        """The state of each array task by index; of a plain job under None."""
        return evidence.task_states(self)

    def wait(self, timeout: float | None = None, every: float = 0.5) -> RunState:
        """Block until the run ends. Ctrl-C cancels a run of the local runner, and leaves a Slurm job alone.

        timeout, every: seconds. Reads the run's files; Slurm is asked less often. Raises KitError after `timeout`.
        """
        deadline = time.monotonic() + timeout if timeout else math.inf
        try:
            while not (state := evidence.state_of(self)).ended:
                if time.monotonic() > deadline:
                    raise KitError(f"{self.name} is still {state.state} after {timeout:.0f} s; it goes on.")
                time.sleep(every)
                every = min(every * 1.2, 5.0)
        except KeyboardInterrupt:
            if self.is_local:
                self.cancel()
            raise
        return state

    def cancel(self, task: int | None = None) -> None:
        """End the run, or one array task.

        Raises InputError where it has ended, since its job id may be another job's by now, and KitError where Slurm
        refuses. Slurm itself is asked about a job that seems to have ended, unless that is certain.
        """
        self.check_own()
        evidence.settle_submission(self)
        state = evidence.state_of(self)
        over = state.ended or not state.job_id
        if over and (state.confidence is Confidence.HIGH or not _live(self._rows_of(task))):
            raise InputError(f"{self.name} is {state.state}: there is nothing to cancel.")
        if not self.is_local:
            self._run_command(task, "scancel")
        try:
            self._record(CancelRecord, task)
        finally:  # also where the disk is full
            if self.is_local:
                local.stop(self)

    def requeue(self, task: int | None = None) -> None:
        """Start the run again from its last checkpoint: as the same job while Slurm remembers it, else as a new one.

        An array task can start again only while Slurm remembers it. Raises InputError for a job that has not ended by
        Slurm's own word, whatever the records say, KitError where Slurm refuses, and as `submit` does.
        """
        self.check_own()
        with claim(self):
            evidence.settle_submission(self)
            if self._requeue_in_slurm(task):
                return
        if task is not None:
            raise KitError(
                f"Slurm does not know job {self.job_id} any more: launch the work of task {task} as a new run."
            )
        submit(self)

    def _requeue_in_slurm(self, task: int | None) -> bool:
        """Have Slurm start the job, or a task, again. Returns whether it still knows the job."""
        rows = self._rows_of(task)
        if live := _live(rows):
            raise InputError(
                f"{self.name} has not ended: Slurm has job {live[0].job} as {live[0].job_state}. A requeue would lose "
                "what it did since its last checkpoint. Wait for its end, or cancel it first."
            )
        # A folder that was moved needs a script with its new path.
        if rows and rows[0].command == str(self.path / "job.sbatch"):
            self._run_command(task, "scontrol", "requeue")
            for row in rows:
                self._record(RequeueRecord, row.task, (row.said.restart or 0) + 1)
            return True
        return False

    def _rows_of(self, task: int | None) -> list[JobRow]:
        """Slurm's rows of the job or, with `task`, of that array task, asked for now. Raises as `rows_in_slurm`."""
        return [row for row in evidence.rows_in_slurm(self) if task in (None, row.task)]

    def _run_command(self, task: int | None, *words: str) -> None:
        """Run a command of Slurm on the job or task. Raises KitError with Slurm's words."""
        job = str(self.job_id) if task is None else f"{self.job_id}_{task}"
        done = client.command(*words, job)
        if done.returncode != 0:
            raise KitError(f"{' '.join(words)} {job}: {done.stderr.strip() or 'failed'}")

    def _record(self, kind: type[Record], task: int | None, restart: int | None = None) -> None:
        try:
            ledger.append(self, kind(time=time.time(), job_id=self.job_id, task=task, restart=restart))
        except OSError as error:
            raise KitError(
                f"It is done, but {self.state_folder.ledger} cannot be written ({error.strerror}), so the state of job "
                f"{self.job_id} may be an older one. Free space there."
            ) from None

    def tail(self, ranks: Collection[int] | None = None, lines: int = 20) -> LogTail:
        """The last lines of the job's log and of every rank's, or of these ranks', as they are now."""
        return LogTail(self.name, {path.name: logs.last_lines(path, lines) for path in self.logs(ranks)})

    def follow(self, ranks: Collection[int] | None = None, lines: int = 20, seconds: float = math.inf) -> Iterator[str]:
        """Lines of the job's log and of every rank's, or of these ranks', as they are written, with the file's name.

        Begins with the last `lines` of each, of at most 64 KiB. Stops when the run ends, or after so many seconds; a
        run that goes on and has logged nothing by then gives a line that says so.
        """
        deadline = time.monotonic() + seconds

        def finished() -> bool:
            return time.monotonic() > deadline or evidence.state_of(self).ended

        quiet = True
        for line in logs.follow(lambda: self.logs(ranks), finished, lines):
            quiet = False
            yield line
        if quiet and time.monotonic() > deadline:
            yield f"Nothing was logged in {seconds:.0f} s: the job waits, or its program is still starting."

    def as_dict(self) -> dict[str, Any]:
        """The folder and the job id."""
        return {"run": str(self.path), "job_id": self.job_id}

    def parts(self) -> Iterable[Part]:
        """The folder and the job id."""
        yield str(self.path)
        yield f"job {self.job_id}" if self.job_id else "not submitted"

    def __repr__(self) -> str:
        return f"Run({self.name}, job {self.job_id})"


def _live(rows: Iterable[JobRow]) -> list[JobRow]:
    return [row for row in rows if not row.job_state.final]


def _constraints_digest() -> str:
    path = files.REPOSITORY / "env" / "constraints.txt"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _remember(root: Path) -> None:
    """So that a job id finds its run from any folder."""
    path = files.state_home() / "roots"
    path.parent.mkdir(parents=True, exist_ok=True)
    if str(root) not in (path.read_text().splitlines() if path.exists() else []):
        with path.open("a") as stream:
            stream.write(f"{root}\n")


def roots() -> list[Path]:
    """Folders that hold runs: ./runs and every other in which this user launched one."""
    path = files.state_home() / "roots"
    known = path.read_text().splitlines() if path.exists() else []
    return [p for p in dict.fromkeys([Path("runs").absolute(), *map(Path, known)]) if _is_folder(p)]


def _is_folder(path: Path) -> bool:
    """False also where a folder above it is closed to this user."""
    try:
        return path.is_dir()
    except OSError:
        return False


def find_runs(everyone: bool = False) -> Iterator[Run]:
    """This user's runs in the known folders, newest first; those of others as well with `everyone`.

    A folder whose run.json is damaged or unreadable is left out.
    """
    times: dict[Path, float] = {}
    for root in roots():
        for path in root.glob("*/run.json"):
            with contextlib.suppress(OSError):
                times[path] = path.stat().st_mtime
    for path in sorted(times, key=lambda path: times[path], reverse=True):
        run = Run(path.parent)
        with contextlib.suppress(InputError, OSError):
            _ = run.info
            if everyone or run.is_own:
                yield run
