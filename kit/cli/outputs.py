"""`kit checkpoint`, `adapter`, `evaluate`: what a run leaves."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kit.cli.base import (
    SETTINGS,
    ClusterName,
    Json,
    Methods,
    Overrides,
    Ranks,
    Repeats,
    emit,
    find_run,
    finish,
    load_cluster,
    load_recipe,
    numbers,
    pairs,
)
from kit.errors import InputError, KitError
from kit.show import Answer

app = typer.Typer(**SETTINGS)
checkpoint = typer.Typer(help="Inspect checkpoints, time loading and saving, plan how often to save.", **SETTINGS)
adapter = typer.Typer(help="Export an adapter from shards, merge it into its base, push it to a hub.", **SETTINGS)
OUTPUT = "Checkpoints and models"
app.add_typer(checkpoint, name="checkpoint", rich_help_panel=OUTPUT)
app.add_typer(adapter, name="adapter", rich_help_panel=OUTPUT)


class Device(StrEnum):
    """Where `kit checkpoint time` loads to."""

    CPU = "cpu"
    CUDA = "cuda"


@checkpoint.command("inspect")
def checkpoint_inspect(
    path: Path,
    values: Annotated[bool, typer.Option("--values", help="Read every tensor and look for NaN and infinity.")] = False,
    as_json: Json = False,
) -> None:
    """Show format, tensors, bytes and problems; exit 1 where there are any."""
    from kit.checkpoints.inspect import inspect

    found = inspect(path, values)
    emit(found, as_json)
    finish(bool(found.problems))


@checkpoint.command("time")
def checkpoint_time(
    path: Annotated[list[Path], typer.Argument(help="Several are timed in turns, such as one model on each mount.")],
    method: Methods = None,
    cold: Annotated[bool, typer.Option("--cold", help="Evict first; fail where that cannot be proven.")] = False,
    repeats: Repeats = 3,
    ranks: Ranks = "1",
    device: Device = Device.CPU,
    as_json: Json = False,
) -> None:
    """Time loading, with proof that the files were cold or warm."""
    from kit.checkpoints.timing import time_load

    emit(time_load(path, method, cold, repeats, numbers(ranks), device.value, progress=True), as_json)


@checkpoint.command("save")
def checkpoint_save(
    where: Annotated[str, typer.Argument(help="A run, whose size and ranks are used, or a folder on the storage.")],
    gb: Annotated[float, typer.Option(help="Size of the state (default: the run's, or 1).")] = 0.0,
    method: Methods = None,
    repeats: Repeats = 3,
    ranks: Ranks = "",
    as_json: Json = False,
) -> None:
    """Time saving: how long training is blocked, and until the files are on disk."""
    from kit.checkpoints.saving import time_run_saves, time_saves

    folder = Path(where)
    if folder.is_dir() and not (folder / "run.json").exists():
        found = time_saves(folder, gb or 1.0, numbers(ranks) or [1], method, repeats, progress=True)
    else:
        found = time_run_saves(find_run(where), gb, numbers(ranks), method, repeats, progress=True)
    emit(found, as_json)


@checkpoint.command("plan")
def checkpoint_plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="With a run, its measured save times are used.")],
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Plan how often to save, and the storage that this takes."""
    from kit.checkpoints.plan import plan_for_recipe, plan_for_run

    try:
        job = load_recipe(recipe, overrides)
    except InputError as no_recipe:
        if overrides or Path(recipe).is_file():
            raise
        try:
            found = plan_for_run(find_run(recipe))
        except InputError as no_run:
            raise InputError(f"{no_recipe} {no_run}") from None
    else:
        found = plan_for_recipe(job, load_cluster(cluster))
    emit(found, as_json)


@checkpoint.command("export")
def checkpoint_export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT|RUN")],
    out: Path,
    dtype: Annotated[str, typer.Option(help="Type of the weights; default: the recipe's model.dtype.")] = "",
    as_json: Json = False,
) -> None:
    """Write a full fine-tune as a model folder that transformers loads."""
    from kit.deploy.model import export_model

    here = Path(checkpoint)
    emit(export_model(here if here.exists() else find_run(checkpoint).path, out, dtype, progress=True), as_json)


