"""The run folder: run.json, the frozen recipe and profile, logs, checkpoints and the folder of state files."""

import contextlib
import grp
import os
import pwd
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.slurm.states import Phase, PhaseRecord, StepReport, Witness

LOCAL_PREFIX = "local-"  # job ids of the local runner
# The values of run.json that decisions depend on; each may be null or absent but for job_id, which may be null.
# Job ids of Slurm and of the local runner: a text of another form must not become an option of scancel.
# Slurm's number, or a task of an array as a sweep has it; the local runner's number.
JOB_ID = re.compile(rf"[1-9]\d{{0,9}}(_\d{{1,9}})?|{LOCAL_PREFIX}\d{{1,9}}", re.ASCII)
INFO_TYPES: dict[str, Any] = {"job_id": str, "submitted": int | float, "tasks": list, "script": str, "log": str}


_STEP_REPORT = TypeAdapter(StepReport)


class ScriptFile(NamedTuple):
    """A start or exit file that the job's script left."""

    path: Path
    witness: Witness
    restart: int
    task: int | None


class StateFolder:
    """The names of the files in a run's `state` folder. The job script uses the same names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"  # records of every witness outside of the job, a JSON object a line
        self.stop = path / "stop"  # written to ask training to save and stop at the next step
        self.saved = path / "saved"  # by training that was asked to stop: the name of the checkpoint that it saved
        self.result = path / "result.json"  # by training that came to its last step
        self.progress = path / "progress.json"  # a StepReport of the newest log line of training
        self.phase = path / "phase.json"  # a PhaseRecord: what training does now
        self.runner = path / "local.json"  # process id and creation time of the local runner
        self.local_requeue = path / "requeue"  # by the local runner's stand-in for `scontrol requeue`
        self.submissions = path / "submissions"  # a folder for each attempt to submit; see kit.slurm.claim
        self.witness_script = path / "witness.sh"  # the copy that a user's own script reads through BASH_ENV

    def script_files(self) -> Iterator[ScriptFile]:
        """Files start.<restart>[.<task>].json (a StartRecord) and exit.<...>.json (an ExitRecord); no others."""
        for path in sorted(self.path.glob("*.json")):
            if match := re.fullmatch(r"(start|exit)\.(\d{1,9})(?:\.(\d{1,9}))?\.json", path.name, re.ASCII):
                task = int(match[3]) if match[3] else None
                yield ScriptFile(path, Witness(match[1]), int(match[2]), task)

    def read_phase(self) -> PhaseRecord | None:
        """What training does now; None where it has not said so, or not in the right shape."""
        with contextlib.suppress(OSError, InputError, ValueError, KeyError, TypeError):
            value = files.read_json(self.phase)
            return PhaseRecord(Phase(value["phase"]), float(value["since"]), bool(value.get("compiles")))
        return None

    def read_report(self) -> StepReport | None:
        """What training has said of its newest step; None where it has not, or not in the right shape."""
        with contextlib.suppress(OSError, InputError, ValidationError):
            return _STEP_REPORT.validate_python(files.read_json(self.progress))
        return None

    def heartbeats(self) -> Iterator[tuple[Path, int | None]]:
        """Files heartbeat[.<task>], which the job's script touches every 10 s, each with its array task; no others."""
        for path in sorted(self.path.glob("heartbeat*")):
            if match := re.fullmatch(r"heartbeat(?:\.(\d{1,9}))?", path.name, re.ASCII):
                yield path, int(match[1]) if match[1] else None


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
        if value["job_id"] is not None and not JOB_ID.fullmatch(value["job_id"]):
            raise InputError(f"{path}: {value['job_id']!r} is not the id of a job.")
        return value

    @property
    def is_own(self) -> bool:
        """Whether the folder and run.json belong to this user. The user that run.json names proves nothing."""
        return all(path.stat().st_uid == os.geteuid() for path in (self.path, self.path / "run.json"))

    @property
    def owner(self) -> str:
        """The name of the user to whom the folder belongs; the number of one without a name."""
        uid = self.path.stat().st_uid
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    def check_own(self) -> None:
        """Raises InputError where another user owns, or may write, what is executed or decides about it.

        The group may write where it is the user's private group, which many systems give each user.
        """
        names = ("", "run.json", "job.sbatch", "recipe.toml", "cluster.toml", "accelerate.yaml", "state")
        for path in (self.path / name for name in names):
            if not path.exists():
                continue
            status = path.stat()
            if status.st_uid != os.geteuid():
                raise InputError(f"{path} belongs to another user (uid {status.st_uid}): launch the recipe yourself.")
            if status.st_mode & stat.S_IWOTH:
                raise InputError(f"{path} can be written by everybody: chmod -R o-w {self.path}, after a look at it.")
            if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
                raise InputError(
                    f"{path} can be written by the group {_group_name(status.st_gid)}, and what is in it is executed "
                    f"as you: chmod -R g-w {self.path}, after a look at it."
                )

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        path = self.path / "run.json"
        files.write_json(path, (self.info if path.exists() else {}) | facts)

    @property
    def trains(self) -> bool:
        """Whether the run trains a recipe; a run of a user's own script does not."""
        return (self.path / "recipe.toml").exists()

    @property
    def measures(self) -> bool:
        """Whether the run only measures its speed and memory, and so saves and evaluates nothing."""
        return bool(self.info.get("measures"))

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
        return [path for path in found if path.is_file()]

    def checkpoints(self) -> list[Path]:
        """The folders named checkpoint-<step>, oldest first, complete or not; other names are ignored."""
        found = (self.path / "checkpoints").glob("checkpoint-*")
        steps = {path: match for path in found if (match := re.fullmatch(r"checkpoint-(\d+)", path.name, re.ASCII))}
        return sorted(steps, key=lambda path: int(steps[path][1]))


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_private_group(gid: int) -> bool:
    """Whether it is this user's own group with the user's name, which has no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
