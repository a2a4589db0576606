"""Profiles: fill one with the facts that it lacks, and begin a new one."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AbstractTable

from kit.config import schema
from kit.config.cluster import Cluster, Nodes
from kit.errors import InputError
from kit.show import Answer


def filled_profile(cluster: Cluster, facts: Mapping[str, Any]) -> Answer:
    """The cluster's profile with the facts that it lacks; shown with a plus at each added line."""
    written = cluster.toml(defaults=False)
    filled = fill(written, facts)
    lines = difflib.ndiff(written.splitlines(), filled.splitlines())
    return Answer({"profile": filled}, "\n".join(line.rstrip() for line in lines))


def fill(text: str, facts: Mapping[str, Any]) -> str:
    """A profile with the keys that it lacks; what a person wrote stays, with comments. Raises InputError if invalid.

    `facts` maps keys such as nodes.gpus to values.
    """
    try:
        document = tomlkit.parse(text)
    except tomlkit.exceptions.ParseError as error:
        raise InputError(f"The profile is not valid TOML: {error}.") from None
    for key, value in facts.items():
        table_name, name = key.split(".")
        if table_name not in document:
            document[table_name] = tomlkit.table(is_super_table=isinstance(value, dict))
        table = document[table_name]
        if not isinstance(table, AbstractTable):
            raise InputError(f"This profile cannot be added to: begin the table with its [{table_name}].")
        if name not in table:
            table[name] = _table(value) if isinstance(value, dict) else value
    filled = tomlkit.dumps(document)
    schema.build(Cluster, tomllib.loads(filled), "the filled profile")
    return filled


def _table(values: Mapping[str, Any]) -> AbstractTable:
    table = tomlkit.table()
    table.update(values)
    return table


def start_profile(out: Path, base: Path | None) -> tuple[str, Cluster]:
    """The text and the cluster with which the profile `out` begins: `base`, or one that claims nothing.

    Raises InputError where `out` exists and is not `base`.
    """
    if out.exists() and not (base and base.samefile(out)):
        raise InputError(f"{out} exists, and is not the profile that is checked: name a new file.")
    if base:
        return base.read_text(), Cluster.load(base)
    return f'name = "{out.stem}"\n', Cluster(out.stem, Nodes(cpus=1, ram_gib=0.5))
