"""Run: one launch, a directory. Any kernel on any day can attach to it by folder or job id."""

import contextlib
import getpass
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.slurm.logs import end_of


@dataclass(frozen=True)
class Run:
    """A run folder: run.json, recipe.toml, cluster.toml, job.sbatch, logs/, state/, wandb/, nodes/, checkpoints/."""

    path: Path

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
        """A run of a user's own script, byte for byte; it has no recipe."""
        return cls._new(name, cluster, {"job.sbatch": script})

    @classmethod
    def _new(cls, name: str, cluster: Cluster, texts: dict[str, str], **facts: Any) -> "Run":
        root, path = Path(cluster.paths.runs).absolute(), None
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _new_name(root, f"{name}-{time.strftime('%Y%m%d-%H%M')}")
            for folder in ("logs", "state", "nodes", "wandb", "checkpoints"):
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
        if ref == "latest" and (newest := next(runs(), None)):
            return newest
        if (Path(ref) / "run.json").is_file():
            return cls(Path(ref).absolute())
        for run in runs():
            if str(ref) in (run.path.name, run.job_id):
                return run
        looked = ", ".join(str(root) for root in roots()) or "no runs folder is known yet"
        raise InputError(
            f"No run {str(ref)!r}: it is no folder with a run.json, and no run of that name or job id in {looked}."
        )

    @cached_property
    def recipe(self) -> Recipe:
        """The frozen copy. Raises InputError for a run of a user's own script, which has none."""
        if not self.trains:
            raise InputError(f"{self.path.name} has no recipe.toml: it runs a script of your own.")
        return Recipe.load(self.path / "recipe.toml")

    @cached_property
    def cluster(self) -> Cluster:
        """The frozen copy."""
        return Cluster.load(self.path / "cluster.toml")

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says now."""
        return dict(files.read_json(self.path / "run.json"))

    @property
    def trains(self) -> bool:
        """Whether it trains a recipe; a run of a user's own script has none."""
        return (self.path / "recipe.toml").exists()

    @property
    def job_id(self) -> str | None:
        """Slurm's job id, or local-<n>; None before the job was submitted."""
        job: str | None = self.info["job_id"]
        return job

    @property
    def log(self) -> Path:
        """The job's own log, which Slurm writes."""
        return next(iter(self.task_logs.values()))

    @property
    def task_logs(self) -> dict[int | None, Path]:
        """The log of each task of an array; under None that of a job which is none."""
        info = self.info
        name = info.get("log") or f"logs/slurm-{str(info['job_id']).removeprefix('local-')}.out"
        return {task: self.path / name.replace("%a", str(task)) for task in info.get("tasks") or [None]}

    def logs(self, ranks: Collection[int] | None = None) -> list[Path]:
        """The job's log, or those of its tasks, and every rank's, as far as they are there; or only these ranks'."""
        if ranks is not None:
            found = [self.path / "logs" / f"rank-{rank:03}.log" for rank in ranks]
        else:
            found = [*self.task_logs.values(), *sorted((self.path / "logs").glob("rank-*.log"))]
        return [path for path in found if path.exists()]

    def tail(self, ranks: Collection[int] | None = None, lines: int = 20) -> str:
        """The last lines of each of these logs, as they are now."""
        ends = [f"== {path.name}\n{end_of(path, lines)}" for path in self.logs(ranks)]
        return "\n".join(ends) or f"{self.path.name} has no {'such log' if ranks else 'log'} yet."

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        path = self.path / "run.json"
        files.write_json(path, (self.info if path.exists() else {}) | facts)

    def checkpoints(self) -> list[Path]:
        """checkpoint-<step> folders, oldest first, complete or not."""
        found = (self.path / "checkpoints").glob("checkpoint-*")
        return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))

    def __repr__(self) -> str:
        return f"Run({self.path.name}, job {self.job_id})"


def _new_name(root: Path, name: str) -> Path:
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


def state_home() -> Path:
    """What the kit remembers for this user: folders with runs, the queue, runs that are watched."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kit"


def _remember(root: Path) -> None:
    """So that a job id finds its run from any folder."""
    path = state_home() / "roots"
    path.parent.mkdir(parents=True, exist_ok=True)
    if str(root) not in (path.read_text().splitlines() if path.exists() else []):
        with path.open("a") as stream:
            stream.write(f"{root}\n")


def roots() -> list[Path]:
    """Folders that hold runs: ./runs and every other in which this user launched one."""
    path = state_home() / "roots"
    known = path.read_text().splitlines() if path.exists() else []
    return [p for p in dict.fromkeys([Path("runs").absolute(), *map(Path, known)]) if p.is_dir()]


def runs() -> Iterator[Run]:
    """Every run that can be found, newest first; a folder whose run.json is damaged is none."""
    found = [p for root in roots() for p in root.glob("*/run.json")]
    for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
        with contextlib.suppress(InputError):
            files.read_json(path)
            yield Run(path.parent)
