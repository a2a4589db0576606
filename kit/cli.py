"""The command line: `kit ...`. Thin; --json prints one object on stdout, progress and warnings go to stderr.

Exit codes: 0 done, 1 a finding or a failure, 2 a wrong call, 130 interrupted.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.cluster import Cluster
from kit.errors import InputError, KitError
from kit.recipe import Recipe

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error is a sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("kit: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str, *words: str, under: Any = commands) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = under.add_parser(name, help=text, description=text)
        one.set_defaults(command=command)
        for word in words:
            OPTIONS[word](one)
        return one

    add("demo", demo, "run every notebook headless on the embedded default").add_argument("--out", default="demo")
    one = add("check", check, "what this cluster is, and where its profile is wrong", "cluster", "json")
    one.add_argument("--probe", metavar="PROFILE", help="measure GPUs and links in a job of minutes; write the profile")
    one = add("prepare", prepare, "conversations to a packed dataset folder", "recipe", "json")
    one.add_argument("--out", default="prepared", help="folder that holds prepared datasets")
    one.add_argument("--workers", type=int, default=1, help="processes; the bytes written are the same for any number")
    one.add_argument("--engine", default="tokenizers", help="tokenizers, or gigatoken (pip install kit[fast])")
    one.add_argument("--tasks", type=int, default=0, metavar="N", help="as a Slurm array of N tasks; returns at once")
    one.add_argument("--cluster", default="local", help="with --tasks: cluster profile or the name of a shipped one")
    one = add("data", lambda o: 2, "prepared data in other formats; documents without their near copies")
    groups = one.add_subparsers(required=True)
    one = add("export", data_export, "a prepared folder as Megatron .bin/.idx (no loss mask) or parquet", under=groups)
    one.add_argument("folder")
    one.add_argument("out")
    one.add_argument("--format", choices=("megatron", "parquet"), required=True)
    one = add("shards", data_shards, "raw documents as WebDataset tar files", under=groups)
    one = add("dedup", data_dedup, "leave out near copies by MinHash (pip install kit[dedup])", "json", under=groups)
    for made in (groups.choices["shards"], one):
        made.add_argument("source", help="file, folder or hub id")
        made.add_argument("out")
        made.add_argument("--lang", default="", help="only rows of this language")
    add("predict", predict, "does it fit, how long will it take", "recipe", "cluster", "json")
    one = add("tune", tune, "the fastest settings that fit and keep the batch", "recipe", "cluster", "json")
    one.add_argument("--nodes", action="store_true", help="also other numbers of nodes")
    add("calibrate", calibrate, "forecast beside what a finished run took, and what that says", "run", "json")
    one = add("lint", lint, "what is wrong with sbatch scripts", "json")
    one.add_argument("scripts", nargs="+", metavar="SCRIPT")
    one.add_argument("--cluster", help="cluster profile, for what only the cluster knows")
    one.add_argument("--fix", action="store_true", help="write the safe fixes into the scripts")
    one = add("launch", launch, "freeze, submit, return at once", "recipe", "cluster", "json")
    one.add_argument("--wait", action="store_true", help="stay until it ends; its exit code is this command's")
    one.add_argument("--anyway", action="store_true", help="also where the forecast says that it does not fit")
    add("runs", runs, "every run that can be found", "json")
    add("state", state, "how a run is, or how it ended and why", "run", "json")
    add("cancel", cancel, "end a run", "run")
    one = add("watch", watch, "loss and every GPU of every node", "run")
    one.add_argument("--once", action="store_true", help="print the state now and stop")
    one.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    groups = add("checkpoint", lambda o: 2, "look at checkpoints, time them, plan them").add_subparsers(required=True)
    one = add("inspect", inspect, "format, tensors, bytes, and what is wrong", "json", under=groups)
    one.add_argument("path")
    one = add("time", time_load, "how long loading takes, with proof of cold or warm", "json", under=groups)
    one.add_argument("path")
    one.add_argument("--cold", action="store_true", help="evict first, and fail where that cannot be proven")
    add("plan", plan, "how often to save, and the storage that takes", "recipe", "cluster", "json", under=groups)
    groups = add("adapter", lambda o: 2, "the adapter out of shards, into the base, onto a hub").add_subparsers(
        required=True
    )
    one = add("export", export, "adapter_model.safetensors from a checkpoint or run", under=groups)
    one.add_argument("checkpoint")
    one.add_argument("out")
    one = add("merge", merge, "base + adapter, shard by shard", under=groups)
    for name in ("adapter", "base", "out"):
        one.add_argument(name)
    one = add("push", push, "upload an adapter folder to a hub repository", under=groups)
    one.add_argument("adapter")
    one.add_argument("repo")
    one = add("run", run_notebook, "execute a notebook; its end is told truthfully")
    one.add_argument("notebook")
    one.add_argument("out")
    one.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    one.add_argument("-f", dest="file", metavar="PARAMS.yaml")
    return parser


def _recipe_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="recipe file, or the name of a shipped one")
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as schedule.lr=1e-4"
    )


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], Any]] = {
    "recipe": _recipe_option,
    "cluster": lambda p: p.add_argument(
        "--cluster", default="local", help="cluster profile or the name of a shipped one"
    ),
    "run": lambda p: p.add_argument("run", help="run folder, run name or job id"),
    "json": lambda p: p.add_argument("--json", action="store_true", help="one JSON object on stdout"),
}


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping."""
    if wrong := [w for w in words if "=" not in w]:
        raise InputError(f"{wrong[0]!r} is no NAME=VALUE.")
    return dict(w.split("=", 1) for w in words)


