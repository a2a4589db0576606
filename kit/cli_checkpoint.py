"""`kit checkpoint`, `adapter`, `evaluate`: what a run leaves."""

import argparse
import dataclasses
from pathlib import Path

from kit.command import Commands, add, group, pairs, recipe_of, show
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError


def register(commands: Commands) -> None:
    """These commands' parsers."""
    checkpoint = group(commands, "checkpoint", "look at checkpoints, time them, plan them")
    one = add(checkpoint, "inspect", inspect, "format, tensors, bytes, and what is wrong", "json")
    one.add_argument("path")
    one.add_argument("--values", action="store_true", help="read every tensor and look for NaN and infinity")
    one = add(checkpoint, "time", time_load, "how long loading takes, with proof of cold or warm", "json")
    one.add_argument("path", nargs="+", help="several are timed in turns, such as one model on each mount")
    one.add_argument("--cold", action="store_true", help="evict first, and fail where that cannot be proven")
    one.add_argument("--ranks", type=_numbers, default=[1], metavar="N,M", help="load on so many ranks")
    one.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    _samples(one)
    one = add(checkpoint, "save", time_save, "how long saving blocks, and until it is on disk", "json")
    one.add_argument("where", help="a run, whose size and ranks are taken, or a folder on the storage in question")
    one.add_argument("--gb", type=float, default=0, help="size of the state; for a folder 1 if not given")
    one.add_argument("--ranks", type=_numbers, default=[], metavar="N,M", help="save from so many ranks")
    _samples(one)
    one = add(checkpoint, "plan", plan, "how often to save, and the storage that takes", "recipe", "cluster", "json")
    one.epilog = "In the place of the recipe a run folder: its recipe, its cluster, and what its saves took."
    adapter = group(commands, "adapter", "the adapter out of shards, into the base, onto a hub")
    one = add(adapter, "export", export, "adapter_model.safetensors from a checkpoint or run")
    one.add_argument("checkpoint")
    one.add_argument("out")
    one.add_argument("--name", default="", help="which adapter, where the checkpoint holds several")
    one = add(adapter, "merge", merge, "base + adapter, shard by shard")
    for name in ("adapter", "base", "out"):
        one.add_argument(name)
    one.add_argument("--shard-gb", type=float, default=5.0, help="the size of a file, in GB (default 5)")
    one = add(adapter, "push", push, "upload an adapter folder to a hub repository")
    one.add_argument("adapter")
    one.add_argument("repo")
    one = add(
        commands, "evaluate", evaluate, "a merged model or an adapter on lm-eval's tasks, as a job", "cluster", "json"
    )
    one.add_argument("model", help="model folder, adapter folder or hub id")
    one.add_argument("out", help="new folder, for scores.json")
    one.add_argument("--tasks", default="facts", help="lm-eval's, with commas between; facts is the kit's own")
    one.add_argument("--data", action="append", default=[], metavar="TASK=PATH", help="where a task's data lie")
    one.add_argument("--limit", type=int, default=0, help="questions of each task (default: all)")
    one.add_argument("--wait", action="store_true", help="stay until it ends, and print the scores")


def _samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", action="append", metavar="NAME", help="this one only; may be given several times")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each, in fresh processes")


def _numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError  # argparse says what is wrong
    return found


def inspect(options: argparse.Namespace) -> int:
    """`kit checkpoint inspect`: exit 1 where something is wrong."""
    from kit.checkpoints.inspect import inspect as look

    value = look(Path(options.path), options.values).as_dict()
    show(options, value, [f"{k}: {v}" for k, v in value.items()])
    return int(bool(value["problems"]))


def time_load(options: argparse.Namespace) -> int:
    """`kit checkpoint time`."""
    from kit.checkpoints.timing import separable
    from kit.checkpoints.timing import time_load as measure

    paths = [Path(path) for path in options.path]
    found = measure(paths, options.method, options.cold, options.repeats, options.ranks, options.device)
    lines = [f"{m.path}, {m.mount}: {m}" for m in found]
    verdict = separable(found)
    show(options, {"methods": [m.as_dict() for m in found], "separable": verdict}, [*lines, *verdict])
    return 0


def time_save(options: argparse.Namespace) -> int:
    """`kit checkpoint save`."""
    from kit.checkpoints.plan import save_blocks
    from kit.checkpoints.saving import time_save as measure
    from kit.forecast.timing import predict
    from kit.slurm.run import Run

    folder, gb, ranks, blocks = Path(options.where), options.gb or 1.0, options.ranks or [1], {}
    if not folder.is_dir() or (folder / "run.json").exists():
        run = Run.attach(options.where)
        folder, ranks, blocks = run.path / "checkpoints", options.ranks or [run.recipe.world_size], save_blocks(run)
        gb = options.gb or predict(run.recipe, run.cluster).storage.checkpoint_gb
    found = [t for n in ranks for t in measure(folder, gb, n, options.method, options.repeats)]
    lines = [f"in the run, checkpoint-{step} blocked training for {s:.2f} s" for step, s in blocks.items()]
    show(options, {"methods": [t.as_dict() for t in found], "run_blocked_s": blocks}, [*map(str, found), *lines])
    return 0


def plan(options: argparse.Namespace) -> int:
    """`kit checkpoint plan`."""
    from kit.checkpoints.plan import plan_for, plan_for_run
    from kit.slurm.run import Run

    try:
        recipe = recipe_of(options)
    except InputError as no_recipe:
        if options.set or Path(options.recipe).is_file():
            raise
        try:
            found = plan_for_run(Run.attach(options.recipe))
        except InputError as no_run:
            raise InputError(f"{no_recipe} {no_run}") from None
    else:
        found = plan_for(recipe, Cluster.load(options.cluster))
    show(options, dataclasses.asdict(found), found.lines())
    return 0


def export(options: argparse.Namespace) -> int:
    """`kit adapter export`."""
    from kit.deploy.adapter import export as export_adapter
    from kit.slurm.run import Run

    here = Path(options.checkpoint)
    here = here if here.exists() else Run.attach(options.checkpoint).path
    print(export_adapter(here, Path(options.out), options.name))
    return 0


def merge(options: argparse.Namespace) -> int:
    """`kit adapter merge`."""
    from kit.deploy.adapter import merge as merge_adapter

    print(merge_adapter(Path(options.adapter), options.base, Path(options.out), options.shard_gb))
    return 0


def push(options: argparse.Namespace) -> int:
    """`kit adapter push`."""
    from kit.deploy.adapter import push as push_adapter

    print(push_adapter(Path(options.adapter), options.repo))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """`kit evaluate`: with --wait, exit 1 where the job fails."""
    from kit.deploy.evaluate import launch, scores
    from kit.slurm import launch as slurm

    cluster, out = Cluster.load(options.cluster), Path(options.out)
    run = launch(Path(options.model), out, cluster, options.tasks.split(","), pairs(options.data), options.limit)
    value = {"run": str(run.path), "job_id": run.job_id, "out": str(out)}
    if not options.wait:
        show(options, value, [f"{run.path}", f"job {run.job_id}; its scores come into {out}"])
        return 0
    end = slurm.wait(run)
    if end.state != "COMPLETED":
        raise KitError(f"The evaluation is {end.state}: {end.cause or 'no cause is known'}; see {run.log}.")
    rows = scores(out)
    lines = [f"{r['task']:16} {r['metric']:16} {r['value']:8.2%} of {r['questions']}" for r in rows]
    show(options, value | {"scores": rows}, lines)
    return 0
