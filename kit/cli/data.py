"""`kit prepare`, `data`, `predict`, `tune`: the data, and what a job will take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kit.cli.base import (
    SETTINGS,
    ClusterName,
    Json,
    Overrides,
    RecipeName,
    emit,
    finish,
    load_cluster,
    load_recipe,
    warn,
)
from kit.show import Answer, Table

app = typer.Typer(**SETTINGS)
data = typer.Typer(help="Convert prepared data, drop near duplicates, train tokenizers.", **SETTINGS)
DATA = "Data and forecast"
app.add_typer(data, name="data", rich_help_panel=DATA)


class Format(StrEnum):
    """File formats of `kit data export`."""

    MEGATRON = "megatron"
    PARQUET = "parquet"


@app.command(rich_help_panel=DATA)
def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder that holds prepared datasets.")] = Path("prepared"),
    workers: Annotated[int, typer.Option(help="Processes; any number writes the same bytes.")] = 1,
    engine: Annotated[str, typer.Option(help="tokenizers, or gigatoken (pip install kit\\[fast]).")] = "tokenizers",
    tasks: Annotated[int, typer.Option(help="Prepare as a Slurm array of this many tasks.")] = 0,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Turn conversations into a packed dataset folder."""
    from kit.data.dataset import prepare as prepare_dataset

    job = load_recipe(recipe, overrides)
    if tasks:
        from kit.slurm.prepare import submit

        runs = submit(job, load_cluster(cluster), out, tasks, engine)  # type: ignore[arg-type]
        lines = [f"{run.path}  job {run.job_id}" for run in runs]
        emit(Answer({"runs": [str(run.path) for run in runs]}, *lines), as_json)
        return
    dataset = prepare_dataset(job, out, warn, engine, workers)  # type: ignore[arg-type]
    value = dataset.as_dict(job)
    lines = [str(dataset.path), *(f"{name}: {split}" for name, split in value["splits"].items())]
    lines += [f"ledger: {value['ledger']}", f"dropped rows: {value['dropped_rows']}"]
    emit(Answer(value, *lines, f"{value['optimizer_steps']} optimizer steps"), as_json)


@data.command("export")
def data_export(folder: Path, out: Path, format: Annotated[Format, typer.Option()]) -> None:
    """Write a prepared folder as Megatron .bin/.idx (no loss mask) or as parquet."""
    from kit.data.dataset import Dataset
    from kit.data.export import to_megatron, to_parquet

    write = to_megatron if format == Format.MEGATRON else to_parquet
    print(write(Dataset(folder), out))


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="File, folder or hub id.")]
Language = Annotated[str, typer.Option("--lang", help="Only rows of this language.")]


@data.command("shards")
def data_shards(source: Source, out: Path, lang: Language = "") -> None:
    """Write raw documents as WebDataset tar files."""
    from kit.data.export import to_webdataset
    from kit.data.sources import open_source

    print(to_webdataset(open_source(source), out, lang=lang))


@data.command("dedup")
def data_dedup(source: Source, out: Path, lang: Language = "", as_json: Json = False) -> None:
    """Leave out near duplicates by MinHash (pip install kit\\[dedup])."""
    from kit.data.dedup import deduplicate
    from kit.data.sources import open_source

    found = deduplicate(open_source(source), out, lang)
    emit(Answer(found, Table(("documents", "count"), list(found.items()))), as_json)


@app.command(rich_help_panel=DATA)
def predict(
    recipe: RecipeName, overrides: Overrides = None, cluster: ClusterName = "local", as_json: Json = False
) -> None:
    """Forecast memory, time and storage; exit 1 where the job does not fit."""
    from kit.forecast.predict import predict as forecast

    found = forecast(load_recipe(recipe, overrides), load_cluster(cluster))
    emit(found, as_json)
    finish(found.memory.verdict == "does not fit")


@app.command(rich_help_panel=DATA)
def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    nodes: Annotated[bool, typer.Option("--nodes", help="Also try other numbers of nodes.")] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest settings that fit and keep the batch; exit 1 where none is sure to fit."""
    from kit.forecast.tune import tune as find_settings

    found = find_settings(load_recipe(recipe, overrides), load_cluster(cluster), nodes)
    emit(found, as_json)
    finish(not found.choices)