@adapter.command("export")
def adapter_export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT|RUN")],
    out: Path,
    name: Annotated[str, typer.Option(help="Which adapter, where the checkpoint has several.")] = "",
    as_json: Json = False,
) -> None:
    """Write adapter_model.safetensors from the shards of a checkpoint or run."""
    from kit.deploy.adapter import export

    here = Path(checkpoint)
    emit(export(here if here.exists() else find_run(checkpoint).path, out, name, progress=True), as_json)


@adapter.command("merge")
def adapter_merge(
    adapter: Path,
    base: str,
    out: Path,
    shard_gb: Annotated[float, typer.Option(help="Size of a file, GB.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Add an adapter to its base, shard by shard."""
    from kit.deploy.merge import merge

    emit(merge(adapter, base, out, shard_gb, progress=True), as_json)


@adapter.command("push")
def adapter_push(adapter: Path, repo: str, as_json: Json = False) -> None:
    """Upload an adapter folder to a hub repository."""
    from kit.deploy.adapter import push

    emit(push(adapter, repo), as_json)


@app.command(rich_help_panel=OUTPUT)
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model folder, adapter folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="New folder, for scores.json.")],
    tasks: Annotated[str, typer.Option(help="lm-eval's tasks with commas between; facts is the kit's own.")] = "facts",
    data: Annotated[list[str] | None, typer.Option(metavar="TASK=PATH", help="Where a task's data are.")] = None,
    limit: Annotated[int, typer.Option(help="Questions of each task (0: all).")] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it ends, and print the scores.")] = False,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Evaluate a merged model or an adapter with lm-eval (pip install kit\\[eval]), as a job."""
    from kit.deploy.evaluate import launch, scores

    run = launch(model, out, load_cluster(cluster), tasks.split(","), pairs(data), limit)
    value = {"run": str(run.path), "job_id": run.job_id, "out": str(out)}
    if not wait:
        emit(Answer(value, str(run.path), f"job {run.job_id}; its scores will be in {out}"), as_json)
        return
    end = run.wait()
    if end.state != "COMPLETED":
        raise KitError(f"The evaluation is {end.state}: {end.cause or 'no cause is known'}; see {run.log}.")
    found = scores(out)
    emit(Answer(value | found.as_dict(), *found.parts()), as_json)


@app.command(rich_help_panel=OUTPUT)
def serve(
    model: Annotated[str, typer.Argument(help="Model folder or hub id, or an adapter's folder.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder, to serve on this model.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for key, address and proof (default: served-<time>).")
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm or transformers (default: what is installed).")] = "",
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has vLLM.")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the node that share the model.")] = 1,
    port: Annotated[int, typer.Option(help="Port on the node's loopback (0: any free one).")] = 0,
    option: Annotated[
        list[str] | None, typer.Option(help="A word for the server's own command, as --option=--dtype=float16.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the proof is there, and print it.")] = False,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Serve a model as a job, and prove that what is served is what was trained."""
    from kit.deploy import serve as serving
    from kit.deploy.servers import Engine

    if engine and engine not in list(Engine):
        raise InputError(f"No server {engine!r}: it is one of {', '.join(Engine)}.")
    folder = out or Path(time.strftime("served-%Y%m%d-%H%M%S"))
    chosen = Engine(engine) if engine else None
    run = serving.launch(model, folder, load_cluster(cluster), adapter, chosen, python, gpus, port, option or [])
    value = {"run": str(run.path), "job_id": run.job_id, "out": str(folder)}
    if wait:
        served = serving.wait(run, folder)
        emit(Answer(value | served.as_dict(), *served.parts()), as_json)
        return
    lines = f"job {run.job_id}; the proof will be in {folder / serving.PROOF}", f"kit cancel {run.path.name} ends it"
    emit(Answer(value, str(run.path), *lines), as_json)
