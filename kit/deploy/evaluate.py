"""Evaluate a merged model, or an adapter on its base, on lm-eval's tasks, as a job (the optional extra `eval`)."""

import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError
from kit.show import Part, Result, Table
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.slurm.submit import reach

TASKS = files.REPOSITORY / "env" / "tasks"  # the kit's tasks, each with its data in a file of the same name


@dataclass(frozen=True)
class Score:
    """One metric of one task; `stderr` and `questions` are None where lm-eval gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int | None


@dataclass(frozen=True)
class Scores(Result):
    """The scores of an evaluation."""

    scores: tuple[Score, ...]

    def parts(self) -> Iterable[Part]:
        """A row for each metric."""
        rows = [
            (s.task, s.metric, f"{s.value:.2%}", "" if s.stderr is None else f"{s.stderr:.2%}", s.questions)
            for s in self.scores
        ]
        yield Table(("task", "metric", "score", "standard error", "questions"), rows)


def launch(
    path: Path, out: Path, cluster: Cluster, tasks: Sequence[str], data: Mapping[str, str] | None = None, limit: int = 0
) -> Run:
    """Submit a job that leaves out/scores.json, and return at once; `limit`: questions of each task, 0 for all.

    `data` gives the place of a task's data: a file of JSON lines, or a folder as the hub has it. The job uses no
    network; other data must be in the hub's cache. Raises InputError, before the job is submitted, for a model, task
    or data that cannot be found.
    """
    if not importlib.util.find_spec("lm_eval"):
        raise InputError("lm-eval is not installed: run `pip install 'finetune-kit[eval]'`.")
    reach(cluster)
    out, adapter_config = Path(out).absolute(), Path(path) / "adapter_config.json"
    is_adapter = adapter_config.is_file()
    base = files.read_json(adapter_config)["base_model_name_or_path"] if is_adapter else str(path)
    models.check_weights(base, cluster.paths.hf_home)
    arguments = {"pretrained": str(Path(models.source(base, cluster.paths.hf_home)).absolute())}
    if is_adapter:
        arguments["peft"] = str(adapter_config.parent.absolute())
    with files.new_folder(out) as folder:
        ours = {file.stem: str(file) for file in TASKS.glob("*.jsonl")}
        specs = _task_specs(tasks, ours | dict(data or {}), folder)
        files.write_json(folder / "request.json", {"model": arguments, "tasks": specs, "limit": limit or None})
    return slurm.launch_script(_script(cluster, out), cluster, "evaluate")


def _task_specs(tasks: Sequence[str], data: Mapping[str, str], folder: Path) -> list[str]:
    """For each task lm-eval's name, or a file in the folder that points to the given data. Raises InputError."""
    manager, specs = _manager(tasks), []
    for task in tasks:
        if task not in manager.task_index:
            raise InputError(
                f"lm-eval knows no task {task!r}; `lm-eval ls tasks` lists its tasks, those of the kit are in {TASKS}."
            )
        if task not in data:
            specs.append(task)
            continue
        specs.append(f"{task}.yaml")
        settings = _data_settings(manager.task_index[task].yaml_path, task, Path(data[task]).absolute())
        files.write_json(folder / f"{task}.yaml", settings)  # JSON is YAML too
    _check_data(manager, tasks, [str(folder / spec) if spec.endswith(".yaml") else spec for spec in specs])
    return specs


def _data_settings(task_file: Path, task: str, data: Path) -> dict[str, Any]:
    """A task of lm-eval with other data: a file of JSON lines, or a dataset folder."""
    settings: dict[str, Any] = {"include": str(task_file), "dataset_path": str(data), "task": task}
    if not data.is_file():
        return settings
    splits = {"data_files": dict.fromkeys(("train", "validation", "test"), str(data))}
    return settings | {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": splits}


def _check_data(manager: Any, tasks: Sequence[str], specs: list[str]) -> None:
    """Load all data once. Raises InputError where that fails, before a job is queued for it."""
    uses_nltk = "ifeval" in tasks
    try:
        manager.load(specs)
        if uses_nltk:
            import nltk

            nltk.data.find("tokenizers/punkt_tab")
    except Exception as error:  # datasets, the hub's client, pyarrow and NLTK each raise their own types
        reason = " ".join(str(error).split()).rstrip(".")
        fetch = " and fetch NLTK's with `python -m nltk.downloader punkt_tab`" if uses_nltk else ""
        raise InputError(
            f"The data of {', '.join(tasks)} cannot be loaded: {reason}. Give their place with --data{fetch}."
        ) from None


def _manager(tasks: Sequence[str]) -> Any:
    from lm_eval.tasks import TaskManager

    only_ours = all((TASKS / f"{Path(task).stem}.yaml").is_file() for task in tasks)
    return TaskManager(include_path=str(TASKS), include_defaults=not only_ours)  # reading lm-eval's takes 12 s


def _script(cluster: Cluster, out: Path) -> str:
    asked = jobscript.options(cluster, nodes=1, ntasks=1, cpus_per_task=cluster.nodes.cpus, gres=cluster.slurm.gres)
    variables = dict(jobscript.NOTHING_LEAVES) | models.hf_environment(cluster.paths.hf_home)
    body = f"{shlex.join(['cd', str(out)])}\nexec {jobscript.python(cluster)} -m kit.deploy.evaluate"
    return jobscript.render(cluster, asked, body, variables)


def scores(out: Path) -> Scores:
    """The scores of a job that has ended; IFEval's metrics are prompt-strict, inst-loose and so on.

    Raises KitError where there are none.
    """
    path = Path(out) / "scores.json"
    if not path.exists():
        raise KitError(f"{path} does not exist: the job has not ended, or it failed; `kit state` says which.")
    found = files.read_json(path)
    return Scores(
        tuple(
            score
            for task, values in found["results"].items()
            for score in _task_scores(task, values, found["n-samples"].get(task, {}).get("effective"))
        ),
    )


def _task_scores(task: str, values: Mapping[str, Any], questions: int | None) -> Iterable[Score]:
    """lm-eval's keys are "metric,filter" and "metric_stderr,filter"; the error of a list is the text "N/A"."""
    for key, value in values.items():
        if "," not in key or "_stderr," in key:
            continue
        metric, kind = key.split(",")
        error = values.get(f"{metric}_stderr,{kind}")
        name = re.sub(r"_level_(\w+)_acc", r"-\1", metric)
        yield Score(task, name, value, error if isinstance(error, float) else None, questions)


def main() -> None:
    """The job's side, in its folder: on every GPU of the node together, or on its CPUs."""
    import torch
    from lm_eval import simple_evaluate

    request, gpus = files.read_json(Path("request.json")), torch.cuda.device_count()
    tokenizer = models.load_tokenizer(request["model"]["pretrained"])
    found = simple_evaluate(
        "hf",
        request["model"] | {"parallelize": gpus > 1, "dtype": "auto" if gpus else "float32"},
        request["tasks"],
        task_manager=_manager(request["tasks"]),
        device="cuda" if gpus else "cpu",
        batch_size="auto" if gpus else 8,
        apply_chat_template=bool(tokenizer.chat_template),
        limit=request["limit"],
        log_samples=False,
    )
    files.write_json(Path("scores.json"), {key: found[key] for key in ("results", "n-samples", "lm_eval_version")})


if __name__ == "__main__":
    main()
