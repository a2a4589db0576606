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
    example,
    finish,
    load_cluster,
    load_recipe,
)

app = typer.Typer(**SETTINGS)
data = typer.Typer(help="Convert prepared data, drop near duplicates, train tokenizers.", **SETTINGS)
DATA = "Data and forecast"
app.add_typer(data, name="data", rich_help_panel=DATA)


class Engine(StrEnum):
    """Tokenizer engines of `kit prepare`."""

    AUTO = "auto"
    TOKENIZERS = "tokenizers"
    GIGATOKEN = "gigatoken"


class Format(StrEnum):
    """File formats of `kit data export`."""

    MEGATRON = "megatron"
    PARQUET = "parquet"


@app.command(rich_help_panel=DATA, epilog=example("kit prepare recipe.toml --workers 8"))
def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder that holds prepared datasets.")] = Path("prepared"),
    workers: Annotated[int, typer.Option(help="Processes; any number writes the same bytes.")] = 1,
    engine: Annotated[
        Engine, typer.Option(help="auto: gigatoken (pip install kit\\[fast]) where it gives the same ids.")
    ] = Engine.AUTO,
    tasks: Annotated[int, typer.Option(help="Prepare as a Slurm array of this many tasks.")] = 0,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Turn conversations into a packed dataset folder."""
    from kit.data.dataset import prepare as prepare_dataset

    job, machines = load_recipe(recipe, overrides), load_cluster(cluster)
    if tasks:
        from kit.slurm.prepare import submit

        emit(submit(job, machines, out, tasks, engine.value), as_json)
        return
    emit(prepare_dataset(job, out, engine.value, workers, cluster=machines), as_json)


@data.command("export")
def data_export(folder: Path, out: Path, format: Annotated[Format, typer.Option()], as_json: Json = False) -> None:
    """Write a prepared folder as Megatron .bin/.idx (no loss mask) or as parquet."""
    from kit.data.dataset import Dataset
    from kit.data.export import to_megatron, to_parquet

    write = to_megatron if format == Format.MEGATRON else to_parquet
    emit(write(Dataset(folder), out), as_json)


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="File, folder or hub id.")]
Language = Annotated[str, typer.Option("--lang", help="Only rows of this language.")]


@data.command("shards")
def data_shards(source: Source, out: Path, lang: Language = "", as_json: Json = False) -> None:
    """Write raw documents as WebDataset tar files."""
    from kit.data.export import to_webdataset
    from kit.data.sources import open_source

    emit(to_webdataset(open_source(source), out, lang=lang), as_json)


@data.command("dedup")
def data_dedup(source: Source, out: Path, lang: Language = "", as_json: Json = False) -> None:
    """Leave out near duplicates by MinHash (pip install kit\\[dedup])."""
    from kit.data.dedup import deduplicate
    from kit.data.sources import open_source

    emit(deduplicate(open_source(source), out, lang), as_json)


@data.command("tokenizer")
def data_tokenizer(
    source: Source,
    out: Path,
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens, control tokens included.")] = 32_000,
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on the texts of a source."""
    from kit.data.tokenizer import train_tokenizer

    emit(train_tokenizer(source, out, vocab_size), as_json)


@app.command(rich_help_panel=DATA)
def recipes(as_json: Json = False) -> None:
    """List the recipes that can be given by name."""
    from kit.config.shipped import recipes as all_recipes

    emit(all_recipes(), as_json)


@app.command(
    rich_help_panel=DATA, epilog=example("kit predict recipe.toml --cluster cluster.toml -s data.seq_len=4096")
)
def predict(
    recipe: RecipeName, overrides: Overrides = None, cluster: ClusterName = "local", as_json: Json = False
) -> None:
    """Forecast memory, time and storage; exit 1 where the job does not fit."""
    from kit.forecast.predict import predict as forecast

    found = forecast(load_recipe(recipe, overrides), load_cluster(cluster))
    emit(found, as_json)
    finish(found.memory.verdict == "does not fit")


@app.command(rich_help_panel=DATA, epilog=example("kit tune recipe.toml --cluster cluster.toml --nodes"))
def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    nodes: Annotated[bool, typer.Option("--nodes", help="Also try other numbers of nodes.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run the fastest for a few steps in a short job.")] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest settings that fit and keep the batch; exit 1 where none is sure to fit."""
    from kit.notebook.tuning import tune as find_settings

    found = find_settings(load_recipe(recipe, overrides), load_cluster(cluster), nodes, measure)
    emit(found, as_json)
    finish(not found.choices)
