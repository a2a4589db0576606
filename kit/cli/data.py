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


class TokenizerKind(StrEnum):
    """Models of `kit data tokenizer`."""

    BPE = "bpe"
    UNIGRAM = "unigram"


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
    engine: Annotated[
        Engine, typer.Option(help="auto: gigatoken (pip install kit\\[fast]) where it gives the same ids.")
    ] = Engine.AUTO,
    tasks: Annotated[int, typer.Option(help="Prepare as a Slurm array of this many tasks.")] = 0,
    cluster: ClusterName = "local",
    as_json: Json = False,
) -> None:
    """Turn conversations into a packed dataset folder."""
    from kit.data.dataset import prepare as prepare_dataset

    job = load_recipe(recipe, overrides)
    if tasks:
        from kit.slurm.prepare import submit

        emit(submit(job, load_cluster(cluster), out, tasks, engine.value), as_json)
        return
    emit(prepare_dataset(job, out, engine.value, workers), as_json)


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
    kind: Annotated[TokenizerKind, typer.Option(help="Bytes, or SentencePiece's model.")] = TokenizerKind.BPE,
    as_json: Json = False,
) -> None:
    """Train a tokenizer on the texts of a source."""
    from kit.data.tokenizer import train_tokenizer

    emit(train_tokenizer(source, out, vocab_size, kind.value), as_json)


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
