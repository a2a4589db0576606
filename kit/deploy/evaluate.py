"""Evaluation: a merged model, or an adapter on its base, on lm-eval's tasks, as a job (the optional extra `eval`)."""

import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models as model
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.slurm.submit import reach

TASKS = files.REPOSITORY / "env" / "tasks"  # the kit's own, each with its data beside it


def launch(
    path: Path, out: Path, cluster: Cluster, tasks: Sequence[str], data: Mapping[str, str] | None = None, limit: int = 0
) -> Run:
    """Submit a job that leaves out/scores.json, and return at once; `limit`: questions of each task, 0 for all.

    `data` says where a task's data lie: a file of JSON lines, or a folder as the hub has it; the job asks no network,
    and takes others from the hub's cache. Raises InputError, before the queue, for what is not there.
    """
    if not importlib.util.find_spec("lm_eval"):
        raise InputError("lm-eval is not installed: run `pip install 'finetune-kit[eval]'`.")
    reach(cluster)
    out, adapter = Path(out).absolute(), Path(path) / "adapter_config.json"
    base = files.read_json(adapter)["base_model_name_or_path"] if adapter.is_file() else str(path)
    model.check_weights(base, cluster.paths.hf_home)
    arguments = {"pretrained": str(Path(model.source(base, cluster.paths.hf_home)).absolute())}
    arguments |= {"peft": str(adapter.parent.absolute())} if adapter.is_file() else {}
    with files.new_folder(out) as folder:
        specs = _specs(tasks, {p.stem: p for p in TASKS.glob("*.jsonl")} | dict(data or {}), folder)
        files.write_json(folder / "request.json", {"model": arguments, "tasks": specs, "limit": limit or None})
    return slurm.launch_script(_script(cluster, out), cluster, "evaluate")


def _specs(tasks: Sequence[str], data: Mapping[str, str | Path], folder: Path) -> list[str]:
    """lm-eval's name of each task, or a file in the folder where the task has data of its own; all are loaded once."""
    manager, specs = _manager(tasks), list(tasks)
    for number, task in enumerate(tasks):
        if task not in manager.task_index:
            raise InputError(f"lm-eval knows no task {task!r}; `lm-eval ls tasks` lists its own, {TASKS} the kit's.")
        if task in data:
            here, specs[number] = Path(data[task]).absolute(), f"{task}.yaml"
            splits = {"data_files": dict.fromkeys(("train", "validation", "test"), str(here))}
            file = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": splits}
            settings = {"include": str(manager.task_index[task].yaml_path), "dataset_path": str(here), "task": task}
            files.write_json(folder / specs[number], settings | (file if here.is_file() else {}))  # YAML reads JSON
    try:
        manager.load([str(folder / spec) if spec.endswith(".yaml") else spec for spec in specs])
        if "ifeval" in tasks:
            import nltk

            nltk.data.find("tokenizers/punkt_tab")
    except Exception as error:  # datasets, the hub's client, pyarrow and NLTK each have their own
        said = " ".join(str(error).split()).rstrip(".")
        hint = " and fetch NLTK's with `python -m nltk.downloader punkt_tab`" if "ifeval" in tasks else ""
        raise InputError(
            f"The data of {', '.join(tasks)} cannot be loaded: {said}. Say where they lie{hint}."
        ) from None
    return specs


def _manager(tasks: Sequence[str]) -> Any:
    from lm_eval.tasks import TaskManager

    own = all((TASKS / f"{Path(task).stem}.yaml").is_file() for task in tasks)
    return TaskManager(include_path=str(TASKS), include_defaults=not own)  # reading lm-eval's own takes 12 s


def _script(cluster: Cluster, out: Path) -> str:
    asked = jobscript.options(cluster, nodes=1, ntasks=1, cpus_per_task=cluster.nodes.cpus, gres=cluster.slurm.gres)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    offline |= model.hf_environment(cluster.paths.hf_home)
    body = f"{shlex.join(['cd', str(out)])}\nexec {jobscript.python(cluster)} -m kit.deploy.evaluate"
    return jobscript.render(cluster, asked, body, offline)


def scores(out: Path) -> list[dict[str, Any]]:
    """A row a metric; IFEval's are prompt-strict, inst-loose and so on. Raises KitError where no job has ended well."""
    if not (path := Path(out) / "scores.json").exists():
        raise KitError(f"{path} is not there: the job has not ended, or not well; `kit state` says which.")
    found, rows = files.read_json(path), []
    for task, values in found["results"].items():
        count = found["n-samples"].get(task, {}).get("effective")  # a group of tasks has none
        for metric, kind in (key.split(",") for key in values if "," in key and "_stderr," not in key):
            value, error = values[f"{metric},{kind}"], values.get(f"{metric}_stderr,{kind}")
            name, error = re.sub(r"_level_(\w+)_acc", r"-\1", metric), error if isinstance(error, float) else None
            rows.append({"task": task, "metric": name, "value": value, "stderr": error, "questions": count})
    return rows


def main() -> None:
    """The job's side, in its folder: on every GPU of the node together, or on its CPUs."""
    import torch
    from lm_eval import simple_evaluate

    told, gpus = files.read_json(Path("request.json")), torch.cuda.device_count()
    found = simple_evaluate(
        "hf", told["model"] | {"parallelize": gpus > 1, "dtype": "auto" if gpus else "float32"}, told["tasks"],
        task_manager=_manager(told["tasks"]), device="cuda" if gpus else "cpu", batch_size="auto" if gpus else 8,
        apply_chat_template=bool(model.load_tokenizer(told["model"]["pretrained"]).chat_template),
        limit=told["limit"], log_samples=False,
    )  # fmt: skip
    files.write_json(Path("scores.json"), {key: found[key] for key in ("results", "n-samples", "lm_eval_version")})


if __name__ == "__main__":
    main()
