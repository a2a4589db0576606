"""The checkpoints of a run: `kit.checkpoints(run)`, with inspection, timing, planning, export and merge."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit.checkpoints import inspect as inspection
from kit.checkpoints.formats.base import Problem, ProblemKind
from kit.checkpoints.inspect import Inspection
from kit.checkpoints.pagecache import evictable
from kit.checkpoints.plan import SavePlan, plan_for_run, save_blocks
from kit.checkpoints.timing import LoadTimes, NotColdError, time_load
from kit.config import models
from kit.deploy import generate
from kit.deploy.adapter import ExportedAdapter, export, newest_complete
from kit.deploy.merge import MergedModel, merge
from kit.errors import InputError, KitError
from kit.show import Answer, Gigabytes, Mark, Part, Result, Table
from kit.slurm.run import Run

NO_ADAPTER = (
    "A full fine-tune has no adapter: its checkpoint is the model, and kit checkpoint export RUN OUT writes it in "
    "Hugging Face's format."
)


@dataclass(frozen=True)
class CheckpointSet(Result):
    """The checkpoints of a run, oldest first, and what can be done with them."""

    run: Run
    checkpoints: tuple[Inspection, ...]

    def as_dict(self) -> dict[str, Any]:
        """The run's folder and each checkpoint's inspection."""
        found = [{"step": _step(one.path), "complete": one.complete} | one.as_dict() for one in self.checkpoints]
        return {"run": str(self.run.path), "checkpoints": found}

    def parts(self) -> Iterable[Part]:
        """A row for each checkpoint."""
        if not self.checkpoints:
            yield f"{self.run.path} has no checkpoint yet."
            return
        rows, marks = [], dict[int, Mark]()
        for index, one in enumerate(self.checkpoints):
            step, problems = _step(one.path), "\n".join(problem.message for problem in one.problems)
            blocked = self.save_blocks.get(step)
            rows.append((one.path.name, step, one.complete, one.tensors, Gigabytes(one.bytes / 1e9), blocked, problems))
            if one.problems:
                marks[index] = "warning" if one.complete else "bad"
        columns = ("checkpoint", "step", "complete", "tensors", "size", "saving blocked training, s", "problems")
        yield Table(columns, rows, marks=marks)

    @cached_property
    def save_blocks(self) -> dict[int, float]:
        """Seconds for which each save blocked training, by step."""
        return save_blocks(self.run)

    @property
    def newest(self) -> Path:
        """The newest checkpoint that training could resume from. Raises InputError if no checkpoint is complete."""
        return newest_complete(self.run)

    @property
    def adapter(self) -> Path:
        """Where `export` writes the adapter."""
        return self.run.path / "adapter"

    @property
    def merged(self) -> Path:
        """Where `merge` writes the merged model."""
        return self.run.path / "merged"

    def inspect(self, values: bool = True) -> Inspection:
        """Inspect the newest complete checkpoint, with its values. Raises InputError if no checkpoint is complete."""
        return inspection.inspect(self.newest, values=values, world=_world(self.run))

    def time(
        self, cold: bool = False, methods: Sequence[str] | None = None, repeats: int = 3, progress: bool = True
    ) -> LoadTimes:
        """Time loading the newest complete checkpoint. See `time_load` for what is raised."""
        return _time(self.newest, cold, methods, repeats, progress)

    def time_base(
        self, cold: bool = False, methods: Sequence[str] | None = None, repeats: int = 3, progress: bool = True
    ) -> LoadTimes:
        """Time loading the base model, as every node does at the start; nothing for a recipe with random weights."""
        name = self.run.recipe.model.name
        if name.endswith(".json"):
            return LoadTimes((), f"{name} describes a model with random weights: there are no files to time.")
        return _time(Path(models.source(name, self.run.cluster.paths.hf_home)), cold, methods, repeats, progress)

    def plan(self) -> SavePlan:
        """How often to save, from what this run's saves cost."""
        return plan_for_run(self.run)

    def export(self, out: Path | None = None, name: str = "", progress: bool = True) -> ExportedAdapter:
        """Export the adapter of the newest complete checkpoint, by default into adapter/ of the run's folder.

        Raises InputError for a full fine-tune, KitError as `kit.deploy.adapter.export` does.
        """
        if self.run.recipe.tuning.method == "full":
            raise InputError(NO_ADAPTER)
        return export(self.newest, out or self.adapter, name, progress)

    def merge(
        self, out: Path | None = None, base: str = "", shard_gb: float = 5.0, progress: bool = True
    ) -> MergedModel:
        """Merge the exported adapter into its base, by default into merged/ of the run's folder.

        The adapter is exported first where that was not done. Raises KitError as `kit.deploy.merge.merge` does.
        """
        if not self.adapter.exists():
            self.export(progress=progress)
        with models.use_hf_home(self.run.cluster.paths.hf_home):
            return merge(self.adapter, base or self.run.recipe.model.name, out or self.merged, shard_gb, progress)

    def exported(self) -> Result:
        """The exported adapter's inspection, exported first where needed; a full fine-tune has no adapter."""
        if self.run.recipe.tuning.method == "full":
            return Answer({}, NO_ADAPTER)
        if not self.adapter.exists():
            self.export()
        return inspection.inspect(self.adapter, values=True)

    def answer(self, prompt: str) -> Answer:
        """The replies of the base model and of the exported adapter to a prompt, side by side."""
        if not self.adapter.exists():
            return Answer({}, "There is no exported adapter.")
        replies = generate.answers(self.adapter, prompt)
        shown = [replies[name].strip() or "(no text)" for name in ("base", "adapter")]
        table = Table(("the base answers", "with the adapter"), [shown], f"> {prompt}")
        return Answer({"prompt": prompt, "base": replies["base"], "reply": replies["adapter"]}, table)

    def merged_answer(self, prompt: str) -> Answer:
        """The merged model's reply, and how much its logits differ from the adapter's. Merges first where needed."""
        if not self.merged.exists():
            self.merge()
        reply = generate.answer(self.merged, prompt)
        differs = generate.difference(self.adapter, self.merged, prompt)
        text = f"The largest difference of a logit is {differs:.1%} of the largest logit."
        return Answer({"prompt": prompt, "reply": reply, "difference": differs}, f"> {prompt}", reply, text)


def checkpoints(run: Run | Path | str = "latest") -> CheckpointSet:
    """The checkpoints of a run, given as a folder, name or job id; "latest" is the newest run.

    Headers are read, values are not. Raises InputError where there is no such run.
    """
    attached = Run.attach(run)
    world = _world(attached)
    return CheckpointSet(attached, tuple(_describe(path, world) for path in attached.checkpoints()))


def _world(run: Run) -> int:
    """How many ranks saved; 0, not known, for a script of the user's own."""
    return run.recipe.world_size if run.trains else 0


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _describe(path: Path, world: int) -> Inspection:
    try:
        return inspection.inspect(path, world=world)
    except InputError as error:
        problem = Problem(ProblemKind.NO_TENSORS, str(error))
    except KitError as error:
        problem = Problem(ProblemKind.UNREADABLE, str(error))
    return Inspection(path, "", 0, 0, 0, 0, {}, (problem,), values_read=False)


def _time(path: Path, cold: bool, methods: Sequence[str] | None, repeats: int, progress: bool) -> LoadTimes:
    if cold and not evictable(path):
        return LoadTimes((), f"No cold figures: the storage of {path} keeps its files in memory.")
    try:
        return time_load(path, methods, cold, repeats, progress=progress)
    except NotColdError as error:  # another process began to use the files meanwhile
        return LoadTimes((), str(error))
