"""`kit checkpoint`, `adapter`: what a run leaves."""

import argparse
import dataclasses
from pathlib import Path

from kit.cluster import Cluster
from kit.command import Commands, add, group, recipe_of, show


def register(commands: Commands) -> None:
    """These commands' parsers."""
    checkpoint = group(commands, "checkpoint", "look at checkpoints, time them, plan them")
    one = add(checkpoint, "inspect", inspect, "format, tensors, bytes, and what is wrong", "json")
    one.add_argument("path")
    one = add(checkpoint, "time", time_load, "how long loading takes, with proof of cold or warm", "json")
    one.add_argument("path")
    one.add_argument("--cold", action="store_true", help="evict first, and fail where that cannot be proven")
    add(checkpoint, "plan", plan, "how often to save, and the storage that takes", "recipe", "cluster", "json")
    adapter = group(commands, "adapter", "the adapter out of shards, into the base, onto a hub")
    one = add(adapter, "export", export, "adapter_model.safetensors from a checkpoint or run")
    one.add_argument("checkpoint")
    one.add_argument("out")
    one = add(adapter, "merge", merge, "base + adapter, shard by shard")
    for name in ("adapter", "base", "out"):
        one.add_argument(name)
    one = add(adapter, "push", push, "upload an adapter folder to a hub repository")
    one.add_argument("adapter")
    one.add_argument("repo")


def inspect(options: argparse.Namespace) -> int:
    """`kit checkpoint inspect`: exit 1 where something is wrong."""
    from kit.checkpoint import inspect as look

    value = look(Path(options.path)).as_dict()
    show(options, value, [f"{k}: {v}" for k, v in value.items()])
    return int(bool(value["problems"]))


def time_load(options: argparse.Namespace) -> int:
    """`kit checkpoint time`."""
    from kit.loadtime import time_load as measure

    found = measure(Path(options.path), cold=options.cold)
    show(options, {"methods": [m.as_dict() for m in found]}, [str(m) for m in found])
    return 0


def plan(options: argparse.Namespace) -> int:
    """`kit checkpoint plan`."""
    from kit.checkpoint import plan_for

    found = plan_for(recipe_of(options), Cluster.load(options.cluster))
    show(options, dataclasses.asdict(found), found.lines())
    return 0


def export(options: argparse.Namespace) -> int:
    """`kit adapter export`."""
    from kit.adapter import export as export_adapter
    from kit.run import Run

    here = Path(options.checkpoint)
    print(export_adapter(here if here.exists() else Run.attach(options.checkpoint).path, Path(options.out)))
    return 0


def merge(options: argparse.Namespace) -> int:
    """`kit adapter merge`."""
    from kit.adapter import merge as merge_adapter

    print(merge_adapter(Path(options.adapter), options.base, Path(options.out)))
    return 0


def push(options: argparse.Namespace) -> int:
    """`kit adapter push`."""
    from kit.adapter import push as push_adapter

    print(push_adapter(Path(options.adapter), options.repo))
    return 0
