"""Settings of a sweep: the grid file, and how a setting is written in a line."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.schema import read_toml
from kit.errors import InputError

Setting = Mapping[str, Any]  # values by parameter name, or by dotted key of a recipe
LIMIT = 10_000  # settings of a sweep; Slurm's own limit, MaxArraySize, is 1001 unless the site has raised it


def read_grid(path: Path) -> list[dict[str, Any]]:
    """The settings in a TOML file. Raises InputError.

    Lists span a product, and other values hold for every setting. Each table [[points]] is a setting too; with lists
    it is combined with every element of the product. Tables become dotted keys.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such grid.")
    tables = read_toml(path)
    points = tables.pop("points", [{}])
    if not (isinstance(points, list) and all(isinstance(point, dict) for point in points)):
        raise InputError(f"{path}: points must be tables, each under a line [[points]].")
    axes = {key: value if isinstance(value, list) else [value] for key, value in dotted(tables).items()}
    count = len(points) * math.prod(len(values) for values in axes.values())
    if not 0 < count <= LIMIT:
        raise InputError(f"{path} has {count} settings; a sweep has 1 to {LIMIT}.")
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [setting | dotted(point) for point in points for setting in product]


def dotted(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in dotted(value).items()}
        else:
            flat[key] = value
    return flat


def label(setting: Setting) -> str:
    """A setting in a line, by the last part of each name."""
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in setting.items()) or "as it is"
