"""`kit recipes` and `kit clusters`: what can be given by name, of ./env and of the kit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.config import schema
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.show import Answer, Table


def recipes() -> Answer:
    """Every recipe that has a name: its model, method and size, and what its file says of it."""
    rows = []
    for name in schema.names("recipes"):
        recipe, path = Recipe.load(name), schema.find(name, "recipes")
        parallel = recipe.parallel
        size = f"{parallel.nodes} x {parallel.gpus_per_node}"
        rows.append((name, recipe.model.name, recipe.tuning.method, size, recipe.data.source, _first_comment(path)))
    return _answer("recipes", ("recipe", "model", "method", "nodes x GPUs", "data", "about"), rows)


def clusters() -> Answer:
    """Every cluster profile that has a name: its nodes and GPUs, and what its file says of it."""
    rows = []
    for name in schema.names("clusters"):
        nodes, path = Cluster.load(name).nodes, schema.find(name, "clusters")
        gpus = f"{nodes.gpus} x {nodes.gpu}" if nodes.gpus else "none"
        rows.append((name, nodes.count, gpus, nodes.gpu_memory_gib or None, _first_comment(path)))
    return _answer("clusters", ("cluster", "nodes", "GPUs of each", "GiB of a GPU", "about"), rows)


def _answer(kind: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Answer:
    return Answer({kind: [dict(zip(columns, row, strict=True)) for row in rows]}, Table(columns, rows))


def _first_comment(path: Path) -> str:
    """The first sentence of the comment at the top of a TOML file."""
    comments = (line.removeprefix("#").strip() for line in _top_lines(path))
    return " ".join(comments).split(". ")[0].rstrip(".")


def _top_lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("#:schema"):
            yield line
