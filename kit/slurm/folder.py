"""The run folder: run.json, the frozen recipe and profile, logs, checkpoints and the folder of state files."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.slurm.states import Witness

LOCAL_PREFIX = "local-"  # job ids of the local runner
# The values of run.json that decisions depend on; each may be null or absent but for job_id, which may be null.
INFO_TYPES: dict[str, Any] = {"job_id": str, "submitted": int | float, "tasks": list, "script": str, "log": str}


class ScriptFile(NamedTuple):
    """A start or exit file that the job's script left."""

    path: Path
    witness: Witness
    restart: int
    task: int | None


@dataclass(frozen=True)
class StateFolder:
    """The names of the files in a run's `state` folder. The job script uses the same names."""

    path: Path

    @property
    def ledger(self) -> Path:
        """Records of every witness outside of the job, one JSON object a line, appended."""
        return self.path / "ledger.jsonl"

    def start(self, restart: int, task: int | None = None) -> Path:
        """What the job's script wrote when it started: a StartRecord."""
        return self._script_file(Witness.START, restart, task)

    def exit(self, restart: int, task: int | None = None) -> Path:
        """What the job's script wrote when it ended: an ExitRecord."""
        return self._script_file(Witness.EXIT, restart, task)

    def heartbeat(self, task: int | None = None) -> Path:
        """Touched every 10 s while the job's script lives."""
        return self.path / ("heartbeat" if task is None else f"heartbeat.{task}")

    @property
    def stop(self) -> Path:
        """Written to ask training to save and stop at the next step."""
        return self.path / "stop"

    @property
    def saved(self) -> Path:
        """Written by training that was asked to stop: the name of the checkpoint that it saved."""
        return self.path / "saved"

    @property
    def result(self) -> Path:
        """Written by training that came to its last step."""
        return self.path / "result.json"

    @property
    def progress(self) -> Path:
        """Step, loss and time of the newest log line of training."""
        return self.path / "progress.json"

    @property
    def runner(self) -> Path:
        """Process id and creation time of the local runner."""
        return self.path / "local.json"

    @property
    def local_requeue(self) -> Path:
        """Written by the local runner's stand-in for `scontrol requeue`."""
        return self.path / "requeue"

    @property
    def witness_script(self) -> Path:
        """The copy of witness.sh that a user's own script reads through BASH_ENV."""
        return self.path / "witness.sh"

    def script_files(self) -> Iterator[ScriptFile]:
        """The start and exit files, by name; files with other names are ignored."""
        for path in sorted(self.path.glob("*.json")):
            if match := re.fullmatch(r"(start|exit)\.(\d{1,9})(?:\.(\d{1,9}))?\.json", path.name, re.ASCII):
                task = int(match[3]) if match[3] else None
                yield ScriptFile(path, Witness(match[1]), int(match[2]), task)

    def heartbeats(self) -> Iterator[tuple[Path, int | None]]:
        """The heartbeat files, each with its array task; files with other names are ignored."""
        for path in sorted(self.path.glob("heartbeat*")):
            if match := re.fullmatch(r"heartbeat(?:\.(\d{1,9}))?", path.name, re.ASCII):
                yield path, int(match[1]) if match[1] else None

    def _script_file(self, witness: Witness, restart: int, task: int | None) -> Path:
        suffix = "" if task is None else f".{task}"
        return self.path / f"{witness}.{restart}{suffix}.json"


@dataclass(frozen=True)
class RunFolder:
    """A run folder: run.json, recipe.toml, cluster.toml, job.sbatch, logs/, state/, wandb/, nodes/, checkpoints/.

    `kit.slurm.run.Run` adds what can be done with a run. The modules below it need the files alone.
    """

    path: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @cached_property
    def recipe(self) -> Recipe:
        """The frozen copy. Raises InputError for a run of a user's own script, which has no recipe."""
        if not self.trains:
            raise InputError(f"{self.name} has no recipe.toml: it runs a script of your own.")
        return Recipe.load(self.path / "recipe.toml")

    @cached_property
    def cluster(self) -> Cluster:
        """The frozen copy."""
        return Cluster.load(self.path / "cluster.toml")

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json, read now. Raises InputError where it is absent or damaged."""
        path = self.path / "run.json"
        value = files.read_json(path)
        if not isinstance(value, dict) or "job_id" not in value:
            raise InputError(f'{path} is not the record of a run: it has to be an object with the key "job_id".')
        wrong = [key for key, types in INFO_TYPES.items() if not isinstance(value.get(key), types | None)]
        if wrong:
            raise InputError(f"{path}: the value of {wrong[0]!r} is of the wrong type: {value[wrong[0]]!r}.")
        return value

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        path = self.path / "run.json"
        files.write_json(path, (self.info if path.exists() else {}) | facts)

    @property
    def trains(self) -> bool:
        """Whether the run trains a recipe; a run of a user's own script does not."""
        return (self.path / "recipe.toml").exists()

    @property
    def job_id(self) -> str | None:
        """Slurm's job id, or local-<n> for the local runner; None before the job was submitted."""
        job: str | None = self.info["job_id"]
        return job

    @property
    def is_local(self) -> bool:
        """Whether the run's job belongs to the local runner."""
        return (self.job_id or "").startswith(LOCAL_PREFIX)

    @property
    def state_folder(self) -> StateFolder:
        """Evidence of how the job went, and the files that Python and the job script exchange."""
        return StateFolder(self.path / "state")

    @property
    def log(self) -> Path:
        """The job's log, which Slurm writes."""
        return next(iter(self.task_logs.values()))

    @property
    def task_logs(self) -> dict[int | None, Path]:
        """The log of each array task by index; of a plain job under None."""
        info = self.info
        name = info.get("log") or f"logs/slurm-{str(info['job_id']).removeprefix(LOCAL_PREFIX)}.out"
        return {task: self.path / name.replace("%a", str(task)) for task in info.get("tasks") or [None]}

    def logs(self, ranks: Collection[int] | None = None) -> list[Path]:
        """The existing logs: of the job or its tasks, and of every rank; with `ranks` of these ranks only."""
        if ranks is not None:
            found = [self.path / "logs" / f"rank-{rank:03}.log" for rank in ranks]
        else:
            found = [*self.task_logs.values(), *sorted((self.path / "logs").glob("rank-*.log"))]
        return [path for path in found if path.exists()]

    def checkpoints(self) -> list[Path]:
        """The folders named checkpoint-<step>, oldest first, complete or not; other names are ignored."""
        found = (self.path / "checkpoints").glob("checkpoint-*")
        steps = {path: match for path in found if (match := re.fullmatch(r"checkpoint-(\d+)", path.name, re.ASCII))}
        return sorted(steps, key=lambda path: int(steps[path][1]))