def _recipe(options: argparse.Namespace) -> Recipe:
    return Recipe.load(options.recipe, **_pairs(options.set))


def _say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(options: argparse.Namespace, value: Any, lines: Sequence[str]) -> None:
    print(json.dumps(value, default=str) if options.json else "\n".join(lines))


def demo(options: argparse.Namespace) -> int:
    """`kit demo`: all notebooks, end to end."""
    from kit.demo import demo as run_demo

    return run_demo(Path(options.out))


def check(options: argparse.Namespace) -> int:
    """`kit check`: exit 1 where the profile and the machine disagree."""
    from kit.cluster import detect

    cluster = Cluster.load(options.cluster)
    if options.probe:
        from kit.probe import measure

        print(measure(cluster, Path(options.probe), _say))
        return 0
    found = detect(cluster)
    lines = [
        f"{f.name:20} {f.value}  [{f.how}]" + (f"\n{'':20} PROBLEM: {f.problem}" if f.problem else "") for f in found
    ]
    _print(options, {"findings": [dataclasses.asdict(f) for f in found]}, lines)
    return int(any(f.problem for f in found))


def prepare(options: argparse.Namespace) -> int:
    """`kit prepare`."""
    from kit.data import prepare as prepare_dataset

    recipe = _recipe(options)
    if options.tasks:
        from kit.batch import submit

        made = submit(recipe, Cluster.load(options.cluster), Path(options.out), options.tasks, options.engine)
        _print(options, {"runs": [str(run.path) for run in made]}, [f"{run.path}  job {run.job_id}" for run in made])
        return 0
    dataset = prepare_dataset(recipe, Path(options.out), _say, options.engine, options.workers)
    value = dataset.as_dict(recipe)
    lines = [f"{dataset.path}"] + [f"{k}: {v}" for k, v in value["splits"].items()]
    lines += [f"ledger: {value['ledger']}", f"dropped rows: {value['dropped_rows']}"]
    _print(options, value, [*lines, f"{value['optimizer_steps']} optimizer steps"])
    return 0


def data_export(options: argparse.Namespace) -> int:
    """`kit data export`."""
    from kit.data import Dataset
    from kit.export import to_megatron, to_parquet

    write = to_megatron if options.format == "megatron" else to_parquet
    print(write(Dataset(Path(options.folder)), Path(options.out)))
    return 0


def data_shards(options: argparse.Namespace) -> int:
    """`kit data shards`."""
    from kit.export import to_webdataset
    from kit.sources import open_source

    print(to_webdataset(open_source(options.source), Path(options.out), lang=options.lang))
    return 0


def data_dedup(options: argparse.Namespace) -> int:
    """`kit data dedup`."""
    from kit.dedup import deduplicate
    from kit.sources import open_source

    found = deduplicate(open_source(options.source), Path(options.out), options.lang)
    _print(options, found, [f"{k}: {v:,}" for k, v in found.items()])
    return 0


def tune(options: argparse.Namespace) -> int:
    """`kit tune`: exit 1 where nothing fits."""
    from kit.tune import table
    from kit.tune import tune as settings_that_fit

    found = settings_that_fit(_recipe(options), Cluster.load(options.cluster), options.nodes)
    _print(options, {"choices": [c.as_dict() for c in found]}, [table(found)])
    return int(not found)


def calibrate(options: argparse.Namespace) -> int:
    """`kit calibrate`."""
    from kit.calibrate import calibrate_run
    from kit.run import Run

    found = calibrate_run(Run.attach(options.run))
    rows = [
        f"{key:14} forecast {was if was is None else f'{was:.4g}'}, was {now:.4g}"
        for key, (was, now) in found.rows.items()
    ]
    _print(options, dataclasses.asdict(found), [*rows, found.says])
    return 0


