"""Run: one launch, a directory. Any kernel on any day can attach to it by folder or job id."""

import getpass
import hashlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit import files
from kit.cluster import Cluster
from kit.errors import InputError
from kit.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """A run folder: run.json, recipe.toml, cluster.toml, job.sbatch, logs/, state/, wandb/, nodes/, checkpoints/."""

    path: Path

    @classmethod
    def create(cls, recipe: Recipe, cluster: Cluster, dataset: Path, data_digest: str) -> "Run":
        """A new folder under the cluster's runs path, named name-date-time; a name is never used twice."""
        root = Path(cluster.paths.runs).absolute()
        root.mkdir(parents=True, exist_ok=True)
        path = _new_name(root, f"{recipe.name}-{time.strftime('%Y%m%d-%H%M')}")
        for folder in ("logs", "state", "nodes", "wandb", "checkpoints"):
            (path / folder).mkdir()
        run = cls(path)
        files.write(path / "recipe.toml", recipe.toml())
        files.write(path / "cluster.toml", cluster.toml())
        run.note(
            name=path.name, job_id=None, wandb_id=secrets.token_hex(4), created=time.time(), host=socket.gethostname(),
            user=getpass.getuser(), python=sys.executable, dataset=str(dataset.absolute()), git=git_state(),
            digests={"data": data_digest, "recipe": recipe.digest(), "constraints": _constraints_digest()},
        )  # fmt: skip
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
            if str(ref) in (run.path.name, str(run.job_id)):
                return run
        looked = ", ".join(str(root) for root in roots()) or "no runs folder is known yet"
        raise InputError(
            f"No run {str(ref)!r}: it is no folder with a run.json, and no run of that name or job id in {looked}."
        )

    @cached_property
    def recipe(self) -> Recipe:
        """The frozen copy."""
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
    def job_id(self) -> str | None:
        """Slurm's job id, or local-<n>; None before the job was submitted."""
        job: str | None = self.info["job_id"]
        return job

    @property
    def log(self) -> Path:
        """The job's own log, which Slurm writes."""
        return self.path / "logs" / f"slurm-{str(self.job_id).removeprefix('local-')}.out"

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


def _roots_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kit" / "roots"


def _remember(root: Path) -> None:
    """So that a job id finds its run from any folder."""
    path = _roots_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    if str(root) not in (path.read_text().splitlines() if path.exists() else []):
        with path.open("a") as stream:
            stream.write(f"{root}\n")


def roots() -> list[Path]:
    """Folders that hold runs: ./runs and every other in which this user launched one."""
    known = _roots_file().read_text().splitlines() if _roots_file().exists() else []
    return [p for p in dict.fromkeys([Path("runs").absolute(), *map(Path, known)]) if p.is_dir()]


def runs() -> Iterator[Run]:
    """Every run that can be found, newest first."""
    found = [p.parent for root in roots() for p in root.glob("*/run.json")]
    yield from (Run(p) for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True))
