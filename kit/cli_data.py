"""`kit prepare`, `data`, `predict`, `tune`, `calibrate`: data, and what a job will take."""

import argparse
import dataclasses
from pathlib import Path

from kit.command import Commands, add, group, recipe_of, say, show
from kit.config.cluster import Cluster


def register(commands: Commands) -> None:
    """These commands' parsers."""
    one = add(commands, "prepare", prepare, "conversations to a packed dataset folder", "recipe", "json")
    one.add_argument("--out", default="prepared", help="folder that holds prepared datasets")
    one.add_argument("--workers", type=int, default=1, help="processes; the bytes written are the same for any number")
    one.add_argument("--engine", default="tokenizers", help="tokenizers, or gigatoken (pip install kit[fast])")
    one.add_argument("--tasks", type=int, default=0, metavar="N", help="as a Slurm array of N tasks; returns at once")
    one.add_argument("--cluster", default="local", help="with --tasks: cluster profile or the name of a shipped one")
    data = group(commands, "data", "prepared data in other formats; documents without their near copies")
    one = add(data, "export", data_export, "a prepared folder as Megatron .bin/.idx (no loss mask) or parquet")
    one.add_argument("folder")
    one.add_argument("out")
    one.add_argument("--format", choices=("megatron", "parquet"), required=True)
    shards = add(data, "shards", data_shards, "raw documents as WebDataset tar files")
    dedup = add(data, "dedup", data_dedup, "leave out near copies by MinHash (pip install kit[dedup])", "json")
    for one in (shards, dedup):
        one.add_argument("source", help="file, folder or hub id")
        one.add_argument("out")
        one.add_argument("--lang", default="", help="only rows of this language")
    add(commands, "predict", predict, "does it fit, how long will it take", "recipe", "cluster", "json")
    one = add(commands, "tune", tune, "the fastest settings that fit and keep the batch", "recipe", "cluster", "json")
    one.add_argument("--nodes", action="store_true", help="also other numbers of nodes")
    add(commands, "calibrate", calibrate, "forecast beside what a finished run took, and what that says", "run", "json")


def prepare(options: argparse.Namespace) -> int:
    """`kit prepare`."""
    from kit.data.dataset import prepare as prepare_dataset

    recipe = recipe_of(options)
    if options.tasks:
        from kit.slurm.prepare import submit

        made = submit(recipe, Cluster.load(options.cluster), Path(options.out), options.tasks, options.engine)
        show(options, {"runs": [str(run.path) for run in made]}, [f"{run.path}  job {run.job_id}" for run in made])
        return 0
    dataset = prepare_dataset(recipe, Path(options.out), say, options.engine, options.workers)
    value = dataset.as_dict(recipe)
    lines = [f"{dataset.path}"] + [f"{k}: {v}" for k, v in value["splits"].items()]
    lines += [f"ledger: {value['ledger']}", f"dropped rows: {value['dropped_rows']}"]
    show(options, value, [*lines, f"{value['optimizer_steps']} optimizer steps"])
    return 0


def data_export(options: argparse.Namespace) -> int:
    """`kit data export`."""
    from kit.data.dataset import Dataset
    from kit.data.export import to_megatron, to_parquet

    write = to_megatron if options.format == "megatron" else to_parquet
    print(write(Dataset(Path(options.folder)), Path(options.out)))
    return 0


def data_shards(options: argparse.Namespace) -> int:
    """`kit data shards`."""
    from kit.data.export import to_webdataset
    from kit.data.sources import open_source

    print(to_webdataset(open_source(options.source), Path(options.out), lang=options.lang))
    return 0


def data_dedup(options: argparse.Namespace) -> int:
    """`kit data dedup`."""
    from kit.data.dedup import deduplicate
    from kit.data.sources import open_source

    found = deduplicate(open_source(options.source), Path(options.out), options.lang)
    show(options, found, [f"{k}: {v:,}" for k, v in found.items()])
    return 0


def predict(options: argparse.Namespace) -> int:
    """`kit predict`: exit 1 where it does not fit."""
    from kit.data.dataset import find_prepared
    from kit.forecast.timing import predict as forecast

    recipe = recipe_of(options)
    prepared = find_prepared(recipe)
    found = forecast(recipe, Cluster.load(options.cluster), prepared.manifest if prepared else None)
    show(options, found.as_dict(), [str(found)])
    return int(found.as_dict()["memory"]["verdict"] == "does not fit")


def tune(options: argparse.Namespace) -> int:
    """`kit tune`: exit 1 where nothing fits."""
    from kit.forecast.tune import tune as settings_that_fit

    found = settings_that_fit(recipe_of(options), Cluster.load(options.cluster), options.nodes)
    show(options, found.as_dict(), [str(found)])
    return int(not found)


def calibrate(options: argparse.Namespace) -> int:
    """`kit calibrate`."""
    from kit.notebook.calibrate import calibrate_run
    from kit.slurm.run import Run

    found = calibrate_run(Run.attach(options.run))
    rows = [
        f"{key:14} forecast {was if was is None else f'{was:.4g}'}, was {now:.4g}"
        for key, (was, now) in found.rows.items()
    ]
    show(options, dataclasses.asdict(found), [*rows, found.says])
    return 0