def predict(options: argparse.Namespace) -> int:
    """`kit predict`: exit 1 where it does not fit."""
    from kit.data import find_prepared
    from kit.timing import predict as forecast

    recipe = _recipe(options)
    prepared = find_prepared(recipe)
    found = forecast(recipe, Cluster.load(options.cluster), prepared.manifest if prepared else None)
    _print(options, found.as_dict(), found.lines())
    return int(found.as_dict()["memory"]["verdict"] == "does not fit")


def lint(options: argparse.Namespace) -> int:
    """`kit lint`: exit 1 when there is an error."""
    from kit.lint import fix_file, lint_file

    cluster = Cluster.load(options.cluster) if options.cluster else None
    if options.fix:
        for path in map(Path, options.scripts):
            fix_file(path)
    found = [f for script in options.scripts for f in lint_file(Path(script), cluster)]
    lines = [f"{f.file}:{f.line}: {f.severity} {f.rule}: {f.message} {f.fix}" for f in found]
    _print(options, {"findings": [dataclasses.asdict(f) for f in found]}, lines)
    return int(any(f.severity == "error" for f in found))


def launch(options: argparse.Namespace) -> int:
    """`kit launch`: with --wait, the exit code is the job's."""
    from kit import slurm

    run = slurm.launch(_recipe(options), Cluster.load(options.cluster), anyway=options.anyway)
    _print(options, {"run": str(run.path), "job_id": run.job_id}, [f"{run.path}", f"job {run.job_id}"])
    if not options.wait:
        return 0
    _say(
        f"waiting; `kit watch {run.path.name}` shows it, Ctrl-C {'ends' if 'local' in str(run.job_id) else 'leaves'} it"
    )
    end = slurm.wait(run)
    _say(f"{end.state}{': ' + end.cause if end.cause else ''}")
    return 0 if end.state == "COMPLETED" else end.exit_code or 1


def runs(options: argparse.Namespace) -> int:
    """`kit runs`: newest first."""
    from kit.run import runs as all_runs
    from kit.slurm import state as state_of

    found = [(run, state_of(run)) for run in all_runs()]
    rows = [{"run": str(r.path), "job_id": r.job_id, "state": s.state} for r, s in found]
    _print(options, {"runs": rows}, [f"{r.path.name:40} {r.job_id!s:16} {s.state}" for r, s in found])
    return 0


def state(options: argparse.Namespace) -> int:
    """`kit state`."""
    from kit.run import Run
    from kit.slurm import state as state_of

    found = state_of(Run.attach(options.run))
    _print(options, found.as_dict(), found.lines())
    return 0


def cancel(options: argparse.Namespace) -> int:
    """`kit cancel`."""
    from kit import slurm
    from kit.run import Run

    slurm.cancel(Run.attach(options.run))
    return 0


def watch(options: argparse.Namespace) -> int:
    """`kit watch`: the status line until the run ends, or once."""
    from kit.board import watch as board_of
    from kit.files import write

    board = board_of(options.run)
    while not options.once and not board.ended:
        board.wait(5)
        _say(board.status())
    print(board.status())
    if options.html:
        write(Path(options.html), board.html())
    return 0


def inspect(options: argparse.Namespace) -> int:
    """`kit checkpoint inspect`: exit 1 where something is wrong."""
    from kit.checkpoint import inspect as look

    value = look(Path(options.path)).as_dict()
    _print(options, value, [f"{k}: {v}" for k, v in value.items()])
    return int(bool(value["problems"]))


def time_load(options: argparse.Namespace) -> int:
    """`kit checkpoint time`."""
    from kit.loadtime import time_load as measure

    found = measure(Path(options.path), cold=options.cold)
    _print(options, {"methods": [m.as_dict() for m in found]}, [str(m) for m in found])
    return 0


def plan(options: argparse.Namespace) -> int:
    """`kit checkpoint plan`."""
    from kit.checkpoint import plan_for

    found = plan_for(_recipe(options), Cluster.load(options.cluster))
    _print(options, dataclasses.asdict(found), found.lines())
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


def run_notebook(options: argparse.Namespace) -> int:
    """`kit run`."""
    from kit.execute import execute
    from kit.parameters import read_values

    given: dict[str, Any] = {}
    if options.file:
        given |= read_values(Path(options.file))
    print(execute(Path(options.notebook), Path(options.out), given | _pairs(options.parameters)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
