"""Run: one launch, a folder. Any kernel on any day can attach to it by folder, name or job id."""

import contextlib
import getpass
import hashlib
import math
import secrets
import shutil
import socket
import subprocess
import sys
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
from kit.slurm.folder import RunFolder
from kit.slurm.logs import LogTail
from kit.slurm.outcome import RunState
from kit.slurm.states import CancelRecord, Record, RequeueRecord
from kit.slurm.submit import submit

FOLDERS = ("logs", "state", "nodes", "wandb", "checkpoints")


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
        root, path = Path(cluster.paths.runs).absolute(), None
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _new_folder(root, f"{name}-{time.strftime('%Y%m%d-%H%M')}")
            for folder in FOLDERS:
                (path / folder).mkdir()
            for file, text in ({"cluster.toml": cluster.toml()} | texts).items():
                files.write(path / file, text)
            run = cls(path)
            run.note(
                name=path.name, job_id=None, wandb_id=secrets.token_hex(4), created=time.time(),
                host=socket.gethostname(), user=getpass.getuser(), python=sys.executable, git=git_state(), **facts,
            )  # fmt: skip
        except OSError as error:
            if path:
                shutil.rmtree(path, ignore_errors=True)  # nothing was submitted from it
            raise InputError(
                f"No run folder can be made in {root}: {error.strerror} ({error.filename or path}). "
                "Free space there, or set paths.runs in the cluster profile to a folder that every node sees."
            ) from None
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
            f"No run {str(ref)!r}: it is not a folder with a run.json, and there is no run of that name or job id in "
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

    def why_pending(self) -> str:
        """Why the job waits in the queue, and Slurm's estimate of its start; empty where it does not wait."""
        return self.state.pending

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
        refuses.
        """
        state = evidence.state_of(self)
        if state.ended or not state.job_id:
            raise InputError(f"{self.name} is {state.state}: there is nothing to cancel.")
        if not self.is_local:
            self._run_command(task, "scancel")
        self._record(CancelRecord, task)
        if self.is_local:
            local.stop(self)

    def requeue(self, task: int | None = None) -> None:
        """Start the run again from its last checkpoint: as the same job while Slurm remembers it, else as a new one.

        An array task can start again only while Slurm remembers it. Raises KitError where Slurm refuses, and as
        `submit` does.
        """
        if self._slurm_can_requeue():
            self._run_command(task, "scontrol", "requeue")
            self._record(RequeueRecord, task)
        elif task is not None:
            raise KitError(
                f"Slurm does not know job {self.job_id} any more: launch the work of task {task} as a new run."
            )
        else:
            submit(self)

    def _slurm_can_requeue(self) -> bool:
        """Whether the run has a job in Slurm that lives, or that has ended and that Slurm remembers as this run's."""
        job = self.job_id or ""
        if not job.isdigit():
            return False
        if not evidence.state_of(self).ended:
            return True
        return f" Command={self.info.get('script')} " in client.job_records([job]).get(job, "")

    def _run_command(self, task: int | None, *words: str) -> None:
        """Run a command of Slurm on the job or task. Raises KitError with Slurm's words."""
        job = str(self.job_id) if task is None else f"{self.job_id}_{task}"
        done = client.command(*words, job)
        if done.returncode != 0:
            raise KitError(f"{' '.join(words)} {job}: {done.stderr.strip() or 'failed'}")

    def _record(self, kind: type[Record], task: int | None) -> None:
        ledger.append(self, kind(time=time.time(), job_id=self.job_id, task=task))

    def tail(self, ranks: Collection[int] | None = None, lines: int = 20) -> LogTail:
        """The last lines of the job's log and of every rank's, or of these ranks', as they are now."""
        return LogTail(self.name, {path.name: logs.last_lines(path, lines) for path in self.logs(ranks)})

    def follow(self, ranks: Collection[int] | None = None, lines: int = 20, seconds: float = math.inf) -> Iterator[str]:
        """Lines of the job's log and of every rank's, or of these ranks', as they are written, with the file's name.

        Begins with the last `lines` of each, of at most 64 KiB. Stops when the run ends, or after so many seconds.
        """
        deadline = time.monotonic() + seconds

        def finished() -> bool:
            return time.monotonic() > deadline or evidence.state_of(self).ended

        return logs.follow(lambda: self.logs(ranks), finished, lines)

    def as_dict(self) -> dict[str, Any]:
        """The folder and the job id."""
        return {"run": str(self.path), "job_id": self.job_id}

    def parts(self) -> Iterable[Part]:
        """The folder and the job id."""
        yield str(self.path)
        yield f"job {self.job_id}" if self.job_id else "not submitted"

    def __repr__(self) -> str:
        return f"Run({self.name}, job {self.job_id})"


def _new_folder(root: Path, name: str) -> Path:
    for suffix in ["", *(f"-{n}" for n in range(2, 1000))]:
        try:
            (root / (name + suffix)).mkdir()
            return root / (name + suffix)
        except FileExistsError:
            continue
    raise InputError(f"{root} holds a thousand runs named {name}; wait a minute or rename the recipe.")


def _constraints_digest() -> str:
    path = files.REPOSITORY / "env" / "constraints.txt"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def git_state(folder: Path = files.REPOSITORY) -> str:
    """The commit, with -dirty where the tree differs from it; empty outside a git checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


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
    return [p for p in dict.fromkeys([Path("runs").absolute(), *map(Path, known)]) if p.is_dir()]


def find_runs() -> Iterator[Run]:
    """Every run in the known folders, newest first; a folder whose run.json is damaged or unreadable is left out."""
    times: dict[Path, float] = {}
    for root in roots():
        for path in root.glob("*/run.json"):
            with contextlib.suppress(OSError):
                times[path] = path.stat().st_mtime
    for path in sorted(times, key=lambda path: times[path], reverse=True):
        run = Run(path.parent)
        with contextlib.suppress(InputError, OSError):
            _ = run.info
            yield run
